//! Penstock on real sockets: the only crate with threads and a real clock.
//!
//! A program talks to an [`Engine`]. The engine owns lanes: threads that each have one connection per peer and drive one
//! [`penstock_core::node::Node`]. Connections come from the [`admission`] thread, which proves every [`handshake`].
//!
//! What this crate decides: when to read and write. What it leaves to the core: everything about slices, including which
//! frame goes next, and everything about the life of the job: who is lost, and whose fault it is.

mod accounting;
pub mod admission;
mod call;
mod congestion;
mod connection;
mod council;
pub mod descriptors;
mod engine;
mod exit;
mod failure;
pub mod handshake;
mod lane;
mod line;
mod mailbox;
pub mod memory;
mod observed;
mod report;
mod seal;
mod send_buffer;
mod shared;
mod socket;
mod summing;
mod tcp_info;
pub mod transport;

pub use accounting::{Busy, Phase};
pub use call::Handle;
pub use engine::{AddressRange, CallPart, Engine, EngineConfig, Landed, Lent, Until};
pub use failure::{Failure, Stop};
pub use observed::{MomentBuffer, Observations, Record};
pub use report::{BookReport, LayerReport, PeerReport, Report};
pub use summing::summing_rate;
