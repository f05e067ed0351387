//! How long things may take before they mean something. Those of one part alone are in its file.

const MS: u64 = 1_000_000;
/// How long the end of a connection without a goodbye is held back, in case another rank knows the reason.
pub const SUSPICION_NS: u64 = 300 * MS;
/// How long nothing may move for a rank that has said goodbye before that counts as its fault.
pub const DEPARTURE_GRACE_NS: u64 = 2000 * MS;
/// How long a verdict may take to settle.
pub const SETTLE_NS: u64 = 2000 * MS;
/// How long it takes at least if a rank does not tell its own here: word of a better one may come through others.
pub const SETTLE_INDIRECT_NS: u64 = 500 * MS;
