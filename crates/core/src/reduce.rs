//! Sums in a fixed order, block by block, rounded once per addition at the accumulator's precision.
//!
//! The result for element i is `((x0[i] + x1[i]) + x2[i]) + ...`, divided at the end by the number of ranks that take
//! part, those included that give nothing. fp32 and fp64 accumulate in their own type; fp16 and bf16 accumulate in fp32 and
//! are rounded once, at the end; integers accumulate modulo 2^64, so sums wrap as their type does. Smallest and largest are
//! exact in every type. The order is the caller's, so the bits do not depend on arrival order.

use crate::types::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements summed at a time: the accumulator (16 or 32 KiB) stays in the first-level cache.
pub const BLOCK_ELEMS: usize = 4096;

/// What is made of several inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum, divided by this. Sums of integers are not divided.
    Sum {
        /// How many ranks the average is over; 1 for a sum.
        divisor: u32,
    },
    /// The smallest, element by element. NaN if any is NaN; the first of those that are equal (zeros of both signs).
    Min,
    /// The largest, element by element; NaN and equals as for the smallest.
    Max,
}

impl Reduction {
    /// Whether the reduction of one input is that input, bit by bit.
    #[must_use]
    pub fn keeps_one(self) -> bool {
        !matches!(self, Self::Sum { divisor: 2.. })
    }
}

/// Accumulates one block of up to [`BLOCK_ELEMS`] elements.
///
/// The byte views handed over must be aligned to the element size; torch's tensors and pooled buffers are.
#[derive(Debug)]
pub struct Accumulator {
    f32: Vec<f32>,
    f64: Vec<f64>,
    widened: Vec<f32>,
    /// Of all integer types. Empty until the first block of integers.
    i64: Vec<i64>,
    /// Bits of results on their way through a half type. Empty until there is such a block.
    half: Vec<u16>,
}

impl Default for Accumulator {
    fn default() -> Self {
        let (i64, half) = (Vec::new(), Vec::new());
        Self {
            f32: vec![0.0; BLOCK_ELEMS],
            f64: vec![0.0; BLOCK_ELEMS],
            widened: vec![0.0; BLOCK_ELEMS],
            i64,
            half,
        }
    }
}

/// Floating point numbers, for one body for both.
trait Float: Copy + PartialOrd + std::ops::AddAssign {
    fn is_nan(self) -> bool;
}

impl Float for f32 {
    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

impl Float for f64 {
    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

fn combine<T: Float>(how: Reduction, accumulator: &mut [T], input: &[T]) {
    let pairs = accumulator.iter_mut().zip(input);
    match how {
        Reduction::Sum { .. } => pairs.for_each(|(sum, x)| *sum += *x),
        Reduction::Min => pairs.for_each(|(least, x)| {
            if *x < *least || x.is_nan() {
                *least = *x;
            }
        }),
        Reduction::Max => pairs.for_each(|(most, x)| {
            if *x > *most || x.is_nan() {
                *most = *x;
            }
        }),
    }
}

/// Widens each integer of `input` to 64 bits and combines it.
fn combine_integers<T: bytemuck::AnyBitPattern + Into<i64>>(
    how: Reduction,
    accumulator: &mut [i64],
    input: &[u8],
) {
    let pairs = accumulator.iter_mut().zip(bytemuck::cast_slice::<u8, T>(input));
    match how {
        Reduction::Sum { .. } => pairs.for_each(|(sum, x)| *sum = sum.wrapping_add((*x).into())),
        Reduction::Min => pairs.for_each(|(least, x)| *least = (*least).min((*x).into())),
        Reduction::Max => pairs.for_each(|(most, x)| *most = (*most).max((*x).into())),
    }
}

fn widen<T: bytemuck::AnyBitPattern + Into<i64>>(accumulator: &mut [i64], input: &[u8]) {
    for (wide, x) in accumulator.iter_mut().zip(bytemuck::cast_slice::<u8, T>(input)) {
        *wide = (*x).into();
    }
}

/// Writes the low bytes of each: the value modulo 2^bits, as integers of the type wrap.
fn narrow<const N: usize>(accumulator: &[i64], output: &mut [u8]) {
    for (x, bytes) in accumulator.iter().zip(output.chunks_exact_mut(N)) {
        bytes.copy_from_slice(&x.to_ne_bytes()[if cfg!(target_endian = "big") { 8 - N..8 } else { 0..N }]);
    }
}

const NEVER_SUMMED: &str = "bytes are copied, never summed";

impl Accumulator {
    /// Starts a block with its first input.
    ///
    /// # Panics
    /// If `dtype` is [`Dtype::Bytes`], which has no sum, or the view is not aligned to its elements.
    pub fn start(&mut self, dtype: Dtype, input: &[u8]) {
        let elems = input.len() / dtype.size_bytes();
        if dtype.is_integer() {
            self.i64.resize(BLOCK_ELEMS, 0);
        }
        match dtype {
            Dtype::F32 => self.f32[..elems].copy_from_slice(bytemuck::cast_slice(input)),
            Dtype::F64 => self.f64[..elems].copy_from_slice(bytemuck::cast_slice(input)),
            Dtype::F16 => bytemuck::cast_slice::<u8, f16>(input).convert_to_f32_slice(&mut self.f32[..elems]),
            Dtype::Bf16 => {
                bytemuck::cast_slice::<u8, bf16>(input).convert_to_f32_slice(&mut self.f32[..elems]);
            }
            Dtype::I64 => widen::<i64>(&mut self.i64[..elems], input),
            Dtype::I32 => widen::<i32>(&mut self.i64[..elems], input),
            Dtype::I16 => widen::<i16>(&mut self.i64[..elems], input),
            Dtype::I8 => widen::<i8>(&mut self.i64[..elems], input),
            Dtype::U8 => widen::<u8>(&mut self.i64[..elems], input),
            Dtype::Bytes => unreachable!("{NEVER_SUMMED}"),
        }
    }

    /// Combines the next input with the block.
    ///
    /// # Panics
    /// As [`Accumulator::start`].
    pub fn add(&mut self, dtype: Dtype, how: Reduction, input: &[u8]) {
        let elems = input.len() / dtype.size_bytes();
        match dtype {
            Dtype::F32 => combine(how, &mut self.f32[..elems], bytemuck::cast_slice(input)),
            Dtype::F64 => combine(how, &mut self.f64[..elems], bytemuck::cast_slice(input)),
            Dtype::F16 => {
                bytemuck::cast_slice::<u8, f16>(input).convert_to_f32_slice(&mut self.widened[..elems]);
                combine(how, &mut self.f32[..elems], &self.widened[..elems]);
            }
            Dtype::Bf16 => {
                bytemuck::cast_slice::<u8, bf16>(input).convert_to_f32_slice(&mut self.widened[..elems]);
                combine(how, &mut self.f32[..elems], &self.widened[..elems]);
            }
            Dtype::I64 => combine_integers::<i64>(how, &mut self.i64[..elems], input),
            Dtype::I32 => combine_integers::<i32>(how, &mut self.i64[..elems], input),
            Dtype::I16 => combine_integers::<i16>(how, &mut self.i64[..elems], input),
            Dtype::I8 => combine_integers::<i8>(how, &mut self.i64[..elems], input),
            Dtype::U8 => combine_integers::<u8>(how, &mut self.i64[..elems], input),
            Dtype::Bytes => unreachable!("{NEVER_SUMMED}"),
        }
    }

    /// Divides the block, if that is asked for, and writes it out.
    ///
    /// # Panics
    /// As [`Accumulator::start`].
    pub fn finish(&mut self, dtype: Dtype, how: Reduction, output: &mut [u8]) {
        let elems = output.len() / dtype.size_bytes();
        let divisor = if let Reduction::Sum { divisor } = how { divisor } else { 1 };
        match dtype {
            Dtype::F64 => {
                let divisor = f64::from(divisor);
                let sums = &mut self.f64[..elems];
                if divisor != 1.0 {
                    sums.iter_mut().for_each(|x| *x /= divisor);
                }
                bytemuck::cast_slice_mut(output).copy_from_slice(sums);
                return;
            }
            Dtype::I64 => return narrow::<8>(&self.i64[..elems], output),
            Dtype::I32 => return narrow::<4>(&self.i64[..elems], output),
            Dtype::I16 => return narrow::<2>(&self.i64[..elems], output),
            Dtype::I8 | Dtype::U8 => return narrow::<1>(&self.i64[..elems], output),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
            Dtype::Bytes => unreachable!("{NEVER_SUMMED}"),
        }
        let sums = &mut self.f32[..elems];
        if divisor != 1 {
            // Ranks are at most 4096, so the divisor is exact in fp32.
            #[allow(clippy::cast_precision_loss)]
            let divisor = divisor as f32;
            sums.iter_mut().for_each(|x| *x /= divisor);
        }
        match dtype {
            Dtype::F16 => bytemuck::cast_slice_mut::<u8, f16>(output).convert_from_f32_slice(sums),
            Dtype::Bf16 => bytemuck::cast_slice_mut::<u8, bf16>(output).convert_from_f32_slice(sums),
            _ => bytemuck::cast_slice_mut(output).copy_from_slice(sums),
        }
    }

    /// As [`Accumulator::finish`] in fp32, but every result is rounded to the half type `wire` and expanded again.
    ///
    /// # Panics
    /// As [`round`].
    pub fn finish_rounded(&mut self, wire: Dtype, how: Reduction, output: &mut [u8]) {
        let mut half = std::mem::take(&mut self.half);
        half.resize(BLOCK_ELEMS, 0);
        let rounded = &mut half[..output.len() / Dtype::F32.size_bytes()];
        self.finish(wire, how, bytemuck::cast_slice_mut(rounded));
        expand(wire, bytemuck::cast_slice(rounded), output);
        self.half = half;
    }
}

/// Rounds fp32 to the half type `wire`, to the nearest, of two equally near to the even one: as IEEE 754 and torch do. What is
/// too large becomes infinite, NaN stays NaN, and subnormals of the half type are kept.
///
/// Infinite and not the largest: a gradient that overflows is to be seen, by loss scaling above all, which halves its scale then.
///
/// # Panics
/// If `wire` is no half type, lengths do not match, or a view is not aligned to its elements.
pub fn round(wire: Dtype, input: &[u8], output: &mut [u8]) {
    let input = bytemuck::cast_slice(input);
    match wire {
        Dtype::F16 => bytemuck::cast_slice_mut::<u8, f16>(output).convert_from_f32_slice(input),
        Dtype::Bf16 => bytemuck::cast_slice_mut::<u8, bf16>(output).convert_from_f32_slice(input),
        _ => unreachable!("{} is no wire type of fp32", wire.name()),
    }
}

/// Expands the half type `wire` to fp32, which is exact.
///
/// # Panics
/// As [`round`].
pub fn expand(wire: Dtype, input: &[u8], output: &mut [u8]) {
    let output = bytemuck::cast_slice_mut(output);
    match wire {
        Dtype::F16 => bytemuck::cast_slice::<u8, f16>(input).convert_to_f32_slice(output),
        Dtype::Bf16 => bytemuck::cast_slice::<u8, bf16>(input).convert_to_f32_slice(output),
        _ => unreachable!("{} is no wire type of fp32", wire.name()),
    }
}

/// Where the fp32 numbers lie whose halves lie in `range`; both in bytes.
#[must_use]
pub fn in_f32(range: &std::ops::Range<usize>) -> std::ops::Range<usize> {
    2 * range.start..2 * range.end
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
        reduce(dtype, Reduction::Sum { divisor }, inputs)
    }

    fn reduce(dtype: Dtype, how: Reduction, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut accumulator = Accumulator::default();
        let mut output = vec![0; inputs[0].len()];
        for range in blocks(dtype, inputs[0].len()) {
            accumulator.start(dtype, &inputs[0][range.clone()]);
            for input in &inputs[1..] {
                accumulator.add(dtype, how, &input[range.clone()]);
            }
            accumulator.finish(dtype, how, &mut output[range]);
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

        /// Against the definition: no half is nearer, and of two equally near the even one is taken; the step above the largest
        /// finite one counts as infinity.
        #[test]
        fn rounding_takes_the_nearest_and_of_two_the_even_half(bits: u32, nearby in 0u32..1 << 17, wide: bool) {
            // Half of the cases with exponents around those of fp16, subnormals included.
            let bits = if wide { bits } else { (bits & 0x8000_0000) | (0x3200_0000 + (bits & 0x1fff) * 0x1000 + nearby) };
            let x = f32::from_bits(bits);
            for (wire, infinity) in [(Dtype::F16, 65536.0), (Dtype::Bf16, 2f64.powi(128))] {
                let half = round_one(wire, x);
                if x.is_nan() {
                    prop_assert!(expand_one(wire, half).is_nan());
                    continue;
                }
                prop_assert_eq!(half >> 15, (bits >> 31) as u16, "the sign stays, that of zero too");
                let magnitude = half & 0x7fff;
                let value = |magnitude: u16| {
                    let value = f64::from(expand_one(wire, magnitude));
                    if value.is_infinite() { infinity } else { value }
                };
                let distance = |magnitude: u16| (f64::from(x.abs()).min(infinity) - value(magnitude)).abs();
                if magnitude > 0 {
                    prop_assert!(distance(magnitude) <= distance(magnitude - 1), "{x:e} as {wire:?}");
                    prop_assert!(distance(magnitude) < distance(magnitude - 1) || magnitude.is_multiple_of(2), "{x:e} as {wire:?}");
                }
                if value(magnitude) < infinity {
                    prop_assert!(distance(magnitude) <= distance(magnitude + 1), "{x:e} as {wire:?}");
                    prop_assert!(distance(magnitude) < distance(magnitude + 1) || magnitude.is_multiple_of(2), "{x:e} as {wire:?}");
                }
            }
        }

        #[test]
        fn a_rounded_sum_takes_its_own_part_in_fp32_and_rounds_once(
            rows in proptest::collection::vec(proptest::collection::vec(-100f32..100.0, 50), 1..6), own in 0usize..7, bf: bool
        ) {
            let wire = if bf { Dtype::Bf16 } else { Dtype::F16 };
            let divisor = u32::try_from(rows.len()).unwrap();
            let mut accumulator = Accumulator::default();
            let mut want = vec![0f32; 50];
            for (i, row) in rows.iter().enumerate() {
                let halves: Vec<u16> = row.iter().map(|x| round_one(wire, *x)).collect();
                let (dtype, bytes) =
                    if i == own { (Dtype::F32, bytemuck::cast_slice(row)) } else { (wire, bytemuck::cast_slice(&halves)) };
                if i == 0 { accumulator.start(dtype, bytes) } else { accumulator.add(dtype, Reduction::Sum { divisor }, bytes) }
                for (sum, (x, half)) in want.iter_mut().zip(row.iter().zip(&halves)) {
                    *sum += if i == own { *x } else { expand_one(wire, *half) };
                }
            }
            let mut got = vec![0f32; 50];
            accumulator.finish_rounded(wire, Reduction::Sum { divisor }, bytemuck::cast_slice_mut(&mut got));
            for (got, sum) in got.iter().zip(want) {
                prop_assert_eq!(*got, expand_one(wire, round_one(wire, sum / divisor as f32)));
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

    fn round_one(wire: Dtype, x: f32) -> u16 {
        let mut half = [0u16];
        round(wire, bytemuck::cast_slice(&[x]), bytemuck::cast_slice_mut(&mut half));
        half[0]
    }

    fn expand_one(wire: Dtype, half: u16) -> f32 {
        let mut x = [0f32];
        expand(wire, bytemuck::cast_slice(&[half]), bytemuck::cast_slice_mut(&mut x));
        x[0]
    }

    /// So an answer can be rounded again from a result in fp32.
    #[test]
    fn every_half_survives_its_expansion() {
        for wire in [Dtype::F16, Dtype::Bf16] {
            for half in 0..=u16::MAX {
                let x = expand_one(wire, half);
                let same = round_one(wire, x);
                assert!(
                    same == half || x.is_nan() && expand_one(wire, same).is_nan(),
                    "{half:#x} as {wire:?}"
                );
            }
        }
    }

    #[test]
    fn what_is_too_large_becomes_infinite() {
        assert_eq!(expand_one(Dtype::F16, round_one(Dtype::F16, 65519.0)), 65504.0);
        assert_eq!(expand_one(Dtype::F16, round_one(Dtype::F16, -65520.0)), f32::NEG_INFINITY);
        assert_eq!(expand_one(Dtype::Bf16, round_one(Dtype::Bf16, f32::MAX)), f32::INFINITY);
        assert_eq!(round_one(Dtype::F16, 2f32.powi(-24)), 1, "the smallest subnormal");
        assert_eq!(round_one(Dtype::F16, 2f32.powi(-25)), 0, "half of it, and zero is even");
    }

    /// Sums, smallest and largest of one integer type against plain arithmetic, over more than one block.
    macro_rules! integers {
        ($name:ident, $type:ty, $dtype:expr) => {
            #[test]
            fn $name() {
                let rows: Vec<Vec<$type>> = (0..3u64)
                    .map(|row| {
                        (0..BLOCK_ELEMS as u64 + 3)
                            .map(|i| (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 + row * 77) as $type)
                            .collect()
                    })
                    .collect();
                let inputs: Vec<Vec<u8>> = rows.iter().map(|r| bytemuck::cast_slice(r).to_vec()).collect();
                let want = |f: fn($type, $type) -> $type| -> Vec<u8> {
                    let columns = (0..rows[0].len()).map(|i| f(f(rows[0][i], rows[1][i]), rows[2][i]));
                    bytemuck::cast_slice(&columns.collect::<Vec<$type>>()).to_vec()
                };
                assert_eq!(sum($dtype, &inputs, 1), want(<$type>::wrapping_add));
                assert_eq!(reduce($dtype, Reduction::Min, &inputs), want(Ord::min));
                assert_eq!(reduce($dtype, Reduction::Max, &inputs), want(Ord::max));
            }
        };
    }

    integers!(i64_wraps, i64, Dtype::I64);
    integers!(i32_wraps, i32, Dtype::I32);
    integers!(i16_wraps, i16, Dtype::I16);
    integers!(i8_wraps, i8, Dtype::I8);
    integers!(u8_wraps, u8, Dtype::U8);

    #[test]
    fn smallest_and_largest_keep_nan_and_the_first_of_equals() {
        let bytes = |row: &[f32]| bytemuck::cast_slice(row).to_vec();
        let inputs =
            [bytes(&[1.0, f32::NAN, 0.0, 5.0]), bytes(&[-2.0, 1.0, -0.0, f32::NAN]), bytes(&[3.0; 4])];
        let got = |how| -> Vec<f32> { bytemuck::cast_slice(&reduce(Dtype::F32, how, &inputs)).to_vec() };
        let least = got(Reduction::Min);
        assert_eq!((least[0], least[2].to_bits()), (-2.0, 0));
        assert!(least[1].is_nan() && least[3].is_nan());
        let most = got(Reduction::Max);
        assert_eq!((most[0], most[2]), (3.0, 3.0));
        assert!(most[1].is_nan() && most[3].is_nan());
    }

    #[test]
    fn smallest_and_largest_of_halves_are_exact() {
        let rows = [[1.5f32, -2.25, 65504.0], [0.099_975_586, 7.0, -65504.0]].map(|r| r.map(f16::from_f32));
        let inputs: Vec<Vec<u8>> = rows.iter().map(|r| bytemuck::cast_slice(r).to_vec()).collect();
        let want = |pick: fn(f16, f16) -> bool| -> Vec<u8> {
            let picked = (0..3).map(|i| if pick(rows[0][i], rows[1][i]) { rows[0][i] } else { rows[1][i] });
            bytemuck::cast_slice(&picked.collect::<Vec<f16>>()).to_vec()
        };
        assert_eq!(reduce(Dtype::F16, Reduction::Min, &inputs), want(|a, b| a < b));
        assert_eq!(reduce(Dtype::F16, Reduction::Max, &inputs), want(|a, b| a > b));
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
