//! What calls are given, and what must come out of them.

use crate::check::order;
use crate::memory::{Chunk, RealMemory, SimMemory};
use crate::random::Random;
use half::{bf16, f16};
use penstock_core::calls::slices;
use penstock_core::limits;
use penstock_core::memory::Memory;
use penstock_core::parts::part_start;
use penstock_core::types::{Dtype, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;

/// A length in elements: often one where something changes.
pub(super) fn draw_elems(random: &mut Random, elem_bytes: usize) -> usize {
    let edge = random.pick(&[limits::EAGER_BYTES_MAX, limits::PART_BYTES_MAX, 128 << 10]) / elem_bytes;
    match random.below(8) {
        0 => random.pick(&[0, 1, 2, 13]),
        1 => edge + random.below(3) as usize - 1,
        2 => random.between(1, 700_000) as usize / elem_bytes,
        _ => random.magnitude(1, 20_000) as usize,
    }
}

pub(super) fn numbers(random: &mut Random, dtype: Dtype, elems: usize) -> Vec<u8> {
    drawn(random, dtype, elems, |random| random.below(2001) as f64 / 1000.0 - 1.0)
}

/// Such that sums of some hundred are exact in every type.
pub(super) fn whole_numbers(random: &mut Random, dtype: Dtype, elems: usize) -> Vec<u8> {
    drawn(random, dtype, elems, |random| random.below(5) as f64 - 2.0)
}

/// Floating-point numbers as they are drawn; others are any.
fn drawn(random: &mut Random, dtype: Dtype, elems: usize, draw: fn(&mut Random) -> f64) -> Vec<u8> {
    let numbers = (0..elems).map(|_| draw(random));
    match dtype {
        Dtype::F32 => numbers.flat_map(|number| (number as f32).to_le_bytes()).collect(),
        Dtype::F64 => numbers.flat_map(f64::to_le_bytes).collect(),
        Dtype::F16 => numbers.flat_map(|number| f16::from_f64(number).to_le_bytes()).collect(),
        Dtype::Bf16 => numbers.flat_map(|number| bf16::from_f64(number).to_le_bytes()).collect(),
        _ => {
            let count = elems * dtype.size_bytes();
            (0..count.div_ceil(8)).flat_map(|_| random.bits().to_le_bytes()).take(count).collect()
        }
    }
}

pub(super) fn tensor(bytes: &[u8]) -> Chunk {
    let chunk = RealMemory::tensor(bytes.len());
    chunk.write(|memory| memory.copy_from_slice(bytes));
    chunk
}

/// So many numbers are summed one by one, as docs/summation.md says: longer ones take the tests' time.
pub(super) const ORDERED_ELEMS_MAX: usize = 4096;

/// Whether a sum is the same in any order, or made in the order of ranks: of longer ones the accumulator itself tells, which
/// then only has to have been given all ranks' numbers.
pub(super) fn is_plain(algorithm: Algorithm, dtype: Dtype) -> bool {
    matches!(algorithm, Algorithm::Store | Algorithm::Central)
        || matches!(dtype, Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U8)
}

/// What a sum is that has the same bits in any order.
pub(super) fn sum_in_any_order(dtype: Dtype, op: Op, rows: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let inputs: Vec<Chunk> = rows.map(|row| tensor(&row)).collect();
    let output = RealMemory::tensor(inputs[0].to_bytes().map_or(0, |bytes| bytes.len()));
    RealMemory::default().reduce(dtype, op.reduction(inputs.len() as u32), &inputs, &output);
    output.to_bytes().unwrap_or_default().into_vec()
}

/// What an allreduce by this algorithm gives: docs/summation.md for each slice.
pub(super) fn sum(algorithm: Algorithm, dtype: Dtype, op: Op, rows: &[Vec<u8>]) -> Vec<u8> {
    let (p, elem_bytes) = (rows.len() as u32, dtype.size_bytes());
    if is_plain(algorithm, dtype) && rows[0].len() > ORDERED_ELEMS_MAX * elem_bytes {
        return sum_in_any_order(dtype, op, rows.iter().cloned());
    }
    let elems = (rows[0].len() / elem_bytes) as u64;
    let count = slices(algorithm, elems, elem_bytes as u64, p);
    let how = order::Summation { algorithm, dtype, wire: dtype, op, active: p };
    let start = |slice| part_start(elems, u64::from(count), u64::from(slice)) as usize * elem_bytes;
    let slice = |number: u32| {
        let parts: Vec<Option<&[u8]>> =
            rows.iter().map(|row| Some(&row[start(number)..start(number + 1)])).collect();
        order::reduce(how, Rank(number % p), &parts).unwrap_or_default()
    };
    (0..count).flat_map(slice).collect()
}
