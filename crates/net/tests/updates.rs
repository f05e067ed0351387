//! Books whose owners update what they keep, over loopback: as one process would, told at any time, saved and loaded.

mod support;

use penstock_core::exchange::Field;
use penstock_core::layout::Tensor;
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::roles::{Fold, Roles, Rules};
use penstock_core::{BookId, Dtype, Error, Gives, Members, Op, Step, Submission, TensorId};
use penstock_net::{Engine, Failure, Lent};
use support::{job, job_with, never, on_all};

/// The last one has slices of several owners on both lanes; the second is empty.
const ELEMS: [usize; 4] = [3, 0, 70, 300_000];
const STEPS: Step = 4;

const ADAM: Optimizer = Optimizer {
    lr: 0.01,
    weight_decay: 0.1,
    maximize: false,
    rule: Rule::Adam { betas: [0.9, 0.99], eps: 1e-8, amsgrad: false, decoupled: true },
};

fn optimizers(step: Step) -> [Optimizer; 2] {
    [ADAM, Optimizer { lr: 0.1 / f64::from(step + 1), ..ADAM }]
}

fn open(engine: &Engine, size: u32) -> BookId {
    let tensors = (0..).zip(ELEMS).map(|(layer, elems)| Tensor::new("t", layer, Dtype::F32, elems as u64));
    let layers = (0..ELEMS.len()).map(|number| format!("layer{number}"));
    let rules = Rules { fold: Fold::Updated, ..Rules::default() };
    let roles = Roles { rules, ..Roles::alike(Members::all(size)) };
    let book = engine.open_book("values", layers.collect(), tensors.collect(), Some(roles)).unwrap();
    for tensor in 0..ELEMS.len() {
        engine.load(book, tensor as TensorId, (Field::Value, 0), bytes(&value(tensor))).unwrap();
    }
    book
}

fn value(tensor: usize) -> Vec<f32> {
    (0..ELEMS[tensor]).map(|at| ((at * 7 + tensor) % 13) as f32 / 3.0 - 2.0).collect()
}

fn gradient(tensor: usize, rank: u32, step: Step) -> Vec<f32> {
    let number = |at: usize| ((at * 5 + (rank as usize) * 3 + step as usize) % 11) as f32 / 7.0 - 0.7;
    (0..ELEMS[tensor]).map(number).collect()
}

fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: any floats are bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: any bytes are floats.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn submit(
    engine: &Engine,
    book: BookId,
    tensor: usize,
    step: Step,
    values: &mut [f32],
) -> Result<u64, Failure> {
    let memory = Lent { address: values.as_mut_ptr() as usize, len_bytes: size_of_val(values) };
    let gives = Gives::Whole(Op::Average);
    // SAFETY: the callers below keep `values` until it is released.
    unsafe {
        engine.submit(Submission { book, tensor: tensor as TensorId, seq: 0, step, memory, gives }, false)
    }
}

/// What one process would have after these steps: values and states.
fn alone(size: u32, steps: std::ops::Range<Step>, factor: f64) -> Vec<Vec<Vec<f32>>> {
    let one = |tensor: usize| {
        let zeros = vec![0.0; ELEMS[tensor]];
        let mut all = vec![value(tensor), zeros.clone(), zeros];
        for step in steps.clone() {
            let mut sum = gradient(tensor, 0, step);
            for rank in 1..size {
                sum.iter_mut().zip(gradient(tensor, rank, step)).for_each(|(sum, one)| *sum += one);
            }
            sum.iter_mut().for_each(|sum| *sum /= size as f32);
            let update = Update { optimizer: optimizers(step)[tensor % 2], factor };
            let [value, first, second] = &mut all[..] else { unreachable!() };
            let mut states = [bytes_mut(first), bytes_mut(second)];
            let number = u64::from(step) + 1;
            update.apply(Dtype::F32, number, bytes_mut(value), bytes(&sum), &mut states).unwrap();
        }
        all
    };
    (0..ELEMS.len()).map(one).collect()
}

/// All that is kept, put together from all ranks.
fn saved(engine: &Engine, book: BookId, size: usize) -> Vec<Vec<Vec<f32>>> {
    let one = |tensor: usize, field: Field| {
        let mut whole = vec![0.0; ELEMS[tensor]];
        let updates = engine.save(book, tensor as TensorId, field, bytes_mut(&mut whole)).unwrap();
        assert!(updates.is_none_or(|updates| updates == u64::from(STEPS)));
        let parts = engine.all_gather("what is kept", bytes(&whole), &mut never).unwrap();
        assert_eq!(parts.len(), size);
        for part in parts {
            let mut other = vec![0.0; whole.len()];
            bytes_mut(&mut other).copy_from_slice(&part);
            // What another rank keeps is zero here.
            whole
                .iter_mut()
                .zip(other)
                .for_each(|(one, other)| *one = if *one == 0.0 { other } else { *one });
        }
        whole
    };
    let fields = [Field::Value, Field::State(0), Field::State(1)];
    (0..ELEMS.len()).map(|tensor| fields.map(|field| one(tensor, field)).to_vec()).collect()
}

#[test]
fn what_all_get_is_what_one_process_would_have() {
    for size in [2, 3] {
        on_all(job(size), move |engine, rank| {
            let book = open(engine, size);
            engine.set_priorities(book, &[0, 3, 1, 2]).unwrap();
            let mut values: Vec<Vec<f32>> =
                (0..ELEMS.len()).map(|tensor| gradient(tensor, rank, 0)).collect();
            for step in 0..STEPS {
                let in_advance = step % 2 == 1;
                let proceed = || {
                    engine.proceed(book, step, (&optimizers(step), &[0, 1, 0, 1]), 0.5, in_advance).unwrap();
                };
                if in_advance {
                    proceed();
                }
                for tensor in (0..ELEMS.len()).rev() {
                    values[tensor] = gradient(tensor, rank, step);
                    submit(engine, book, tensor, step, &mut values[tensor]).unwrap();
                }
                if step == 2 {
                    // As clipping does: of what is owned here, in any case the same.
                    let squares = engine.squares(book, step, &mut never).unwrap();
                    assert_eq!(squares, engine.squares(book, step, &mut never).unwrap());
                    assert!(squares > 0.0);
                }
                if !in_advance {
                    proceed();
                }
                engine.wait(book, &[0, 1, 2, 3], true, &mut never).unwrap();
            }
            let expected = alone(size, 0..STEPS, 0.5);
            for (tensor, all) in expected.iter().enumerate() {
                assert!(values[tensor] == all[0], "rank {rank} of {size}, tensor {tensor}");
            }
            assert!(saved(engine, book, size as usize) == expected, "rank {rank} of {size}");
            engine.shutdown(&mut never).unwrap();
        });
    }
}

#[test]
fn squares_of_all_ranks_are_those_of_the_sum() {
    on_all(job(3), |engine, rank| {
        let book = open(engine, 3);
        let mut values: Vec<Vec<f32>> = (0..ELEMS.len()).map(|tensor| gradient(tensor, rank, 0)).collect();
        for (tensor, values) in values.iter_mut().enumerate() {
            submit(engine, book, tensor, 0, values).unwrap();
        }
        let own = engine.squares(book, 0, &mut never).unwrap();
        let parts = engine.all_gather("squares", &own.to_le_bytes(), &mut never).unwrap();
        let all: f64 = parts.iter().map(|part| f64::from_le_bytes(part[..].try_into().unwrap())).sum();
        let mut expected = 0.0;
        for (tensor, elems) in ELEMS.iter().enumerate() {
            let of: Vec<Vec<f32>> = (0..3).map(|rank| gradient(tensor, rank, 0)).collect();
            let square = |at: usize| f64::from((of[0][at] + of[1][at] + of[2][at]) / 3.0).powi(2);
            expected += (0..*elems).map(square).sum::<f64>();
        }
        assert!((all - expected).abs() < 1e-9 * expected, "{all} {expected}");
        engine.discard(book, 0).unwrap();
        engine.wait(book, &[0, 1, 2, 3], true, &mut never).unwrap();
        let landed = engine.landed(book, &[0, 2, 3], None, false, &mut never).unwrap();
        assert_eq!((landed.complete, landed.bytes), (vec![0, 2, 3], vec![0; 3]), "the step was not made");
        engine.shutdown(&mut never).unwrap();
    });
}

/// More than a window to every owner, and nobody says the word before all is summed.
#[test]
fn what_is_summed_frees_the_window_before_there_is_a_result() {
    let engines = job_with(2, |config| config.window_bytes = 64 << 10);
    on_all(engines, |engine, rank| {
        let book = open(engine, 2);
        let mut values: Vec<Vec<f32>> = (0..ELEMS.len()).map(|tensor| gradient(tensor, rank, 0)).collect();
        for (tensor, values) in values.iter_mut().enumerate().rev() {
            submit(engine, book, tensor, 0, values).unwrap();
        }
        assert!(engine.squares(book, 0, &mut never).unwrap() > 0.0);
        engine.proceed(book, 0, (&optimizers(0), &[0, 1, 0, 1]), 1.0, false).unwrap();
        engine.wait(book, &[0, 1, 2, 3], true, &mut never).unwrap();
        assert!(values[3] == alone(2, 0..1, 1.0)[3][0]);
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn what_does_not_fit_is_refused_at_the_call_and_goes_no_further() {
    on_all(job(2), |engine, rank| {
        let book = open(engine, 2);
        let sums = engine.open_book("sums", vec![], vec![], None).unwrap();
        let said = |result: Result<(), Failure>| match result.unwrap_err().error {
            Error::Config(text) => text,
            other => panic!("{other:?}"),
        };
        let groups = [0, 1, 0, 1];
        assert!(said(engine.discard(sums, 0)).contains("sums: its owners update nothing"));
        assert!(said(engine.discard(book, 0)).contains("t is not submitted for step 0"));
        let mut values: Vec<Vec<f32>> = (0..ELEMS.len()).map(|tensor| gradient(tensor, rank, 0)).collect();
        for (tensor, values) in values.iter_mut().enumerate() {
            submit(engine, book, tensor, 0, values).unwrap();
        }
        assert!(
            said(engine.proceed(book, 1, (&optimizers(0), &groups), 1.0, false))
                .contains("not submitted for step 1")
        );
        assert!(
            said(engine.proceed(book, 0, (&optimizers(0), &groups[1..]), 1.0, false)).contains("3 tensors")
        );
        assert!(
            said(engine.proceed(book, 0, (&optimizers(0)[..1], &groups), 1.0, false)).contains("below 1")
        );
        engine.proceed(book, 0, (&optimizers(0), &groups), 1.0, false).unwrap();
        let text = said(engine.proceed(book, 0, (&optimizers(0), &groups), 1.0, false));
        assert!(text.contains("step 0 was told to go on already"), "{text}");
        engine.wait(book, &[0, 1, 2, 3], true, &mut never).unwrap();
        assert!(
            said(engine.load(book, 0, (Field::Value, 0), &[0; 8]))
                .contains("t has 12 bytes, but 8 are given")
        );
        let text = engine.load(book, 3, (Field::State(5), 1), bytes(&value(3))).unwrap_err().to_string();
        assert!(text.contains("layer3: state 5 comes after a value and 2 states"), "{text}");
        assert!(engine.save(book, 3, Field::State(5), bytes_mut(&mut value(3))).unwrap().is_none());
        assert!(values[3] == alone(2, 0..1, 1.0)[3][0]);
        engine.shutdown(&mut never).unwrap();
    });
}
