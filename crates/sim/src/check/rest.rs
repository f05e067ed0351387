//! What must hold at the end of a run, and what a rank may hold for its peers during it.

use super::{Checker, Violation, check};
use penstock_core::Route;
use penstock_core::layout::{Book, Slice};
use penstock_core::optimizer::STATES_MAX;
use penstock_core::roles::Fold;
use penstock_core::types::Rank;

/// An owner's scratch buffers: of each other rank and each book at most its window, that of what overtakes, and the slices that
/// go out of turn; of what is gathered, contributions to two rounds; and of what is rounded on the wire, a frame that is being
/// written and one that is being read.
///
/// # Errors
/// [`Checker::OwnerMemory`].
pub fn check_owner_memory(
    rank: Rank,
    held_bytes: u64,
    books: &[std::sync::Arc<Book>],
    ranks: u32,
    window_bytes: u64,
    exceptions: u64,
) -> Result<(), Violation> {
    let summed = |book: &Book, tensor| book.tensors[tensor as usize].route != Route::Gather;
    let largest = |book: &Book| {
        let slices = book.slices.iter().filter(|slice| summed(book, slice.tensor));
        slices.map(|slice| u64::from(slice.len_bytes)).max().unwrap_or(0)
    };
    let gathered = |book: &Book| {
        let tensors = book.tensors.iter().filter(|tensor| tensor.route == Route::Gather);
        2 * tensors.map(penstock_core::layout::Tensor::len_bytes).sum::<u64>()
    };
    let rounded = |book: &Book| {
        let slices = book.slices.iter().filter(|slice| slice.wire_bytes < slice.len_bytes);
        2 * slices.map(|slice| u64::from(slice.wire_bytes)).max().unwrap_or(0)
    };
    let in_frames = books.iter().map(|book| rounded(book)).max().unwrap_or(0);
    // Results that it keeps, and the next one of a slice while it is made.
    let keeping = |book: &Book| match book.roles.rules.fold {
        // Values that it updates and their states, and of rounded ones what is under way in answers, in both types.
        Fold::Updated => owned(book, rank) * (3 + STATES_MAX as u64),
        _ if book.roles.rules.keep_results() => owned(book, rank) + largest(book),
        _ => 0,
    };
    let kept: u64 = books.iter().map(|book| keeping(book)).sum();
    let per_peer: u64 = books
        .iter()
        .map(|book| {
            let exceptions = exceptions * largest(book) + gathered(book);
            window_bytes.saturating_mul(2).saturating_add(exceptions)
        })
        .fold(in_frames, u64::saturating_add);
    let bound = per_peer.saturating_mul(u64::from(ranks - 1)).saturating_add(kept);
    check(held_bytes <= bound, Checker::OwnerMemory, || {
        format!("rank {rank} holds {held_bytes} bytes for its peers; the windows allow {bound}")
    })
}

/// Bytes of the slices of a book's store that a rank owns, in the type that they are summed in.
fn owned(book: &Book, rank: Rank) -> u64 {
    let of_rank =
        |slice: &&Slice| slice.owner == rank && book.tensors[slice.tensor as usize].route == Route::STORE;
    book.slices.iter().filter(of_rank).map(|slice| u64::from(slice.len_bytes)).sum()
}

/// Payload bytes that a rank sends in one round of `book` to which all contribute that may. Of the store: every slice it does not own
/// to its owner, and every slice it owns to each other rank that contributes; with even shards of S bytes that is 2 (n-1)/n S. With servers apart a worker sends all S, and a
/// server what it owns to each worker. With groups a member sends all S to its head, and a head all S to each other member, unrounded; to
/// the owners, and as one, it sends what a worker does if the heads are all the workers. Of collectives:
/// what their cost functions say.
#[must_use]
pub fn round_bytes(book: &Book, rank: Rank, ranks: u32) -> u64 {
    let groups = &book.roles.groups;
    let in_store =
        book.slices.iter().filter(|slice| book.tensors[slice.tensor as usize].route == Route::STORE);
    let inside = match groups.of(rank) {
        Some(group) if group.head() == rank => u64::from(group.members.count() - 1),
        Some(_) => 1,
        None => 0,
    };
    let inside = inside * in_store.map(|slice| u64::from(slice.len_bytes)).sum::<u64>();
    let (total, owned) = (book.owned_bytes.iter().sum::<u64>(), book.owned_bytes[rank.index()]);
    let contributes = |rank: Rank| {
        let speaks = groups.of(rank).is_none_or(|group| group.head() == rank);
        book.roles.members.contains(rank) && book.roles.rules.needs(rank) && speaks
    };
    let others = (0..ranks).filter(|other| *other != rank.0 && contributes(Rank(*other))).count() as u64;
    let collective = book.slices.iter().map(|slice| {
        let tensor = &book.tensors[slice.tensor as usize];
        let Some(algorithm) = tensor.route.collective() else { return 0 };
        let elem_bytes = tensor.dtype.size_bytes() as u64;
        let position = (rank.0 + ranks - slice.owner.0) % ranks;
        algorithm.slice(u64::from(slice.len_bytes) / elem_bytes, elem_bytes, ranks).sent[position as usize]
    });
    let pushed = if contributes(rank) { total - owned } else { 0 };
    inside + pushed + owned * others + collective.sum::<u64>()
}

/// The payload bytes that left a rank are those of `rounds` full rounds.
///
/// # Errors
/// [`Checker::Bytes`].
pub fn check_bytes(
    rank: Rank,
    sent_bytes: u64,
    books: &[std::sync::Arc<Book>],
    ranks: u32,
    rounds: u64,
) -> Result<(), Violation> {
    let want = rounds * books.iter().map(|book| round_bytes(book, rank, ranks)).sum::<u64>();
    check(sent_bytes == want, Checker::Bytes, || {
        format!("rank {rank} sent {sent_bytes} bytes of payload in {rounds} rounds; the formula says {want}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_core::layout::Tensor;
    use penstock_core::roles::{Groups, MustBeIn, Roles, Rules};
    use penstock_core::types::Dtype;
    use penstock_core::{Members, Slicing};
    use std::sync::Arc;

    fn book() -> Arc<Book> {
        let tensors = (0..16).map(|i| Tensor::new(format!("t{i}"), 0, Dtype::F32, 1024)).collect();
        Arc::new(Book::new("model", vec!["fc".into()], tensors, 4, 4096, 1).unwrap())
    }

    #[test]
    fn the_formula_for_even_shards() {
        let total = 16 * 4096;
        assert_eq!(round_bytes(&book(), Rank(2), 4), 2 * 3 * total / 4);
        assert!(check_bytes(Rank(2), 3 * 2 * 3 * total / 4, &[book()], 4, 3).is_ok());
        let error = check_bytes(Rank(2), 3 * 2 * 3 * total / 4 + 1, &[book()], 4, 3).unwrap_err();
        assert_eq!(error.checker, Checker::Bytes);
    }

    #[test]
    fn the_formula_for_groups() {
        let groups = |groups: &[&[u32]]| {
            let members = |some: &&[u32]| some.iter().copied().map(Rank).collect::<Members>();
            Groups::of_members(groups.iter().map(members))
        };
        let book = |owners: &[u32], members, must_be_in, groups| {
            let rules = Rules { must_be_in, ..Rules::default() };
            let roles = Roles { members, owners: owners.iter().copied().map(Rank).collect(), rules, groups };
            let tensors = (0..16).map(|i| Tensor::new(format!("t{i}"), 0, Dtype::F32, 1024)).collect();
            Book::deal("model", vec!["fc".into()], tensors, &roles, Slicing::fixed(4096, 1)).unwrap()
        };
        let total = 16 * 4096;
        let sent = |book: &Book, ranks| {
            (0..ranks).map(|rank| round_bytes(book, Rank(rank), ranks)).collect::<Vec<_>>()
        };
        // Two hosts of two: as two workers between them, 2 (n-1)/n S, and S each way inside.
        let hosts = book(&[0, 2], Members::all(4), MustBeIn::Everybody, groups(&[&[0, 1], &[2, 3]]));
        assert_eq!(sent(&hosts, 4), [2 * total, total, 2 * total, total]);
        // A server's are C n / S, not W n / S.
        let workers = MustBeIn::These(Members::all(4));
        let apart = book(&[4, 5], Members::all(6), workers, groups(&[&[0], &[1, 2, 3]]));
        assert_eq!(sent(&apart, 6), [total, 3 * total, total, total, total, total]);
    }

    #[test]
    fn an_owner_may_hold_what_the_windows_allow() {
        let bound = 3 * (2 * 8192 + 4096);
        assert!(check_owner_memory(Rank(0), bound, &[book()], 4, 8192, 1).is_ok());
        let error = check_owner_memory(Rank(0), bound + 1, &[book()], 4, 8192, 1).unwrap_err();
        assert_eq!(error.checker, Checker::OwnerMemory);
    }
}
