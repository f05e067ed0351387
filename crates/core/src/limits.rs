//! Every bound of the protocol in one place. A value beyond a bound is an error that names it, never a truncation.

/// Largest number of ranks in a job.
pub const RANKS_MAX: u32 = 4096;
/// Largest number of lanes of a process.
pub const LANES_MAX: u32 = 64;
/// Largest number of books open at once: gradients, parameters and buffers of each distributed model.
pub const BOOKS_MAX: usize = 1024;
/// Largest number of layers of a book; also the number of distinct priorities.
pub const LAYERS_MAX: usize = 65_536;
/// Largest number of tensors of a book.
pub const TENSORS_MAX: usize = 1 << 20;
/// Largest number of slices of a book.
pub const SLICES_MAX: u64 = 1 << 24;
/// Smallest slice, in bytes: below it the frame headers would dominate.
pub const SLICE_BYTES_MIN: usize = 1024;
/// Largest slice and so the largest payload of a data frame, in bytes.
pub const SLICE_BYTES_MAX: usize = 64 << 20;
/// Largest payload of a control frame (a blob of an all-gather, a reason), in bytes.
pub const BLOB_BYTES_MAX: usize = 64 << 20;
/// Longest text carried by an abort frame, in bytes.
pub const REASON_BYTES_MAX: usize = 4096;
/// Longest contribution to a gather, in bytes: its length travels in 32 bits.
pub const GATHER_BYTES_MAX: u64 = u32::MAX as u64;
/// Bytes of frames kept for books that peers have opened before this rank did; beyond it the peer is in error.
pub const EARLY_BYTES_MAX: usize = 512 << 20;
/// Largest number of elements of a layer, of rows, and of numbers in a row, whose cost is estimated.
pub const COST_ELEMS_MAX: u64 = 1 << 34;
/// Most bytes that all ranks together may send for a layer whose cost is estimated.
pub const COST_BYTES_MAX: u128 = 1 << 62;
