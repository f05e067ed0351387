//! Two memories for the nodes: numbers that are really summed, and lengths alone.
//!
//! Both count the scratch bytes they hold, and both tell whether a piece is still shared: that is how the simulated front end
//! learns that a submission's memory was released. Scratch buffers are not pooled here; the lanes do that.

use penstock_core::memory::Memory;
use penstock_core::optimizer::{self, Update};
use penstock_core::reduce::{self, Accumulator, Reduction, blocks, in_f32};
use penstock_core::types::Dtype;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Backed by words, so that every element type is aligned.
type Words = RefCell<Box<[u64]>>;

#[derive(Debug)]
struct Block {
    words: Option<Words>,
    len_bytes: usize,
    /// For scratch: the count of bytes held, to be lowered when this block goes.
    held_bytes: Option<Rc<Cell<u64>>>,
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(held) = &self.held_bytes {
            held.set(held.get() - self.len_bytes as u64);
        }
    }
}

/// A contiguous piece of real or virtual memory.
#[derive(Debug, Clone)]
pub struct Chunk {
    block: Rc<Block>,
    offset_bytes: usize,
    len_bytes: usize,
}

impl Chunk {
    fn new(len_bytes: usize, real: bool, held_bytes: Option<Rc<Cell<u64>>>) -> Self {
        // What memory contains before anybody has written to it must not look like a result.
        let words = real.then(|| RefCell::new(vec![0xA5A5_A5A5_A5A5_A5A5; len_bytes.div_ceil(8)].into()));
        Self { block: Rc::new(Block { words, len_bytes, held_bytes }), offset_bytes: 0, len_bytes }
    }

    /// Its length.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether anybody else holds a piece of the same memory.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Rc::strong_count(&self.block) > 1
    }

    /// Looks at the bytes; `None` for virtual memory.
    pub fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let words = self.block.words.as_ref()?.borrow();
        Some(look(&as_bytes(&words)[self.offset_bytes..self.offset_bytes + self.len_bytes]))
    }

    /// Changes the bytes; `None` for virtual memory.
    pub fn write<R>(&self, change: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let mut words = self.block.words.as_ref()?.borrow_mut();
        Some(change(&mut as_bytes_mut(&mut words)[self.offset_bytes..self.offset_bytes + self.len_bytes]))
    }

    /// A copy of the bytes; `None` for virtual memory.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Box<[u8]>> {
        self.read(|bytes| bytes.into())
    }

    pub(crate) fn part(&self, offset_bytes: usize, len_bytes: usize) -> Self {
        assert!(offset_bytes + len_bytes <= self.len_bytes, "a part beyond the end of its memory");
        Self { block: self.block.clone(), offset_bytes: self.offset_bytes + offset_bytes, len_bytes }
    }
}

fn as_bytes(words: &[u64]) -> &[u8] {
    bytemuck::cast_slice(words)
}

fn as_bytes_mut(words: &mut [u64]) -> &mut [u8] {
    bytemuck::cast_slice_mut(words)
}

/// A memory that the simulator can look into.
pub trait SimMemory: Memory<Chunk = Chunk> + Default {
    /// Whether there are bytes behind the lengths.
    const REAL: bool;

    /// Scratch bytes in use now.
    fn held_bytes(&self) -> u64;

    /// Memory of the user: a tensor.
    #[must_use]
    fn tensor(len_bytes: usize) -> Chunk {
        Chunk::new(len_bytes, Self::REAL, None)
    }
}

/// Numbers: results are computed, so they can be checked bit by bit.
#[derive(Debug, Default)]
pub struct RealMemory {
    held_bytes: Rc<Cell<u64>>,
}

/// Lengths alone: simulating 32 nodes x 229M parameters costs no memory.
#[derive(Debug, Default)]
pub struct VirtualMemory {
    held_bytes: Rc<Cell<u64>>,
}

fn scratch(len_bytes: usize, real: bool, held_bytes: &Rc<Cell<u64>>) -> Chunk {
    held_bytes.set(held_bytes.get() + len_bytes as u64);
    Chunk::new(len_bytes, real, Some(held_bytes.clone()))
}

thread_local! {
    // One for all simulated nodes of a thread: it has no state between sums, and zeroing 64 KiB for each node would cost
    // more than a short simulation.
    static ACCUMULATOR: RefCell<Accumulator> = RefCell::new(Accumulator::default());
}

impl Memory for RealMemory {
    type Chunk = Chunk;

    fn part(&self, chunk: &Chunk, offset_bytes: usize, len_bytes: usize) -> Chunk {
        chunk.part(offset_bytes, len_bytes)
    }

    fn scratch(&mut self, len_bytes: usize) -> Chunk {
        scratch(len_bytes, true, &self.held_bytes)
    }

    fn reduce(&mut self, dtype: Dtype, how: Reduction, inputs: &[Chunk], output: &Chunk) {
        if let ([input], true) = (inputs, how.keeps_one()) {
            let bytes = input.to_bytes();
            output.write(|out| bytes.iter().for_each(|bytes| out.copy_from_slice(bytes)));
            return;
        }
        ACCUMULATOR.with_borrow_mut(|accumulator| {
            for range in blocks(dtype, output.len_bytes) {
                for (i, input) in inputs.iter().enumerate() {
                    input.read(|bytes| match i {
                        0 => accumulator.start(dtype, &bytes[range.clone()]),
                        _ => accumulator.add(dtype, how, &bytes[range.clone()]),
                    });
                }
                output.write(|bytes| accumulator.finish(dtype, how, &mut bytes[range.clone()]));
            }
        });
    }

    fn reduce_rounded(
        &mut self,
        wire: Dtype,
        how: Reduction,
        inputs: &[Chunk],
        own: Option<usize>,
        output: &Chunk,
    ) {
        ACCUMULATOR.with_borrow_mut(|accumulator| {
            for block in blocks(wire, output.len_bytes / 2) {
                for (i, input) in inputs.iter().enumerate() {
                    let (dtype, range) =
                        if own == Some(i) { (Dtype::F32, in_f32(&block)) } else { (wire, block.clone()) };
                    input.read(|bytes| match i {
                        0 => accumulator.start(dtype, &bytes[range]),
                        _ => accumulator.add(dtype, how, &bytes[range]),
                    });
                }
                output.write(|bytes| accumulator.finish_rounded(wire, how, &mut bytes[in_f32(&block)]));
            }
        });
    }

    fn round(&mut self, wire: Dtype, input: &Chunk, output: &Chunk) {
        input.read(|bytes| output.write(|rounded| reduce::round(wire, bytes, rounded)));
    }

    fn expand(&mut self, wire: Dtype, input: &Chunk, output: &Chunk) {
        input.read(|bytes| output.write(|expanded| reduce::expand(wire, bytes, expanded)));
    }

    fn is_shared(&self, chunk: &Chunk) -> bool {
        chunk.is_shared()
    }

    fn update(
        &mut self,
        dtype: Dtype,
        update: &Update,
        number: u64,
        value: &Chunk,
        gradient: &Chunk,
        states: &[Chunk],
        output: &Chunk,
    ) {
        // In copies: several views of one block cannot be borrowed at a time.
        let mut kept: Vec<Box<[u8]>> = states.iter().chain([value]).filter_map(Chunk::to_bytes).collect();
        let gradient = gradient.to_bytes().unwrap_or_default();
        let (last, first) = kept.split_last_mut().expect("a value");
        let mut views: Vec<&mut [u8]> = first.iter_mut().map(|state| &mut state[..]).collect();
        update.apply(dtype, number, last, &gradient, &mut views).expect("the book has checked the type");
        for (chunk, bytes) in states.iter().chain([output]).zip(&kept) {
            chunk.write(|memory| memory.copy_from_slice(bytes));
        }
    }

    fn clear(&mut self, output: &Chunk) {
        output.write(|bytes| bytes.fill(0));
    }

    fn fill(&mut self, dtype: Dtype, number: f64, output: &Chunk) {
        output.write(|bytes| optimizer::fill(dtype, number, bytes).expect("the book has checked the type"));
    }

    fn squares(&mut self, dtype: Dtype, input: &Chunk) -> f64 {
        let sum =
            input.read(|bytes| optimizer::squares(dtype, bytes).expect("the book has checked the type"));
        sum.unwrap_or_default()
    }
}

impl SimMemory for RealMemory {
    const REAL: bool = true;

    fn held_bytes(&self) -> u64 {
        self.held_bytes.get()
    }
}

impl Memory for VirtualMemory {
    type Chunk = Chunk;

    fn part(&self, chunk: &Chunk, offset_bytes: usize, len_bytes: usize) -> Chunk {
        chunk.part(offset_bytes, len_bytes)
    }

    fn scratch(&mut self, len_bytes: usize) -> Chunk {
        scratch(len_bytes, false, &self.held_bytes)
    }

    fn reduce(&mut self, _: Dtype, _: Reduction, inputs: &[Chunk], output: &Chunk) {
        assert!(inputs.iter().all(|input| input.len_bytes == output.len_bytes), "lengths differ in a sum");
    }

    fn reduce_rounded(
        &mut self,
        _: Dtype,
        _: Reduction,
        inputs: &[Chunk],
        own: Option<usize>,
        output: &Chunk,
    ) {
        for (i, input) in inputs.iter().enumerate() {
            let factor = if own == Some(i) { 1 } else { 2 };
            assert_eq!(input.len_bytes * factor, output.len_bytes, "lengths differ in a sum");
        }
    }

    fn round(&mut self, _: Dtype, input: &Chunk, output: &Chunk) {
        assert_eq!(input.len_bytes, 2 * output.len_bytes, "a half has half the bytes");
    }

    fn expand(&mut self, _: Dtype, input: &Chunk, output: &Chunk) {
        assert_eq!(2 * input.len_bytes, output.len_bytes, "a half has half the bytes");
    }

    fn is_shared(&self, chunk: &Chunk) -> bool {
        chunk.is_shared()
    }

    fn update(
        &mut self,
        _: Dtype,
        _: &Update,
        _: u64,
        value: &Chunk,
        gradient: &Chunk,
        states: &[Chunk],
        output: &Chunk,
    ) {
        let same = states.iter().chain([gradient, output]).all(|other| other.len_bytes == value.len_bytes);
        assert!(same, "lengths differ in an update");
    }

    fn clear(&mut self, _: &Chunk) {}

    fn fill(&mut self, _: Dtype, _: f64, _: &Chunk) {}

    fn squares(&mut self, _: Dtype, _: &Chunk) -> f64 {
        0.0
    }
}

impl SimMemory for VirtualMemory {
    const REAL: bool = false;

    fn held_bytes(&self) -> u64 {
        self.held_bytes.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_counted_until_its_last_piece_goes() {
        let mut memory = RealMemory::default();
        let chunk = memory.scratch(100);
        let part = memory.part(&chunk, 8, 20);
        assert_eq!((memory.held_bytes(), chunk.is_shared(), part.len_bytes()), (100, true, 20));
        drop(chunk);
        assert_eq!((memory.held_bytes(), part.is_shared()), (100, false));
        drop(part);
        assert_eq!(memory.held_bytes(), 0);
    }

    #[test]
    fn parts_share_bytes_and_virtual_memory_has_none() {
        let chunk = RealMemory::tensor(16);
        let part = RealMemory::default().part(&chunk, 4, 4);
        part.write(|bytes| bytes.fill(1));
        assert_eq!(chunk.read(|bytes| bytes.iter().filter(|b| **b == 1).count()), Some(4));
        assert_eq!(VirtualMemory::tensor(1 << 40).to_bytes(), None);
    }
}
