//! The protocol of Penstock, decided purely: events in, actions and frames out.
//!
//! A [`node::Node`] is one lane of one rank: a worker and its shard of the key-value store. Drivers feed it
//! events ("this gradient is ready", "this frame arrived") and ask it, at the last moment before a write, which
//! frame goes next to a peer ([`node::Node::next_frame`]). The same node runs on real sockets and in the simulator.
//!
//! What this crate leaves out on purpose: sockets, clocks, threads, Python, and memory itself. Memory is behind
//! [`memory::Memory`], so that a simulation may move lengths instead of numbers; and whoever watches is behind
//! [`observe::Observe`].
//!
//! A slice's journey through the modules: [`layout`] (which slices exist, who owns them) → [`exchange`] (what a slice
//! does next) → the [`node`]'s outbox, over [`queue`] (which frame goes first) → [`wire`] (its bytes) and, on the other side, back up to
//! [`reduce`] (the sum in the algorithm's order). Who is alive, and whose fault it is if the job fails: [`life`].

pub mod agreement;
pub mod all_gather;
pub mod bits;
pub mod calls;
pub mod cost;
pub mod error;
pub mod exchange;
pub mod layout;
pub mod life;
pub mod limits;
pub mod members;
pub mod membership;
pub mod memory;
pub mod node;
pub mod observe;
pub mod optimizer;
pub mod parts;
pub mod queue;
pub mod recovery;
pub mod reduce;
pub mod roles;
pub mod scheme;
pub mod slicing;
pub mod steps;
pub mod submission;
pub mod types;
pub mod way;
pub mod wire;

pub use error::Error;
pub use layout::Book;
pub use members::Members;
pub use optimizer::Optimizer;
pub use roles::Roles;
pub use slicing::Slicing;
pub use submission::{Gives, Submission};
pub use types::{BookId, Dtype, LayerId, Rank, Seq, SliceId, Step, TensorId};
pub use way::{Algorithm, Payload, Route, Way};
pub use wire::{Header, Kind, Op};
