//! Calls that do not fit each other: both ranks' names and what differs, instead of a wait without end.

use penstock_core::Members;
use penstock_core::calls::{Call, CallKind, Calls, Request, Share};
use penstock_core::memory::Memory;
use penstock_core::optimizer::Update;
use penstock_core::reduce::Reduction;
use penstock_core::types::{Dtype, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::{Destination, Kind, Op};
use penstock_core::{Error, Header, limits};

const STORE: CallKind = CallKind::Allreduce { algorithm: Algorithm::Store };

/// Lengths alone.
struct Lengths;

impl Memory for Lengths {
    type Chunk = usize;

    fn part(&self, chunk: &usize, offset_bytes: usize, len_bytes: usize) -> usize {
        assert!(offset_bytes + len_bytes <= *chunk);
        len_bytes
    }

    fn scratch(&mut self, len_bytes: usize) -> usize {
        len_bytes
    }

    fn reduce(&mut self, _: Dtype, _: Reduction, inputs: &[usize], output: &usize) {
        assert!(inputs.iter().all(|input| input == output));
    }

    fn reduce_rounded(&mut self, _: Dtype, _: Reduction, _: &[usize], _: Option<usize>, _: &usize) {
        unreachable!("calls round nothing");
    }

    fn round(&mut self, _: Dtype, _: &usize, _: &usize) {
        unreachable!("calls round nothing");
    }

    fn expand(&mut self, _: Dtype, _: &usize, _: &usize) {
        unreachable!("calls round nothing");
    }

    fn is_shared(&self, _: &usize) -> bool {
        false
    }

    fn update(&mut self, _: Dtype, _: &Update, _: u64, _: &usize, _: &usize, _: &[usize], _: &usize) {
        unreachable!("calls update nothing");
    }

    fn clear(&mut self, _: &usize) {
        unreachable!("calls clear nothing");
    }

    fn fill(&mut self, _: Dtype, _: f64, _: &usize) {
        unreachable!("calls update nothing");
    }

    fn squares(&mut self, _: Dtype, _: &usize) -> f64 {
        0.0
    }
}

struct Pair([Calls<Lengths>; 2]);

impl Pair {
    fn new() -> Self {
        Self([0, 1].map(|rank| {
            let mut calls = Calls::new(Rank(rank), Members::all(2));
            calls.form(0, vec![Rank(0), Rank(1)]).unwrap();
            calls
        }))
    }

    /// Begins calls and moves frames until nothing is left; the first error, and by which rank.
    fn play(&mut self, calls: Vec<(usize, Call<usize>)>) -> Result<usize, (usize, Error)> {
        let mut complete = 0;
        let mut calls = calls.into_iter();
        loop {
            let begun = calls.next();
            if let Some((rank, call)) = begun {
                self.0[rank].begin(call, &mut Lengths).map_err(|error| (rank, error))?;
            } else if self.0.iter().all(|calls| calls.effects.frames.is_empty()) {
                complete += self.0.iter().map(|calls| calls.effects.complete.len()).sum::<usize>();
                return Ok(complete);
            }
            for from in [0, 1] {
                for (to, frame) in std::mem::take(&mut self.0[from].effects.frames) {
                    let (to, rank) = (to.index(), Rank(from as u32));
                    let header = Header::decode(&frame.header.encode()).unwrap();
                    let placed =
                        self.0[to].destination(rank, &header, &mut Lengths).map_err(|error| (to, error))?;
                    let payload = match placed {
                        Destination::None => None,
                        Destination::Chunk(chunk) => Some(chunk),
                    };
                    assert_eq!(payload, frame.payload);
                    self.0[to].frame(rank, &header, payload, &mut Lengths).map_err(|error| (to, error))?;
                }
            }
        }
    }
}

fn call(request: Request, inputs: &[usize], outputs: &[usize]) -> Call<usize> {
    let blocks = |lens: &[usize]| lens.iter().map(|len| (*len, *len as u64)).collect();
    let (op, dtype, share) = (Op::Sum, Dtype::F32, Share::ALL);
    Call { id: 1, group: 0, request, op, dtype, share, inputs: blocks(inputs), outputs: blocks(outputs) }
}

fn message(of: &str, len: usize) -> Call<usize> {
    match of {
        "send" => call(Request::Send { to: 1, tag: 7 }, &[len], &[]),
        _ => call(Request::Receive { from: 0, tag: 7 }, &[], &[len]),
    }
}

fn disagreement(calls: Vec<(usize, Call<usize>)>) -> String {
    let (_, error) = Pair::new().play(calls).unwrap_err();
    assert!(matches!(error, Error::Config(_)), "{error}");
    let text = error.to_string();
    let named = ["rank 0 (there) and rank 1 (here)", "rank 1 (there) and rank 0 (here)"];
    assert!(named.iter().any(|both| text.contains(both)), "{text}");
    text
}

#[test]
fn messages_of_any_length_arrive_whichever_side_is_first() {
    for len in
        [0, 1, limits::EAGER_BYTES_MAX, limits::EAGER_BYTES_MAX + 1, 3 << 20, limits::MESSAGE_BYTES_MAX + 5]
    {
        for order in [["send", "recv"], ["recv", "send"]] {
            let calls = order.map(|of| (usize::from(of == "recv"), message(of, len)));
            assert_eq!(Pair::new().play(calls.into()).unwrap(), 2, "{len} bytes");
        }
    }
}

#[test]
fn both_sides_may_send_first_more_than_anybody_keeps() {
    let (mut pair, mut calls) = (Pair::new(), Vec::new());
    // Many times the window, and in an order of tags that the other side reverses.
    for tag in 0..200 {
        calls.push((0, call(Request::Send { to: 1, tag }, &[limits::EAGER_BYTES_MAX], &[])));
        calls.push((1, call(Request::Send { to: 0, tag }, &[limits::EAGER_BYTES_MAX], &[])));
    }
    for tag in (0..200).rev() {
        for (rank, from) in [(0, 1), (1, 0)] {
            calls.push((rank, call(Request::Receive { from, tag }, &[], &[limits::EAGER_BYTES_MAX])));
        }
    }
    for (id, (_, call)) in (0..).zip(&mut calls) {
        call.id = id;
    }
    assert_eq!(pair.play(calls).unwrap(), 800);
    assert!(!pair.0[0].waits_for(Rank(1)) && !pair.0[1].waits_for(Rank(0)));
}

#[test]
fn messages_of_different_lengths_are_an_error_on_either_side() {
    let long = limits::EAGER_BYTES_MAX + 100;
    for (sent, wanted) in [(100, 104), (100, long), (long, 100), (long, long + 4)] {
        for order in [["send", "recv"], ["recv", "send"]] {
            let call = |of| if of == "send" { (0, message(of, sent)) } else { (1, message(of, wanted)) };
            let text = disagreement(order.map(call).into());
            assert!(text.contains(&sent.to_string()) && text.contains(&wanted.to_string()), "{text}");
            assert!(text.contains("tag 7"), "{text}");
        }
    }
}

#[test]
fn different_calls_are_an_error_that_says_both() {
    let collective = |kind| Request::Collective(kind);
    let allreduce = call(collective(STORE), &[400], &[400]);
    let others = [
        (call(collective(CallKind::AllGather), &[400], &[400; 2]), "all_gather"),
        (call(collective(CallKind::Reduce { root: 0 }), &[400], &[]), "reduce (root 0"),
        (call(collective(CallKind::Allreduce { algorithm: Algorithm::Ring }), &[400], &[400]), "by ring"),
        (Call { op: Op::Average, ..allreduce.clone() }, "Average of F32"),
        (Call { dtype: Dtype::F64, ..allreduce.clone() }, "Sum of F64"),
        (call(collective(STORE), &[404], &[404]), "404 bytes"),
        (call(collective(STORE), &[400_000], &[400_000]), "bytes"),
    ];
    for (other, words) in others {
        for (first, second) in [(0, 1), (1, 0)] {
            let mut calls = vec![(0, allreduce.clone()), (1, other.clone())];
            if first > second {
                calls.reverse();
            }
            let text = disagreement(calls);
            assert!(
                text.contains("allreduce by store (Sum of F32)") && text.contains(words),
                "{words}: {text}"
            );
        }
    }
}

#[test]
fn a_call_too_many_for_one_that_is_complete_is_an_error() {
    let broadcast =
        |root| Call { id: 9, ..call(Request::Collective(CallKind::Broadcast { root }), &[], &[400]) };
    let (rank, error) = Pair::new().play(vec![(0, broadcast(0)), (1, broadcast(1))]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("root 0") && text.contains("root 1"), "rank {rank}: {text}");
}

#[test]
fn what_does_not_fit_the_group_is_refused() {
    let mut calls = Calls::<Lengths>::new(Rank(0), Members::all(3));
    for members in [vec![Rank(1), Rank(2)], vec![Rank(0), Rank(0)], vec![Rank(0), Rank(3)]] {
        assert!(calls.form(1, members).is_err());
    }
    calls.form(0, vec![Rank(2), Rank(0)]).unwrap();
    assert!(calls.form(0, vec![Rank(0)]).is_err(), "taken");
    for wrong in [
        call(Request::Send { to: 1, tag: 0 }, &[4], &[]),
        call(Request::Send { to: 2, tag: 0 }, &[4], &[]),
        call(Request::Collective(STORE), &[4], &[8]),
        call(Request::Collective(STORE), &[6], &[6]),
        call(Request::Collective(CallKind::AllGather), &[4], &[4]),
        call(Request::Collective(CallKind::Broadcast { root: 2 }), &[], &[4]),
        Call { group: 3, ..call(Request::Collective(CallKind::Barrier), &[], &[]) },
    ] {
        assert!(matches!(calls.begin(wrong, &mut Lengths), Err(Error::Config(_))));
    }
    assert!(calls.effects.frames.is_empty());
}

#[test]
fn a_peer_that_ignores_the_window_or_sends_unasked_is_refused() {
    let mut calls = Calls::<Lengths>::new(Rank(0), Members::all(2));
    let header = Header { payload_bytes: limits::EAGER_BYTES_MAX as u32, ..Header::control(Kind::Message) };
    let mut taken = 0;
    while let Ok(Destination::Chunk(chunk)) = calls.destination(Rank(1), &header, &mut Lengths) {
        calls.frame(Rank(1), &header, Some(chunk), &mut Lengths).unwrap();
        taken += limits::EAGER_BYTES_MAX;
        assert!(taken <= limits::EAGER_WINDOW_BYTES);
    }
    let part = Header { payload_bytes: 8, ..Header::control(Kind::MessagePart) };
    let error = calls.destination(Rank(1), &part, &mut Lengths).unwrap_err();
    assert!(matches!(error, Error::Protocol { peer: Rank(1), .. }), "{error}");
}
