//! Several tensors submitted in one call: each is an exchange of its own, and what is wrong with one stops all.

mod support;

use penstock_core::layout::Tensor;
use penstock_core::{BookId, Dtype, Gives, Op, Submission, TensorId};
use penstock_net::{Engine, Lent};
use support::{job, never, on_all};

/// The tensors' lengths; the last one has slices of several owners on both lanes.
const ELEMS: [usize; 4] = [3, 0, 70, 40_000];

fn open(engine: &Engine) -> BookId {
    let tensors = (0..).zip(ELEMS).map(|(layer, elems)| Tensor::new("t", layer, Dtype::F32, elems as u64));
    let layers = (0..ELEMS.len()).map(|number| format!("layer{number}"));
    engine.open_book("gradients", layers.collect(), tensors.collect(), None).unwrap()
}

fn part(book: BookId, tensor: usize, values: &mut [f32]) -> Submission<Lent> {
    let memory = Lent { address: values.as_mut_ptr() as usize, len_bytes: std::mem::size_of_val(values) };
    Submission { book, tensor: tensor as TensorId, seq: 0, step: 0, memory, gives: Gives::Whole(Op::Sum) }
}

#[test]
fn tensors_submitted_together_or_one_by_one_meet_each_other() {
    on_all(job(3), |engine, rank| {
        let book = open(engine);
        for round in 0..5 {
            let mut values: Vec<Vec<f32>> = ELEMS.iter().map(|elems| vec![rank as f32; *elems]).collect();
            // Backward, as gradients come.
            let parts: Vec<_> = values
                .iter_mut()
                .enumerate()
                .rev()
                .map(|(tensor, values)| part(book, tensor, values))
                .collect();
            let tokens = if (round + rank) % 2 == 0 {
                // SAFETY: `values` stay until the wait for their release.
                unsafe { engine.submit_together(&parts) }.unwrap()
            } else {
                // SAFETY: likewise.
                parts.iter().map(|part| unsafe { engine.submit(*part, true) }.unwrap()).collect()
            };
            // From the other end: none waits for another.
            for (tensor, values) in values.iter().enumerate() {
                engine.wait(book, &[tensor as TensorId], true, &mut never).unwrap();
                assert!(values.iter().all(|sum| *sum == 3.0), "tensor {tensor}, round {round}");
            }
            let released = engine.landed(book, &[], None, false, &mut never).unwrap().released;
            assert!(tokens.iter().all(|token| released.contains(token)), "{tokens:?} of {released:?}");
        }
        // SAFETY: there is no memory.
        assert!(unsafe { engine.submit_together(&[]) }.unwrap().is_empty());
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn if_one_is_wrong_none_is_submitted() {
    on_all(job(2), |engine, _| {
        let book = open(engine);
        let (mut one, mut other) = (vec![1.0f32; 3], vec![1.0f32; 70]);
        let refused = |parts: &[Submission<Lent>]| {
            // SAFETY: both outlive the engine's use of them, which is none if they are refused.
            unsafe { engine.submit_together(parts) }.unwrap_err().to_string()
        };
        let twice = [part(book, 0, &mut one), part(book, 2, &mut other), part(book, 0, &mut one)];
        assert!(refused(&twice).contains("t was submitted again before its result was in"));
        let too_short = [part(book, 0, &mut one), part(book, 2, &mut other[..69])];
        assert!(refused(&too_short).contains("t has 280 bytes, but 276 were submitted"));
        let unknown = [part(book, 0, &mut one), part(book, 4, &mut other)];
        assert!(refused(&unknown).contains("there is no tensor 4"));
        assert_eq!(engine.sequence(book).unwrap(), [0; 4], "none of them");
        // SAFETY: as above; waited for below.
        unsafe { engine.submit_together(&[part(book, 0, &mut one), part(book, 2, &mut other)]) }.unwrap();
        engine.wait(book, &[0, 2], true, &mut never).unwrap();
        assert!(one.iter().chain(&other).all(|sum| *sum == 2.0));
        engine.shutdown(&mut never).unwrap();
    });
}
