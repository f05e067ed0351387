//! Seeing: a node says of every slice where on its journey it is, to whoever watches it.
//!
//! Like [`crate::memory::Memory`] it is a seam: counts, a recorder of the driver and the simulator's checkers read the same
//! stream. Observations carry no time, which the core does not know; who watches may look at a clock. Nobody watching is `()`,
//! and costs nothing.
//!
//! In the store, a slice that rank w contributes to and rank o owns goes this way, each point after those before it:
//!
//! ```text
//! w: submitted, queued (o), first byte out (o)
//! o:                       arrived (w), summed, answered (w), first byte out (w)
//! w:                                                                  arrived (o), landed, applied
//! ```
//! The owner's own contribution is submitted, landed and applied there. In a collective every part of a sum is queued, and every
//! part of a result answered; a gather's pieces are queued and nothing is summed.

use crate::types::{LayerId, Rank};
use crate::wire::{Header, Kind};

/// Where a slice is on its journey.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    /// This rank takes part in a round of the slice.
    Submitted,
    /// A frame with a contribution, or a sum of some, waits to be sent to the peer.
    Queued,
    /// The first byte of a frame for the peer is given to the network.
    FirstByteOut,
    /// A whole frame of the peer is here.
    Arrived,
    /// Contributions have become one in this rank's memory.
    Summed,
    /// A frame with a result waits to be sent to the peer.
    Answered,
    /// The result is in this rank's memory.
    Landed,
    /// The program has made use of the result; only the driver knows.
    Applied,
}

impl Point {
    /// All, in the order of a slice's journey; each one's number is its place here.
    pub const ALL: [Self; 8] = [
        Self::Submitted,
        Self::Queued,
        Self::FirstByteOut,
        Self::Arrived,
        Self::Summed,
        Self::Answered,
        Self::Landed,
        Self::Applied,
    ];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Submitted => "submitted",
            Self::Queued => "queued",
            Self::FirstByteOut => "first byte out",
            Self::Arrived => "arrived",
            Self::Summed => "summed",
            Self::Answered => "answered",
            Self::Landed => "landed",
            Self::Applied => "applied",
        }
    }
}

/// A slice has come to a point of its journey; or a frame that is no slice's is queued, on its way, or here.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// Where.
    pub point: Point,
    /// What: book, slice and seq; of a frame all that it says of itself. Of other points than a frame's, kind and lengths are those
    /// of what led to them.
    pub header: &'a Header,
    /// The slice's layer; `None` for frames that are no slice's.
    pub layer: Option<LayerId>,
    /// To or from whom, of a frame.
    pub peer: Option<Rank>,
    /// Of a frame that is queued: less urgent ones wait already, and it goes before them.
    pub overtakes: bool,
}

/// Who watches a node.
pub trait Observe {
    /// Whether there is anybody: otherwise nothing is looked up that only an observation would say.
    const WATCHES: bool = true;

    /// Told at the moment when it happens, on the node's thread: it must be quick.
    fn observe(&mut self, seen: Observation<'_>);
}

/// Nobody.
impl Observe for () {
    const WATCHES: bool = false;

    #[inline]
    fn observe(&mut self, _: Observation<'_>) {}
}

/// Payload bytes by direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PayloadBytes {
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// Bytes that arrived.
    pub received_bytes: u64,
}

/// What goes to one peer and comes from it: frames of slices and of calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Payload.
    pub payload: PayloadBytes,
    /// Frames that wait now: queued or answered, and not a byte of them is out.
    pub queued_frames: u64,
    /// Their payload.
    pub queued_bytes: u64,
}

/// Counts of what was observed.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    /// Slices of this rank's submissions that have landed.
    pub slices: u64,
    /// Frames that were queued ahead of frames that were there before.
    pub preemptions: u64,
    /// Frames that were sent.
    pub frames_sent: u64,
    /// Frames that arrived.
    pub frames_received: u64,
    /// By book and layer, as far as any was moved.
    pub traffic: Vec<Vec<PayloadBytes>>,
    /// Of messages of calls.
    pub calls: PayloadBytes,
    /// By rank of the peer, as far as there was a frame.
    pub peers: Vec<PeerCounts>,
}

impl Counters {
    /// Where a frame's payload counts; what belongs to no layer and no call does not.
    fn traffic(&mut self, header: &Header, layer: Option<LayerId>) -> Option<&mut PayloadBytes> {
        let Some(layer) = layer else {
            return matches!(header.kind, Kind::Message | Kind::MessagePart).then_some(&mut self.calls);
        };
        let (book, layer) = (usize::from(header.book), layer as usize);
        if book >= self.traffic.len() {
            self.traffic.resize_with(book + 1, Vec::new);
        }
        let layers = &mut self.traffic[book];
        if layer >= layers.len() {
            layers.resize(layer + 1, PayloadBytes::default());
        }
        Some(&mut layers[layer])
    }

    /// Where a frame counts for its peer. One that is neither a slice's nor a call's does not: nobody sees it queued.
    #[inline]
    fn peer(&mut self, seen: &Observation<'_>) -> Option<&mut PeerCounts> {
        let at = seen.peer.filter(|_| seen.layer.is_some() || seen.header.kind.is_call())?.index();
        if at >= self.peers.len() {
            self.first_of_peer(at);
        }
        self.peers.get_mut(at)
    }

    /// Out of the way of all later ones.
    #[cold]
    fn first_of_peer(&mut self, at: usize) {
        self.peers.resize(at + 1, PeerCounts::default());
    }
}

impl Observe for Counters {
    // So that at each place only what is counted there is left of it. With a mere hint the compiler finds it too long, and a slice
    // takes each rank 30 ns more.
    #[inline(always)]
    fn observe(&mut self, seen: Observation<'_>) {
        let payload_bytes = u64::from(seen.header.payload_bytes);
        self.preemptions += u64::from(seen.overtakes);
        match seen.point {
            Point::Queued | Point::Answered => {
                if let Some(peer) = self.peer(&seen) {
                    peer.queued_frames += 1;
                    peer.queued_bytes += payload_bytes;
                }
            }
            Point::FirstByteOut => {
                self.frames_sent += 1;
                if let Some(traffic) = self.traffic(seen.header, seen.layer) {
                    traffic.sent_bytes += payload_bytes;
                }
                if let Some(peer) = self.peer(&seen) {
                    peer.payload.sent_bytes += payload_bytes;
                    // Each was queued before.
                    peer.queued_frames = peer.queued_frames.saturating_sub(1);
                    peer.queued_bytes = peer.queued_bytes.saturating_sub(payload_bytes);
                }
            }
            Point::Arrived => {
                self.frames_received += 1;
                if let Some(traffic) = self.traffic(seen.header, seen.layer) {
                    traffic.received_bytes += payload_bytes;
                }
                if let Some(peer) = self.peer(&seen) {
                    peer.payload.received_bytes += payload_bytes;
                }
            }
            Point::Landed => self.slices += 1,
            Point::Submitted | Point::Summed | Point::Applied => {}
        }
    }
}
