//! Every bound of the protocol in one place. A value beyond a bound is an error that names it, never a truncation.

/// Largest number of ranks in a job.
pub const RANKS_MAX: u32 = 4096;
/// Most newcomers in the life of a job.
pub const NEWCOMERS_MAX: u32 = 1024;
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
/// Most ranks that an abort frame blames.
pub const CULPRITS_MAX: usize = 64;
/// Longest payload of an abort frame, in bytes.
pub const ABORT_BYTES_MAX: usize = 12 + 4 * CULPRITS_MAX + REASON_BYTES_MAX;
/// Longest word of a rank on whom it waits for, in bytes: four lists of all ranks, and a description.
pub const REPLY_BYTES_MAX: usize = 1 + 4 * (2 + 2 * RANKS_MAX as usize) + 256;
/// Longest contribution to a gather, in bytes: its length travels in 32 bits.
pub const GATHER_BYTES_MAX: u64 = u32::MAX as u64;
/// Bytes of frames kept for books that peers have opened before this rank did; beyond it the peer is in error.
pub const EARLY_BYTES_MAX: usize = 512 << 20;
/// What each of these frames costs of that beyond its payload, which it need not have.
pub const EARLY_COST_BYTES: usize = 64;
/// Largest number of elements of a layer, of rows, and of numbers in a row, whose cost is estimated.
pub const COST_ELEMS_MAX: u64 = 1 << 34;
/// Most bytes that all ranks together may send for a layer whose cost is estimated.
pub const COST_BYTES_MAX: u128 = 1 << 62;
/// Largest number of groups of a job.
pub const GROUPS_MAX: usize = 1 << 16;
/// Largest message of a call, in bytes; longer tensors travel as several.
pub const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// Largest message that is sent without being asked for, in bytes.
pub const EAGER_BYTES_MAX: usize = 64 << 10;
/// Bytes of whole messages that a receiver keeps for each peer until it asks for them, the cost of each included.
pub const EAGER_WINDOW_BYTES: usize = 1 << 20;
/// What a whole message costs of that window beyond its payload.
pub const MESSAGE_COST_BYTES: usize = 64;
/// Largest part of a message that was asked for, in bytes.
pub const PART_BYTES_MAX: usize = 256 << 10;
/// Messages that one rank may offer to another, or be asked for in advance, at a time.
pub const OFFERS_MAX: usize = 1 << 16;
/// Largest number of pieces into which a call cuts a tensor: each is exchanged by itself.
pub const CALL_PIECES_MAX: usize = 1 << 16;
/// Largest number of tags of one piece.
pub const CALL_TAGS_MAX: u32 = 1 << 15;
/// What one direction of a connection through shared memory holds at most, in bytes; each has memory for two.
pub const PIPE_BYTES_MAX: usize = 1 << 20;
