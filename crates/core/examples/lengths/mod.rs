//! Memory that moves nothing, for programs that measure what deciding costs.

use penstock_core::memory::Memory;
use penstock_core::optimizer::Update;
use penstock_core::reduce::Reduction;
use penstock_core::types::Dtype;

/// Chunks are their lengths.
pub(crate) struct Lengths;

impl Memory for Lengths {
    type Chunk = usize;

    fn part(&self, _: &usize, _: usize, len_bytes: usize) -> usize {
        len_bytes
    }

    fn scratch(&mut self, len_bytes: usize) -> usize {
        len_bytes
    }

    fn reduce(&mut self, _: Dtype, _: Reduction, _: &[usize], _: &usize) {}

    fn reduce_rounded(&mut self, _: Dtype, _: Reduction, _: &[usize], _: Option<usize>, _: &usize) {}

    fn round(&mut self, _: Dtype, _: &usize, _: &usize) {}

    fn expand(&mut self, _: Dtype, _: &usize, _: &usize) {}

    fn is_shared(&self, _: &usize) -> bool {
        false
    }

    fn update(&mut self, _: Dtype, _: &Update, _: u64, _: &usize, _: &usize, _: &[usize], _: &usize) {}

    fn clear(&mut self, _: &usize) {}

    fn fill(&mut self, _: Dtype, _: f64, _: &usize) {}

    fn squares(&mut self, _: Dtype, _: &usize) -> f64 {
        0.0
    }
}
