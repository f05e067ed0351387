//! Tensors that are rounded on the wire, by lengths: where frames are rounded and expanded, and what does not fit.

use super::*;

/// One slice of 4 KiB for each rank that travels as bf16.
fn rounded_bench(rank: u32, ranks: u32) -> Bench {
    let mut bench = Bench::new(rank, ranks, 1 << 20);
    let tensor = |i: u32| Tensor::new(format!("t{i}"), i, Dtype::F32, 1024).with_wire(Dtype::Bf16);
    let layers = (0..ranks).map(|i| format!("layer{i}")).collect();
    let book = Book::new("model", layers, (0..ranks).map(tensor).collect(), ranks, 4096, 1).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    bench
}

/// A frame with 1024 halves.
fn halves(kind: Kind, slice: u32) -> Header {
    Header { payload_bytes: 2048, argument: 1, ..exchange(kind, slice, 1, Op::Average) }
}

#[test]
fn a_push_is_rounded_when_it_is_taken_and_its_answer_expanded() {
    let mut bench = rounded_bench(0, 2);
    let scratch = bench.node.memory().scratch.clone();
    bench.submit(1, 1, Op::Average, false);
    assert_eq!(scratch.get(), 0, "not before");
    let pushed = bench.frames(1).pop().unwrap();
    assert_eq!(
        (pushed.header, pushed.payload.as_ref().unwrap().1),
        (Header { step: 1, ..halves(Kind::Push, 1) }, 2048)
    );
    assert_eq!(scratch.get(), 1);
    drop(pushed);
    bench.frame(1, halves(Kind::Answer, 1)).unwrap();
    assert_eq!((bench.completed(), scratch.get()), (1, 0));
    assert_eq!(bench.node.observer().counters.traffic[0][1].sent_bytes, 2048);
    assert_eq!(bench.node.observer().counters.traffic[0][1].received_bytes, 2048);
}

#[test]
fn an_owner_answers_in_the_wire_type() {
    let mut bench = rounded_bench(0, 3);
    bench.frame(1, halves(Kind::Push, 0)).unwrap();
    bench.submit(0, 1, Op::Average, false);
    bench.frame(2, halves(Kind::Push, 0)).unwrap();
    assert_eq!((bench.completed(), bench.node.memory().scratch.get()), (1, 0), "pushes are summed and gone");
    for peer in [1, 2] {
        let answer = bench.node.next_frame(Rank(peer)).unwrap();
        assert_eq!((answer.header.kind, answer.header.argument), (Kind::Answer, 1));
        assert_eq!((answer.header.payload_bytes, answer.payload.unwrap().1), (2048, 2048));
    }
}

#[test]
fn ranks_that_differ_in_the_wire_type_are_told_so() {
    for (header, theirs) in [
        (exchange(Kind::Push, 0, 1, Op::Average), "unrounded"),
        (Header { argument: 2, ..halves(Kind::Push, 0) }, "as f16"),
        (Header { argument: 9, ..halves(Kind::Push, 0) }, "in an unknown type"),
    ] {
        let error = rounded_bench(0, 2).node.destination(Rank(1), &header).unwrap_err().to_string();
        for word in ["rank 1", "\"t0\"", theirs, "here it travels as bf16"] {
            assert!(error.contains(word), "{error}");
        }
    }
    let error =
        Bench::with_book(0, 2, 1).node.destination(Rank(1), &halves(Kind::Push, 0)).unwrap_err().to_string();
    assert!(error.contains("comes as bf16, but here it travels as f32"), "{error}");
    let copied = Header { op: Op::Copy, ..halves(Kind::Push, 0) };
    assert!(rounded_bench(0, 2).node.destination(Rank(1), &copied).is_err(), "a copy keeps all bits");
}
