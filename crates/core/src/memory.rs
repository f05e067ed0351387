//! What a node needs from memory, so that it can run over real numbers or over lengths alone.

use crate::optimizer::Update;
use crate::reduce::Reduction;
use crate::types::Dtype;

/// Memory of one lane: the gradients that workers handed over, and pooled scratch buffers.
pub trait Memory {
    /// A contiguous piece of memory. Cloning is cheap and shares the bytes; the memory is given back (to the user or
    /// to the pool) when the last clone is dropped.
    type Chunk: Clone;

    /// `len_bytes` bytes of `chunk` from `offset_bytes`.
    fn part(&self, chunk: &Self::Chunk, offset_bytes: usize, len_bytes: usize) -> Self::Chunk;

    /// A scratch buffer with undefined contents.
    fn scratch(&mut self, len_bytes: usize) -> Self::Chunk;

    /// Writes to `output` the reduction of `inputs` in the order given, as [`crate::reduce`] defines it. `output` may be one
    /// of the inputs. All have the same length. One input whose reduction is itself ([`Reduction::keeps_one`]) is copied as
    /// bytes, for any dtype: NaN payloads and integers survive.
    fn reduce(&mut self, dtype: Dtype, how: Reduction, inputs: &[Self::Chunk], output: &Self::Chunk);

    /// As [`Memory::reduce`] for a tensor of fp32 that travels as `wire`: `inputs` are of that type, but for number `own`, which is
    /// fp32 as `output` is. They are combined in fp32; then the result is rounded ([`crate::reduce::round`]) and expanded again.
    fn reduce_rounded(
        &mut self,
        wire: Dtype,
        how: Reduction,
        inputs: &[Self::Chunk],
        own: Option<usize>,
        output: &Self::Chunk,
    );

    /// Rounds `input`, fp32, to `output`, of type `wire`.
    fn round(&mut self, wire: Dtype, input: &Self::Chunk, output: &Self::Chunk);

    /// Expands `input`, of type `wire`, to `output`, fp32.
    fn expand(&mut self, wire: Dtype, input: &Self::Chunk, output: &Self::Chunk);

    /// Whether there is another piece of this chunk's memory.
    fn is_shared(&self, chunk: &Self::Chunk) -> bool;

    /// Makes update `number`, from 1, of `value` with its `gradient`, and writes the new value to `output`, which is either of the two.
    /// All have the same length, and the book has checked that values of this type have updates.
    #[allow(clippy::too_many_arguments)]
    fn update(
        &mut self,
        dtype: Dtype,
        update: &Update,
        number: u64,
        value: &Self::Chunk,
        gradient: &Self::Chunk,
        states: &[Self::Chunk],
        output: &Self::Chunk,
    );

    /// Fills a chunk, of whatever type, with zero bytes.
    fn clear(&mut self, output: &Self::Chunk);

    /// Fills a chunk of such a type with a number.
    fn fill(&mut self, dtype: Dtype, number: f64, output: &Self::Chunk);

    /// The sum of the squares of such a type, as [`crate::optimizer::squares`] defines it.
    fn squares(&mut self, dtype: Dtype, input: &Self::Chunk) -> f64;
}
