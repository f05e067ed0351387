//! Sums in a fixed order, block by block, rounded once per addition at the accumulator's precision.
//!
//! The result for element i is `((x0[i] + x1[i]) + x2[i]) + ...`, divided at the end by the number of contributors. fp32
//! and fp64 accumulate in their own type; fp16 and bf16 accumulate in fp32 and are rounded once, at the end. The order is
//! the caller's (rank order), so the bits do not depend on arrival order or on slicing.

use crate::layout::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements summed at a time: the accumulator (16 or 32 KiB) stays in the first-level cache.
pub const BLOCK_ELEMS: usize = 4096;

/// Accumulates one block of up to [`BLOCK_ELEMS`] elements.
///
/// The byte views handed over must be aligned to the element size; torch's tensors and pooled buffers are.
#[derive(Debug)]
pub struct Accumulator {
    f32: Vec<f32>,
    f64: Vec<f64>,
    widened: Vec<f32>,
}

impl Default for Accumulator {
    fn default() -> Self {
        Self { f32: vec![0.0; BLOCK_ELEMS], f64: vec![0.0; BLOCK_ELEMS], widened: vec![0.0; BLOCK_ELEMS] }
    }
}

fn add<T: Copy + std::ops::AddAssign>(accumulator: &mut [T], input: &[T]) {
    for (sum, x) in accumulator.iter_mut().zip(input) {
        *sum += *x;
    }
}

impl Accumulator {
    /// Starts a block with its first input.
    ///
    /// # Panics
    /// If `dtype` is [`Dtype::Bytes`], which has no sum, or the view is not aligned to its elements.
    pub fn start(&mut self, dtype: Dtype, input: &[u8]) {
        let elems = input.len() / dtype.size_bytes();
        match dtype {
            Dtype::F32 => self.f32[..elems].copy_from_slice(bytemuck::cast_slice(input)),
            Dtype::F64 => self.f64[..elems].copy_from_slice(bytemuck::cast_slice(input)),
            Dtype::F16 => bytemuck::cast_slice::<u8, f16>(input).convert_to_f32_slice(&mut self.f32[..elems]),
            Dtype::Bf16 => {
                bytemuck::cast_slice::<u8, bf16>(input).convert_to_f32_slice(&mut self.f32[..elems]);
            }
            Dtype::Bytes => unreachable!("bytes are copied, never summed"),
        }
    }

    /// Adds the next input to the block.
    ///
    /// # Panics
    /// As [`Accumulator::start`].
    pub fn add(&mut self, dtype: Dtype, input: &[u8]) {
        let elems = input.len() / dtype.size_bytes();
        match dtype {
            Dtype::F32 => add(&mut self.f32[..elems], bytemuck::cast_slice(input)),
            Dtype::F64 => add(&mut self.f64[..elems], bytemuck::cast_slice(input)),
            Dtype::F16 => {
                bytemuck::cast_slice::<u8, f16>(input).convert_to_f32_slice(&mut self.widened[..elems]);
                add(&mut self.f32[..elems], &self.widened[..elems]);
            }
            Dtype::Bf16 => {
                bytemuck::cast_slice::<u8, bf16>(input).convert_to_f32_slice(&mut self.widened[..elems]);
                add(&mut self.f32[..elems], &self.widened[..elems]);
            }
            Dtype::Bytes => unreachable!("bytes are copied, never summed"),
        }
    }

    /// Divides the block by `divisor` and writes it out.
    ///
    /// # Panics
    /// As [`Accumulator::start`].
    pub fn finish(&mut self, dtype: Dtype, divisor: u32, output: &mut [u8]) {
        let elems = output.len() / dtype.size_bytes();
        if dtype == Dtype::F64 {
            let divisor = f64::from(divisor);
            let sums = &mut self.f64[..elems];
            if divisor != 1.0 {
                sums.iter_mut().for_each(|x| *x /= divisor);
            }
            bytemuck::cast_slice_mut(output).copy_from_slice(sums);
            return;
        }
        let sums = &mut self.f32[..elems];
        if divisor != 1 {
            // Ranks are at most 4096, so the divisor is exact in fp32.
            #[allow(clippy::cast_precision_loss)]
            let divisor = divisor as f32;
            sums.iter_mut().for_each(|x| *x /= divisor);
        }
        match dtype {
            Dtype::F32 => bytemuck::cast_slice_mut(output).copy_from_slice(sums),
            Dtype::F16 => bytemuck::cast_slice_mut::<u8, f16>(output).convert_from_f32_slice(sums),
            Dtype::Bf16 => bytemuck::cast_slice_mut::<u8, bf16>(output).convert_from_f32_slice(sums),
            Dtype::F64 | Dtype::Bytes => unreachable!("handled above, or never summed"),
        }
    }
}

/// Byte ranges of the blocks of a piece of `len_bytes`.
pub fn blocks(dtype: Dtype, len_bytes: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let step = BLOCK_ELEMS * dtype.size_bytes();
    (0..len_bytes).step_by(step).map(move |start| start..(start + step).min(len_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(dtype: Dtype, inputs: &[Vec<u8>], divisor: u32) -> Vec<u8> {
        let mut accumulator = Accumulator::default();
        let mut output = vec![0; inputs[0].len()];
        for range in blocks(dtype, inputs[0].len()) {
            accumulator.start(dtype, &inputs[0][range.clone()]);
            for input in &inputs[1..] {
                accumulator.add(dtype, &input[range.clone()]);
            }
            accumulator.finish(dtype, divisor, &mut output[range]);
        }
        output
    }

    proptest! {
        #[test]
        fn f32_sums_in_the_order_given(rows in proptest::collection::vec(proptest::collection::vec(-1e6f32..1e6, 0..9000), 1..5)) {
            let len = rows.iter().map(Vec::len).min().unwrap();
            let inputs: Vec<Vec<u8>> = rows.iter().map(|r| bytemuck::cast_slice(&r[..len]).to_vec()).collect();
            let divisor = u32::try_from(rows.len()).unwrap();
            let got = sum(Dtype::F32, &inputs, divisor);
            for (i, value) in got.chunks_exact(4).enumerate() {
                let want = rows[1..].iter().fold(rows[0][i], |s, r| s + r[i]) / divisor as f32;
                prop_assert_eq!(f32::from_le_bytes(value.try_into().unwrap()).to_bits(), want.to_bits());
            }
        }

        #[test]
        fn halves_accumulate_in_f32_and_round_once(rows in proptest::collection::vec(proptest::collection::vec(-100f32..100.0, 50), 1..6)) {
            let divisor = u32::try_from(rows.len()).unwrap();
            let half: Vec<Vec<bf16>> = rows.iter().map(|r| r.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
            let inputs: Vec<Vec<u8>> = half.iter().map(|r| bytemuck::cast_slice(r).to_vec()).collect();
            let got = sum(Dtype::Bf16, &inputs, divisor);
            for (i, value) in got.chunks_exact(2).enumerate() {
                let want = half[1..].iter().fold(half[0][i].to_f32(), |s, r| s + r[i].to_f32()) / divisor as f32;
                prop_assert_eq!(bf16::from_le_bytes(value.try_into().unwrap()), bf16::from_f32(want));
            }
            let half: Vec<Vec<f16>> = rows.iter().map(|r| r.iter().map(|&x| f16::from_f32(x)).collect()).collect();
            let inputs: Vec<Vec<u8>> = half.iter().map(|r| bytemuck::cast_slice(r).to_vec()).collect();
            let got = sum(Dtype::F16, &inputs, divisor);
            for (i, value) in got.chunks_exact(2).enumerate() {
                let want = half[1..].iter().fold(half[0][i].to_f32(), |s, r| s + r[i].to_f32()) / divisor as f32;
                prop_assert_eq!(f16::from_le_bytes(value.try_into().unwrap()), f16::from_f32(want));
            }
        }

        #[test]
        fn f64_sums_in_the_order_given(rows in proptest::collection::vec(proptest::collection::vec(-1e6f64..1e6, 7), 1..5)) {
            let inputs: Vec<Vec<u8>> = rows.iter().map(|r| bytemuck::cast_slice(r).to_vec()).collect();
            let divisor = u32::try_from(rows.len()).unwrap();
            let got = sum(Dtype::F64, &inputs, divisor);
            for (i, value) in got.chunks_exact(8).enumerate() {
                let want = rows[1..].iter().fold(rows[0][i], |s, r| s + r[i]) / f64::from(divisor);
                prop_assert_eq!(f64::from_le_bytes(value.try_into().unwrap()).to_bits(), want.to_bits());
            }
        }
    }

    #[test]
    fn blocks_cover_everything_once() {
        for len in [0, 4, 16384, 16388, 100_000] {
            let mut end = 0;
            for range in blocks(Dtype::F32, len) {
                assert_eq!(range.start, end);
                end = range.end;
            }
            assert_eq!(end, len);
        }
    }
}
