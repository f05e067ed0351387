//! Calls between engines of one process, over loopback: values, errors, and how long a job of one rank takes to end.

mod support;

use penstock_core::calls::{CallKind, Request};
use penstock_core::way::Algorithm;
use penstock_core::{Dtype, Error, Op, Rank};
use penstock_net::{CallPart, Engine, Stop};
use std::time::{Duration, Instant};
use support::{Meeting, job, never, on_all};

const STORE: CallKind = CallKind::Allreduce { algorithm: Algorithm::Store };

/// A call in place on numbers, waited for.
fn call(engine: &Engine, group: u16, request: Request, op: Op, values: &mut [f32]) -> Result<(), Stop> {
    let memory = vec![(values.as_mut_ptr() as usize, std::mem::size_of_val(values))];
    let (inputs, outputs) = match request {
        Request::Send { .. } => (memory, Vec::new()),
        Request::Receive { .. } | Request::Collective(CallKind::Broadcast { .. }) => (Vec::new(), memory),
        _ => (memory.clone(), memory),
    };
    let part =
        CallPart { group, epoch: None, request, op, dtype: Dtype::F32, inputs, outputs, keep: Box::new(()) };
    // SAFETY: the values outlive the wait; after a failure the tests leak them.
    let handle = unsafe { engine.call(part) }?;
    engine.wait_call(&handle, None, &mut never)
}

#[test]
fn groups_on_both_lanes_sum_and_send() {
    on_all(job(3), |engine, rank| {
        let allreduce = Request::Collective(STORE);
        // The longest is dealt among both lanes.
        for (algorithm, length) in Algorithm::ALL.into_iter().flat_map(|a| [0, 3, 300_000].map(|l| (a, l))) {
            let mut values = vec![rank as f32; length];
            let request = Request::Collective(CallKind::Allreduce { algorithm });
            call(engine, 0, request, Op::Average, &mut values).unwrap();
            assert!(values.iter().all(|x| *x == 1.0), "{algorithm:?} of {length}");
        }
        if rank > 0 {
            engine.form_group(1, &[2, 1]).unwrap();
            let mut values = vec![rank as f32; 5];
            call(engine, 1, allreduce, Op::Max, &mut values).unwrap();
            assert!(values.iter().all(|x| *x == 2.0));
            // Indexes in the group: 0 is rank 2.
            let request = if rank == 2 {
                Request::Send { to: 1, tag: 3 }
            } else {
                Request::Receive { from: 0, tag: 3 }
            };
            let mut values = vec![rank as f32; 100_000];
            call(engine, 1, request, Op::Copy, &mut values).unwrap();
            assert!(values.iter().all(|x| *x == 2.0));
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_rank_that_vanishes_in_a_call_is_named() {
    for algorithm in Algorithm::ALL {
        let all_have_returned = Meeting::of(3);
        on_all(job(3), |engine, rank| {
            let allreduce = Request::Collective(CallKind::Allreduce { algorithm });
            call(engine, 0, allreduce, Op::Sum, &mut [1.0; 3]).unwrap();
            all_have_returned.wait();
            if rank == 1 {
                return; // Dropped without a goodbye.
            }
            let Stop::Failed(failure) =
                call(engine, 0, allreduce, Op::Sum, vec![1.0; 500_000].leak()).unwrap_err()
            else {
                panic!("interrupted")
            };
            assert!(
                matches!(failure.error, Error::PeerLost { rank: Rank(1), .. }),
                "{algorithm:?}: {failure}"
            );
            assert!(failure.to_string().contains("allreduce in group 0"), "{algorithm:?}: {failure}");
        });
    }
}

#[test]
fn what_is_refused_leaves_nothing_to_wait_for() {
    let begin = Instant::now();
    for engine in job(1) {
        let mut values = [1.0; 3];
        call(&engine, 0, Request::Collective(STORE), Op::Sum, &mut values).unwrap();
        assert!(call(&engine, 9, Request::Collective(STORE), Op::Sum, &mut values).is_err());
        assert!(call(&engine, 0, Request::Send { to: 0, tag: 0 }, Op::Copy, &mut values).is_err());
        assert!(engine.form_group(1, &[0, 1]).is_err() && engine.form_group(0, &[0]).is_err());
        engine.shutdown(&mut never).unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(10));
}
