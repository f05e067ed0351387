//! How many blocks a call takes, into which pieces it is cut, and by which algorithm an allreduce goes.

use super::request::Request;
use super::shape::{Shape, VECTORS_MAX};
use super::signature::CallKind;
use crate::cost::Rates;
use crate::error::Error;
use crate::limits;
use crate::parts::{floor_log2, part_start};
use crate::scheme::{MARGIN, best_algorithm};
use crate::way::Algorithm;
use std::ops::{Range, RangeInclusive};

/// What the system sends down in one packet, headers left out: 45 segments of 1448 bytes, or of 1428. A frame that is a little
/// longer costs a whole packet more.
const PACKET_BYTES: u64 = 64_000;
/// Longest slice, where one rank sums the whole of it.
const SLICE_BYTES: u64 = 2 * PACKET_BYTES;
/// All contributions to such a slice, which stay in a core's cache that way, unless there are so many that slices would be
/// shorter than a packet.
const CONTRIBUTIONS_BYTES: u64 = 512 << 10;
/// Slices of a tree, where each slice's root shows in the bits: so they stay as they were.
const TREE_BYTES: RangeInclusive<u64> = 64 << 10..=128 << 10;
/// Longest part of a slice, where each rank sums a part.
const PART_BYTES: u64 = 128 << 10;
/// Longest slice of that kind.
const PARTED_BYTES_MAX: u64 = 8 << 20;
/// All ranks' contributions to one slice, where one rank sums the whole of it.
const CONTRIBUTED_BYTES_MAX: u64 = 64 << 20;
/// A slice of this length is worth the messages that it takes: below it fewer ranks are owners.
const SPREAD_BYTES_MIN: u64 = 4 << 10;
/// Piece of a tensor that is passed on from rank to rank.
const CHAIN_PIECE_BYTES: u64 = 256 << 10;
/// Pieces of one call that are under way at a time, at least.
const PIECES_UNDER_WAY: u32 = 16;
/// Contributions of one call to the store that are under way at a time, of all ranks together, unless a turn is more: ranks
/// of one machine share its cache. On two cores with 32 MiB 8 ranks sum 53 MB in 0.89 of gloo's time so (median of four
/// sets of processes), and took 0.94 to 1.07 of it with turns and slices twice as large.
const STORE_UNDER_WAY_BYTES: u64 = 6 << 20;
/// Bytes of one call that are under way at a time where a rank keeps parts of each piece, unless pieces are fewer than
/// [`PIECES_UNDER_WAY`].
const UNDER_WAY_BYTES: u64 = 64 << 20;

/// What the root of a central server takes in at a time, from all together. More queues before its link until the switch drops:
/// 1 MB from each of 7 hosts takes 80 ms at 1 Gbit/s, and 66 ms so.
const CENTRAL_UNDER_WAY_BYTES: u64 = 3 << 20;

/// The number of slices of an allreduce, which are near-equal ([`part_start`]); 1 at least. Slice i has the
/// owner i mod `ranks`, but all slices of `central` have 0.
#[must_use]
pub fn slices(algorithm: Algorithm, elems: u64, elem_bytes: u64, ranks: u32) -> u32 {
    let (len_bytes, p) = (elems * elem_bytes, u64::from(ranks.max(1)));
    let in_turn = |count: u64| if count > p { count.next_multiple_of(p) } else { count };
    let share = CONTRIBUTIONS_BYTES / p;
    let whole = match algorithm {
        Algorithm::Tree => share.clamp(*TREE_BYTES.start(), *TREE_BYTES.end()),
        _ => (share / PACKET_BYTES * PACKET_BYTES).clamp(PACKET_BYTES, SLICE_BYTES),
    };
    let whole = whole.min(CONTRIBUTED_BYTES_MAX / p);
    let parted = |parts: u64| len_bytes.div_ceil((parts * PART_BYTES).min(PARTED_BYTES_MAX));
    let count = match algorithm {
        Algorithm::Store | Algorithm::Tree => {
            in_turn(len_bytes.div_ceil(whole).max(p.min(len_bytes / SPREAD_BYTES_MIN)))
        }
        Algorithm::Central => len_bytes.div_ceil(whole),
        Algorithm::Ring => parted(p),
        Algorithm::Butterfly => parted(1 << floor_log2(ranks)),
    };
    count.min(limits::CALL_PIECES_MAX as u64).clamp(1, elems.max(1)) as u32
}

/// Whether a sum has the same bits wherever its tensor is cut into calls of their own: every element is added up in one order,
/// whoever owns its slice.
///
/// * `vectors`: How many each rank gives. In the store a rank sends the sum of its own, rounded, unless it is the owner, which
///   adds them one by one: of several it shows who that is. By `central` it is always the same rank.
#[must_use]
pub fn any_cut_keeps_bits(algorithm: Algorithm, vectors: usize) -> bool {
    match algorithm {
        Algorithm::Store => vectors == 1,
        Algorithm::Central => true,
        Algorithm::Tree | Algorithm::Ring | Algorithm::Butterfly => false,
    }
}

/// The algorithm for an allreduce by the cost model, cut as [`slices`] says: the same for all who ask the same. It is the
/// store unless another takes a tenth less time ([`MARGIN`]), so that rates that differ a little give the same bits.
#[must_use]
pub fn choose(elems: u64, elem_bytes: u64, ranks: u32, rates: &Rates) -> Algorithm {
    if elems > limits::COST_ELEMS_MAX {
        return Algorithm::Store;
    }
    let seconds = |algorithm| {
        let count = u64::from(slices(algorithm, elems, elem_bytes, ranks));
        best_algorithm(elems, elem_bytes, ranks, count, rates, &[algorithm]).1
    };
    let mut best = (Algorithm::Store, seconds(Algorithm::Store) * (1.0 - MARGIN));
    for algorithm in Algorithm::ALL {
        let seconds = seconds(algorithm);
        if seconds < best.1 {
            best = (algorithm, seconds);
        }
    }
    best.0
}

/// Into how many pieces a call is cut, from what all ranks know alike; those of an all-to-all are each pair's own affair.
pub(super) fn pieces(shape: &Shape) -> u64 {
    let (len_bytes, elem_bytes) = (shape.len_bytes(), shape.elem_bytes as u64);
    let of = |algorithm| u64::from(slices(algorithm, len_bytes / elem_bytes, elem_bytes, shape.ranks));
    match shape.kind {
        CallKind::Allreduce { algorithm } => of(algorithm),
        CallKind::Reduce { .. } if len_bytes * u64::from(shape.ranks) <= SLICE_BYTES => 1,
        CallKind::Reduce { .. } => of(Algorithm::Store),
        _ => len_bytes.div_ceil(piece_bytes(shape)).max(1),
    }
}

/// Length of the pieces of a tensor that is not cut into slices; the last one may be shorter.
fn piece_bytes(shape: &Shape) -> u64 {
    let least = match shape.kind {
        CallKind::ReduceScatter => SLICE_BYTES,
        CallKind::Broadcast { .. } => CHAIN_PIECE_BYTES,
        _ => return limits::MESSAGE_BYTES_MAX as u64,
    };
    let few = shape.len_bytes().div_ceil(limits::CALL_PIECES_MAX as u64).next_multiple_of(64);
    least.max(few)
}

/// The bytes of a piece.
pub(super) fn piece(shape: &Shape, number: u32) -> Range<u64> {
    let (len_bytes, elem_bytes, number) = (shape.len_bytes(), shape.elem_bytes as u64, u64::from(number));
    match shape.kind {
        CallKind::Allreduce { .. } | CallKind::Reduce { .. } => {
            let start = |index| part_start(len_bytes / elem_bytes, pieces(shape), index) * elem_bytes;
            start(number)..start(number + 1)
        }
        _ => {
            let each = piece_bytes(shape);
            (number * each).min(len_bytes)..((number + 1) * each).min(len_bytes)
        }
    }
}

/// How many pieces may be under way at a time. Ranks need not agree: of the first turn that is not complete everywhere all
/// pieces are under way everywhere, for all earlier ones are complete and there is room for a turn.
pub(super) fn under_way(shape: &Shape) -> u32 {
    let (turn, first, ranks) = (turn(shape), piece(shape, 0), u64::from(shape.ranks.max(2)));
    let of_bytes = |bytes: u64| bytes / (first.end - first.start).max(1);
    let bounded = |count: u64, least| count.clamp(least, u64::from(PIECES_UNDER_WAY)) as u32;
    match shape.kind {
        CallKind::Allreduce { algorithm: Algorithm::Central } => {
            bounded(of_bytes(CENTRAL_UNDER_WAY_BYTES / (ranks - 1)), 2)
        }
        CallKind::Allreduce { algorithm: Algorithm::Store } | CallKind::Reduce { .. } => {
            let count = bounded(of_bytes(STORE_UNDER_WAY_BYTES / (ranks - 1)), 1);
            (count / turn * turn).max(turn)
        }
        _ => bounded(of_bytes(UNDER_WAY_BYTES), 4).max(2 * turn),
    }
}

/// So many pieces in a row have different owners, and so are dealt to one lane.
fn turn(shape: &Shape) -> u32 {
    match shape.kind {
        CallKind::Allreduce { algorithm: Algorithm::Store | Algorithm::Tree } | CallKind::Reduce { .. } => {
            shape.ranks
        }
        _ => 1,
    }
}

/// One lane's share of a call: every so-and-so-many-th turn of its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The first one's number, below `of`.
    pub index: u32,
    /// Lanes among which the pieces are dealt.
    pub of: u32,
}

impl Share {
    /// Of a call that one lane carries alone.
    pub const ALL: Self = Self { index: 0, of: 1 };

    /// How many of a call's pieces there are in this share.
    pub(super) fn count(self, shape: &Shape) -> u64 {
        let (pieces, turn) = (pieces(shape), u64::from(turn(shape)));
        let (index, of) = (u64::from(self.index), u64::from(self.of));
        let rest = (pieces % (turn * of)).saturating_sub(index * turn).min(turn);
        pieces / (turn * of) * turn + rest
    }

    /// The number of the piece that this rank begins as its `nth` one.
    ///
    /// A turn begins with the piece that the rank owns itself, goes on with the next rank's, and so on: if all began with the
    /// same one, all would send to its owner at first, and to the last owner at last, whose answers would then have the
    /// wire for themselves.
    pub(super) fn piece(self, shape: &Shape, nth: u32) -> u32 {
        let turn = turn(shape);
        let start = (nth / turn * self.of + self.index) * turn;
        // The last turn may be a short one.
        let len = (pieces(shape) - u64::from(start)).min(u64::from(turn)) as u32;
        start + (nth % turn + shape.me) % len
    }
}

/// Among how many of `lanes` a call is dealt: those that get a piece of one that is long, and whose pieces are the same on all
/// ranks.
#[must_use]
pub fn lanes(shape: &Shape, lanes: u32) -> u32 {
    if !(shape.kind.computes() || matches!(shape.kind, CallKind::Broadcast { .. })) {
        return 1;
    }
    pieces(shape).div_ceil(u64::from(turn(shape))).min(u64::from(lanes)).max(1) as u32
}

/// Whether a request is one that this rank can make in a group: whom it names is there, and there are as many blocks as it
/// takes, of fitting lengths.
///
/// # Errors
/// [`Error::Config`] if not.
pub fn check(shape: &Shape, request: Request) -> Result<(), Error> {
    let Shape { kind, ranks, me, inputs, outputs, elem_bytes } = shape;
    match request {
        Request::Send { to: peer, .. } | Request::Receive { from: peer, .. }
            if peer >= *ranks || peer == *me =>
        {
            return Err(Error::Config(format!(
                "a message between {me} and {peer} of a group of {ranks}; it takes two"
            )));
        }
        Request::ReceiveAny { .. } if *ranks < 2 => {
            return Err(Error::Config("nobody else is in the group to receive from".into()));
        }
        _ => {}
    }
    let at_root = |count| if kind.root() == Some(*me) { count } else { 0 };
    let all = *ranks as usize;
    let (given, wanted) = (inputs.len(), outputs.len());
    let vectors = outputs.len().clamp(1, VECTORS_MAX);
    let expected = match kind {
        CallKind::Message if matches!(request, Request::Send { .. }) => (1, 0),
        CallKind::Message => (0, 1),
        CallKind::Barrier => (0, 0),
        CallKind::Broadcast { .. } => (0, vectors),
        CallKind::Reduce { .. } => (1, at_root(1)),
        CallKind::Gather { .. } => (1, at_root(all)),
        CallKind::Scatter { .. } => (at_root(all), 1),
        CallKind::Allreduce { .. } => (vectors, vectors),
        CallKind::AllGather => (1, all),
        CallKind::ReduceScatter => (all, 1),
        CallKind::AllToAll => (all, all),
    };
    let root_fits = kind.root().is_none_or(|root| root < *ranks);
    let mut lens = inputs.iter().chain(outputs);
    let first = lens.clone().next().copied().unwrap_or(0);
    let equal = *kind == CallKind::AllToAll || lens.all(|len| *len == first);
    let whole = !kind.computes() || first.is_multiple_of(*elem_bytes as u64);
    if (given, wanted) != expected || !root_fits || !equal || !whole {
        return Err(Error::Config(format!(
            "{}: {given} blocks given and {wanted} to be filled, of {first} bytes and others, by {me} of {ranks} ranks; \
             expected {} and {} blocks of equal length in whole elements, and a root in the group",
            kind.name(),
            expected.0,
            expected.1
        )));
    }
    let own = |blocks: &[u64]| blocks[*me as usize];
    if *kind == CallKind::AllToAll && own(inputs) != own(outputs) {
        return Err(Error::Config(format!(
            "{}: rank {me} of {ranks} gives itself a block of {} bytes and expects one of {}",
            kind.name(),
            own(inputs),
            own(outputs)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::stage::{Buffer, Local, Span, Transfer};
    use super::*;

    #[test]
    fn a_rank_that_expects_another_block_of_itself_than_it_gives_is_refused() {
        let request = Request::Collective(CallKind::AllToAll);
        let shape = |own: u64| Shape {
            kind: CallKind::AllToAll,
            ranks: 2,
            me: 1,
            elem_bytes: 1,
            inputs: vec![3, 8],
            outputs: vec![5, own],
        };
        assert!(check(&shape(8), request).is_ok());
        let text = check(&shape(12), request).unwrap_err().to_string();
        assert!(text.contains("a block of 8 bytes and expects one of 12"), "{text}");
    }

    #[test]
    fn the_store_is_chosen_unless_another_is_clearly_faster() {
        let choice = |elems, p| choose(elems, 4, p, &Rates::default());
        for p in [2, 4, 8] {
            assert_eq!([0, 1, 100, 1 << 18, 13_250_000].map(|n| choice(n, p)), [Algorithm::Store; 5], "{p}");
        }
        assert_eq!(
            [1000, 1024].map(|n| choice(n, 64)),
            [Algorithm::Butterfly; 2],
            "the owner would take 63 times that"
        );
        assert_eq!(choose(u64::MAX / 8, 4, 2, &Rates::default()), Algorithm::Store);
    }

    /// What is added up for a piece, on all ranks together: whose contributions, in which order, of which of its bytes.
    fn additions(shape: &Shape, number: u32) -> Vec<(Vec<u32>, Range<u64>)> {
        let start = piece(shape, number).start;
        let of_rank = |me| {
            let plan = Shape { me, ..shape.clone() }.plan(number);
            // Each scratch buffer takes one part, in the order in which they come.
            let to_scratch = |came: &&Transfer| matches!(came.bytes.of, Buffer::Scratch(_));
            let receives = plan.stages.iter().flat_map(|stage| &stage.receives);
            let peers: Vec<u32> = receives.filter(to_scratch).map(|came| came.peer).collect();
            let whose = move |span: &Span| match span.of {
                Buffer::Scratch(index) => peers[index as usize],
                Buffer::Input(_) | Buffer::Output(_) => me,
            };
            let sums = plan.stages.into_iter().flat_map(|stage| stage.then).filter_map(|local| match local {
                Local::Reduce { inputs, output, .. } => Some((inputs, output.range)),
                Local::Copy(..) => None,
            });
            sums.map(move |(inputs, output)| {
                let bytes = output.start as u64 - start..output.end as u64 - start;
                (inputs.iter().map(&whose).collect::<Vec<u32>>(), bytes)
            })
            .collect::<Vec<_>>()
        };
        let mut all: Vec<_> = (0..shape.ranks).flat_map(of_rank).collect();
        all.sort_by_key(|(whose, bytes)| (whose.clone(), bytes.start));
        all
    }

    #[test]
    fn where_any_cut_keeps_bits_each_element_is_added_up_in_one_order_and_else_not() {
        for (algorithm, vectors, ranks) in
            Algorithm::ALL.into_iter().flat_map(|a| [(a, 1, 3), (a, 2, 3), (a, 1, 5), (a, 3, 5)])
        {
            let kind = CallKind::Allreduce { algorithm };
            let lens = vec![15 * (8 << 20); vectors];
            let shape = Shape { kind, ranks, me: 0, elem_bytes: 4, inputs: lens.clone(), outputs: lens };
            let sums: Vec<_> = (0..ranks).map(|number| additions(&shape, number)).collect();
            let whole = piece(&shape, 0);
            let in_one_order = sums.iter().all(|of_piece| {
                let whose = |sums: &[(Vec<u32>, Range<u64>)]| {
                    sums.iter().map(|(whose, _)| whose.clone()).collect::<Vec<_>>()
                };
                let uncut = |bytes: &Range<u64>| bytes.start == 0 && bytes.end.abs_diff(whole.end) <= 4;
                whose(of_piece) == whose(&sums[0]) && of_piece.iter().all(|(_, bytes)| uncut(bytes))
            });
            let claimed = any_cut_keeps_bits(algorithm, vectors);
            assert_eq!(claimed, in_one_order, "{algorithm:?}, {vectors} vectors on {ranks} ranks: {sums:?}");
        }
    }

    #[test]
    fn no_two_ranks_begin_by_sending_to_the_same_owner() {
        let ranks = 8;
        for algorithm in [Algorithm::Store, Algorithm::Tree] {
            for (nth, index) in (0..32).flat_map(|nth| [0, 1].map(|index| (nth, index))) {
                let owners: std::collections::BTreeSet<u32> = (0..ranks)
                    .map(|me| {
                        let kind = CallKind::Allreduce { algorithm };
                        let lens = vec![64 * SLICE_BYTES];
                        let shape =
                            Shape { kind, ranks, me, elem_bytes: 4, inputs: lens.clone(), outputs: lens };
                        Share { index, of: 2 }.piece(&shape, nth) % ranks
                    })
                    .collect();
                assert_eq!(owners.len(), ranks as usize, "{algorithm:?}, piece {nth} of lane {index}");
            }
        }
    }

    #[test]
    fn the_central_server_is_not_sent_more_than_queues_before_its_link_hold() {
        for (ranks, pieces) in [(2, 16), (4, 8), (8, 7), (64, 2)] {
            let [kind, ring] =
                [Algorithm::Central, Algorithm::Ring].map(|algorithm| CallKind::Allreduce { algorithm });
            let lens = vec![64 * SLICE_BYTES];
            let shape = Shape { kind, ranks, me: 0, elem_bytes: 4, inputs: lens.clone(), outputs: lens };
            assert_eq!(under_way(&shape), pieces, "{ranks} ranks");
            assert!(under_way(&Shape { kind: ring, ..shape }) >= 4);
        }
    }

    #[test]
    fn what_the_store_has_under_way_fits_into_a_cache() {
        for (ranks, packets, pieces) in
            [(2, 2, 16), (3, 2, 15), (4, 2, 16), (6, 1, 12), (8, 1, 8), (64, 1, 64)]
        {
            let lens = vec![u64::from(ranks) * 16 * PACKET_BYTES];
            let kind = CallKind::Allreduce { algorithm: Algorithm::Store };
            let shape = Shape { kind, ranks, me: 0, elem_bytes: 4, inputs: lens.clone(), outputs: lens };
            assert_eq!(piece(&shape, 0).end, packets * PACKET_BYTES, "{ranks} ranks");
            assert_eq!(under_way(&shape), pieces, "{ranks} ranks");
        }
    }

    #[test]
    fn every_piece_is_in_one_share_and_turns_are_not_torn() {
        for (algorithm, ranks) in Algorithm::ALL.into_iter().flat_map(|a| [1, 2, 3, 8].map(|p| (a, p))) {
            // The longest has so many pieces that their number is no multiple of the owners'.
            for elems in [0u64, 1, 5000, 100_003, 3_000_017, 3_000_000_019] {
                let kind = CallKind::Allreduce { algorithm };
                let lens = vec![4 * elems];
                let me = ranks - 1;
                let shape = Shape { kind, ranks, me, elem_bytes: 4, inputs: lens.clone(), outputs: lens };
                let (all, of) = (pieces(&shape), lanes(&shape, 3));
                let mut lane_of = vec![None; all as usize];
                for share in (0..of).map(|index| Share { index, of }) {
                    for nth in 0..share.count(&shape) as u32 {
                        let lane = lane_of[share.piece(&shape, nth) as usize].replace(share.index);
                        assert_eq!(lane, None, "{algorithm:?} {ranks} {elems}: twice");
                    }
                    assert!(share.count(&shape) > 0);
                }
                let lane_of: Vec<u32> = lane_of.into_iter().map(|lane| lane.unwrap()).collect();
                for owners in lane_of.chunks(turn(&shape) as usize) {
                    assert!(owners.iter().all(|lane| *lane == owners[0]));
                }
                let ends: Vec<_> = (0..all as u32).map(|number| piece(&shape, number)).collect();
                assert!(ends.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert_eq!((ends[0].start, ends[all as usize - 1].end), (0, 4 * elems));
            }
        }
    }
}
