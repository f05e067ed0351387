//! Admission on loopback: both ends agree on one connection, and no stranger disturbs them. Every port is 0, every
//! wait is bounded, and nothing is synchronised by sleeping.

#[cfg(target_os = "linux")]
mod on_host;
mod pairs;
mod strangers;
mod support;
