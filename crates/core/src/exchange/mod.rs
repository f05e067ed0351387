//! Exchanges: how the contributions to one slice become one result on every rank.
//!
//! Each slice is its own exchange, named by (book, slice, seq), so ranks need not agree on an order and a slice may
//! overtake any other. One file per scheme.

pub mod store;
