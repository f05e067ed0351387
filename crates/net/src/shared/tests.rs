//! Who is woken by which slice, and what calls raise.

use super::*;
use mio::{Poll, Token, Waker};
use penstock_core::layout::Tensor;
use penstock_core::life::{Effect, Evidence, Fault, Verdict, WaitKind};
use penstock_core::{Book, Dtype};

/// One tensor of four slices, none of which is in memory.
fn submitted() -> OpenBook {
    let shared = Arc::new(Shared::new(Rank(0), 1, 1, 1, Pool::new(0)));
    let tensor = Tensor::new("w", 0, Dtype::F32, 1024);
    let book = Book::new("gradients", vec!["a".into()], vec![tensor], 1, 1024, 1).unwrap();
    let open = OpenBook::new(0, book, shared);
    open.shared.lock().accounting.submitted(1, Instant::now());
    open.tensors[0].remaining.store(4, Ordering::Relaxed);
    open
}

#[test]
fn a_peer_that_could_not_be_reached_is_not_blamed_for_the_silence_of_another() {
    let shared = Shared::new(Rank(0), 3, 3, 1, Pool::new(0));
    let reason = "it refuses".into();
    shared.unreachable(Error::PeerLost { rank: Rank(2), reason }.into());
    shared.live(|life, now_ns| life.silent(now_ns, Rank(1), 5));
    shared.live(|life, now_ns| life.look(now_ns + 3_000_000_000, 0, |_| false));
    assert_eq!(shared.check().unwrap_err().rank, Some(Rank(1)));
}

#[test]
fn a_failure_while_an_epoch_ends_is_told_by_the_lanes_of_the_next_one() {
    let shared = Shared::new(Rank(0), 3, 3, 1, Pool::new(0));
    shared.live(Life::goes_on_after_losses);
    shared.fail(Error::PeerLost { rank: Rank(2), reason: "its connection was closed".into() });
    shared.freeze();
    shared.check().unwrap();
    shared.fail(Fault::of_program(Rank(0), "a bad batch"));
    let raised = shared.check().unwrap_err();
    assert!(raised.to_string().contains("a bad batch"), "{raised}");

    shared.begin_epoch(&Members::all(2));
    let poll = Poll::new().unwrap();
    let mailbox = Arc::new(Mailbox::new(Waker::new(poll.registry(), Token(0)).unwrap()));
    shared.start(&[Arc::clone(&mailbox)], vec!["a:1".into(), "b:2".into()]);
    shared.live(|life, _| life.lanes_begin());
    shared.thaw();
    let mut told = Vec::new();
    mailbox.take(&mut told);
    assert!(matches!(told[..], [Command::Failed { .. }]));
    assert_eq!(shared.check().unwrap_err(), raised);
}

#[test]
fn only_what_is_under_way_and_does_not_land_is_held_up() {
    let open = submitted();
    let shared = &open.shared;
    shared.live(Life::goes_on_after_losses);
    // An epoch, and whether its peer is out of the next one.
    let lost = || {
        shared.begin_epoch(&Members::all(2));
        shared.live(|life, now_ns| {
            let reason = "it cannot be reached".into();
            life.accuse(now_ns, Verdict::new(Evidence::Silent, None, Rank(0), vec![Rank(1)], reason));
            let is_out = |effect| matches!(effect, Effect::EndEpoch { out, .. } if !out.is_empty());
            life.take_effects().into_iter().any(is_out)
        })
    };
    let epochs = || (1..20).find(|_| lost());
    let some = epochs();
    assert!(some.is_some());
    open.slice_complete(3, true);
    assert_eq!(epochs(), some, "something has landed");
    (0..3).for_each(|slice| open.slice_complete(slice, true));
    assert_eq!(epochs(), None, "nothing is under way");
}

#[test]
fn a_part_has_come_for_those_whose_last_slice_it_was() {
    let open = submitted();
    let after_slice = |slice: u32| {
        open.slice_complete(slice, true);
        open.part_has_come(0)
    };

    assert!(!after_slice(0), "nobody waits");
    open.await_parts(&[(0, 3072)]);
    assert!(!after_slice(2), "slice 1 is late");
    open.await_parts(&[(0, 2048)]);
    assert!(after_slice(1), "both have their parts");
    open.no_longer_await_parts(&[(0, 2048)]);
    open.no_longer_await_parts(&[(0, 3072)]);
    assert!(!open.part_has_come(0), "nobody waits any more");
    open.await_parts(&[(0, 4096)]);
    assert!(!open.part_has_come(0), "those who have gone wanted less");
    assert!(after_slice(3));
}

#[test]
fn a_slice_that_brings_no_part_wakes_nobody() {
    let open = submitted();
    open.await_parts(&[(0, 2048)]);
    let guard = open.shared.lock(); // without which nobody is woken
    let deadline = Instant::now() + Duration::from_secs(20);
    std::thread::scope(|threads| {
        let slices = threads.spawn(|| {
            open.slice_complete(3, true);
            open.slice_complete(1, true);
        });
        while !slices.is_finished() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let finished = slices.is_finished();
        drop(guard);
        assert!(finished, "it waits for the lock");
    });
}

#[test]
fn the_slice_that_completes_a_part_wakes_who_waits_for_it() {
    const ROUNDS: u32 = 20;
    let mut late = 0; // a thread that nobody wakes looks again after INTERRUPT_CHECK
    for _ in 0..ROUNDS {
        let open = submitted();
        let complete = std::thread::scope(|threads| {
            threads.spawn(|| {
                open.await_parts(&[(0, 2048)]);
                let came = |_: &mut State| (open.arrived_bytes(0) >= 2048).then_some(());
                let mut wait = open.shared.begin_wait(WaitKind::Result, Duration::MAX);
                assert_eq!(open.shared.wait(&mut wait, &mut || false, came).unwrap().came(), Some(()));
            });
            while open.shared.lock().waiters == 0 {
                std::thread::yield_now();
            }
            open.slice_complete(0, true);
            let complete = Instant::now();
            open.slice_complete(1, true);
            complete
        });
        late += u32::from(complete.elapsed() >= INTERRUPT_CHECK / 2);
    }
    assert!(late < ROUNDS / 2, "in {late} of {ROUNDS} rounds nobody woke it");
}
