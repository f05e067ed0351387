//! Whom a rank says that it waits for: what is decided of that by a book that is not open yet, and by a window.

use super::*;
use penstock_core::Slicing;
use penstock_core::life::{Question, Reply};
use penstock_core::node::Waits;
use penstock_core::roles::{Groups, Roles};

/// What it says when it is asked about a tensor, while its own program waits for nothing.
fn asked_about(bench: &Bench, tensor: u32) -> Reply {
    let question = Question { number: 1, about: Some((0, tensor)) };
    bench.node.reply(question, Waits::default(), Reply::default())
}

#[test]
fn an_owner_that_is_late_to_open_a_book_says_it_is_late_itself() {
    let mut bench = Bench::new(1, 3, 1 << 20);
    assert_eq!(asked_about(&bench, 1).lacking, [], "nobody has come to anything");
    bench.frame(0, exchange(Kind::Push, 1, 1, Op::Average)).unwrap();
    // Who asks may wait for this tensor, or for one that others cannot get on with.
    let reply = asked_about(&bench, 1);
    assert_eq!((reply.missing, reply.lacking), (vec![Rank(1)], vec![Rank(1)]));
    bench.open();
    bench.submit(1, 1, Op::Average, false);
    let reply = asked_about(&bench, 1);
    assert_eq!((reply.missing, reply.lacking), (vec![Rank(2)], vec![Rank(2)]));
}

/// The head of the first of two groups of two, whose heads own 8 slices in turn, with a window that holds back every slice but one.
fn head() -> Bench {
    let mut bench = Bench::new(0, 4, 1);
    let group = |ranks: [u32; 2]| ranks.into_iter().map(Rank).collect::<Members>();
    let roles = Roles {
        owners: group([0, 2]),
        groups: Groups::of_members([group([0, 1]), group([2, 3])]),
        ..Roles::alike(Members::all(4))
    };
    let tensor = |i: u32| Tensor::new(format!("t{i}"), i, Dtype::F32, 1024);
    let layers = (0..8).map(|i| format!("layer{i}")).collect();
    let tensors = (0..8).map(tensor).collect();
    let book = Book::deal("model", layers, tensors, &roles, Slicing::fixed(4096, 1)).unwrap();
    assert!([1, 3].iter().all(|slice| book.slices[*slice].owner == Rank(2)));
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    bench
}

#[test]
fn an_owner_owes_no_answer_to_what_was_held_back_for_a_slice_of_which_the_group_is_not_in() {
    let mut bench = head();
    let waits = |bench: &Bench| {
        let Waits { late, owners } = bench.node.waits([(0, 1, [1]), (0, 3, [3])], []);
        let numbers =
            |ranks: std::collections::BTreeSet<Rank>| ranks.into_iter().map(|rank| rank.0).collect();
        let (late, owners): (Vec<u32>, Vec<u32>) = (numbers(late), numbers(owners));
        (late, owners)
    };
    for tensor in [3, 1] {
        bench.submit(tensor, 1, Op::Average, false);
    }
    assert_eq!(waits(&bench), (vec![1], vec![]));
    // It is the turn of slice 3.
    bench.frame(1, exchange(Kind::Push, 1, 1, Op::Average)).unwrap();
    assert_eq!(bench.frames(2).len(), 0);
    assert_eq!(waits(&bench), (vec![1], vec![]), "the owner has nothing of this group");
    bench.frame(1, exchange(Kind::Push, 3, 1, Op::Average)).unwrap();
    assert_eq!(bench.frames(2).iter().map(|frame| frame.header.slice).collect::<Vec<_>>(), [3]);
    assert_eq!(waits(&bench), (vec![], vec![2]));
}
