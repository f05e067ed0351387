//! How fast this machine adds up contributions, measured on the code that does it while training.

use crate::memory::{Chunk, Pool, RealMemory};
use penstock_core::memory::Memory;
use penstock_core::reduce::Reduction;
use penstock_core::types::Dtype;
use std::time::{Duration, Instant};

/// Contributions of a small job, and a slice as long as slices are by default.
const INPUTS: usize = 4;
const SLICE_BYTES: usize = 512 << 10;
/// The first one maps the memory; the fastest of all counts, as the others were disturbed.
const TRIES: u32 = 5;

/// Bytes of fp32 that one thread adds to a sum per second. Takes about a millisecond.
#[must_use]
pub fn summing_rate() -> f64 {
    let mut memory = RealMemory::new(Pool::new(0));
    let inputs: Vec<Chunk> = (0..INPUTS).map(|_| memory.scratch(SLICE_BYTES)).collect();
    let output = memory.scratch(SLICE_BYTES);
    for input in &inputs {
        // What was never written is one page of zeros to the processor, and always in its cache.
        memory.reduce(Dtype::F32, Reduction::Sum { divisor: 1 }, &[output.clone(), output.clone()], input);
    }
    let mut fastest = Duration::MAX;
    for _ in 0..TRIES {
        let began = Instant::now();
        memory.reduce(Dtype::F32, Reduction::Sum { divisor: 1 }, &inputs, &output);
        fastest = fastest.min(began.elapsed());
    }
    let added = (INPUTS - 1) * SLICE_BYTES;
    added as f64 / fastest.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_rate_of_this_century() {
        let rate = summing_rate();
        assert!((1e6..1e13).contains(&rate), "{rate}");
    }
}
