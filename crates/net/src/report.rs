//! What an engine counted.

use crate::accounting::Busy;
use crate::observed::LaneCounts;
use crate::shared::OpenBook;
use penstock_core::layout::Tensor;
use penstock_core::observe::{Counters, PayloadBytes};
use penstock_core::{Dtype, Rank};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Counts since the engine was made. Bytes are payload.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// This rank.
    pub rank: u32,
    /// Ranks of the job.
    pub size: u32,
    /// Lanes of every rank.
    pub lanes: u32,
    /// Slices of this rank's submissions that completed.
    pub slices: u64,
    /// Frames that were queued ahead of frames that were there before.
    pub preemptions: u64,
    /// Frames given to the sockets, without heartbeats and the like.
    pub frames_sent: u64,
    /// Frames that arrived.
    pub frames_received: u64,
    /// Bytes of layers given to the sockets.
    pub bytes_sent: u64,
    /// Bytes of layers that arrived.
    pub bytes_received: u64,
    /// Bytes of messages and collectives given to the sockets.
    pub call_bytes_sent: u64,
    /// Bytes of messages and collectives that arrived.
    pub call_bytes_received: u64,
    /// Time with something in flight, by what the program did.
    pub busy: Busy,
    /// Time that the program waited for results.
    pub stall: Duration,
    /// Tensors that were submitted and whose results are not in memory.
    pub tensors_in_flight: u64,
    /// Bytes of scratch buffers, in use or kept for reuse.
    pub pool_bytes: u64,
    /// The highest rate for which a connection is bound, in bytes per second; `None` before the line rate is known.
    pub line_bytes_per_s: Option<f64>,
    /// Peers with whom bytes are exchanged through shared memory so far, in order: those of this host.
    pub through_memory: Vec<u32>,
    /// Bytes owned by each rank's shard, over all books.
    pub owned_bytes: Vec<u64>,
    /// Other ranks, in order, that frames of slices or of calls went to or came from.
    pub peers: Vec<PeerReport>,
    /// Each book.
    pub books: Vec<BookReport>,
}

/// What goes to another rank and comes from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerReport {
    /// Which.
    pub rank: u32,
    /// Bytes of layers, messages and collectives given to the sockets.
    pub bytes_sent: u64,
    /// Those that arrived.
    pub bytes_received: u64,
    /// Frames that wait now to be given to the sockets.
    pub queued_frames: u64,
    /// Their bytes.
    pub queued_bytes: u64,
    /// Segments that TCP has sent again.
    pub retransmitted_segments: u64,
}

/// Counts of one book.
#[derive(Debug, Clone)]
pub struct BookReport {
    /// Its name.
    pub name: String,
    /// Its layers, in book order.
    pub layers: Vec<LayerReport>,
}

/// Counts of one layer.
#[derive(Debug, Clone)]
pub struct LayerReport {
    /// Its name.
    pub name: String,
    /// The type to which its numbers, or some of them, are rounded on the wire.
    pub rounded_to: Option<Dtype>,
    /// Bytes given to the sockets.
    pub bytes_sent: u64,
    /// Bytes that arrived.
    pub bytes_received: u64,
    /// Time that the program waited for it.
    pub stall: Duration,
}

/// Everything that is counted per slice, by lanes that run and by those that have ended.
pub(crate) fn count(
    rank: Rank,
    ranks: u32,
    lanes: u32,
    (running, ended): (&[LaneCounts], &[LaneCounts]),
    books: &[Arc<OpenBook>],
) -> Report {
    let counters: Vec<&Counters> = running.iter().chain(ended).map(|lane| &lane.seen).collect();
    let sum = |what: fn(&Counters) -> u64| counters.iter().map(|lane| what(lane)).sum::<u64>();
    let books_reported: Vec<BookReport> = books.iter().map(|book| of_book(book, &counters)).collect();
    let layers = || books_reported.iter().flat_map(|book| &book.layers);
    Report {
        rank: rank.0,
        size: ranks,
        lanes,
        slices: sum(|c| c.slices),
        preemptions: sum(|c| c.preemptions),
        frames_sent: sum(|c| c.frames_sent),
        frames_received: sum(|c| c.frames_received),
        bytes_sent: layers().map(|layer| layer.bytes_sent).sum(),
        bytes_received: layers().map(|layer| layer.bytes_received).sum(),
        call_bytes_sent: sum(|c| c.calls.sent_bytes),
        call_bytes_received: sum(|c| c.calls.received_bytes),
        stall: layers().map(|layer| layer.stall).sum(),
        peers: of_peers(running, ended),
        owned_bytes: (0..ranks as usize)
            .map(|r| books.iter().map(|book| book.book.owned_bytes.get(r).copied().unwrap_or(0)).sum())
            .collect(),
        books: books_reported,
        ..Report::default()
    }
}

fn of_peers(running: &[LaneCounts], ended: &[LaneCounts]) -> Vec<PeerReport> {
    let mut peers: Vec<PeerReport> = Vec::new();
    // What an ended lane had left waits no more.
    let lanes = running.iter().map(|lane| (lane, true)).chain(ended.iter().map(|lane| (lane, false)));
    for (lane, runs) in lanes {
        let ranks = lane.seen.peers.len().max(lane.retransmitted.len());
        while peers.len() < ranks {
            peers.push(PeerReport { rank: peers.len() as u32, ..PeerReport::default() });
        }
        for (peer, counts) in peers.iter_mut().zip(&lane.seen.peers) {
            peer.bytes_sent += counts.payload.sent_bytes;
            peer.bytes_received += counts.payload.received_bytes;
            if runs {
                peer.queued_frames += counts.queued_frames;
                peer.queued_bytes += counts.queued_bytes;
            }
        }
        for (peer, segments) in peers.iter_mut().zip(&lane.retransmitted) {
            peer.retransmitted_segments += segments;
        }
    }
    peers.retain(|peer| *peer != PeerReport { rank: peer.rank, ..PeerReport::default() });
    peers
}

fn of_book(open: &OpenBook, counters: &[&Counters]) -> BookReport {
    let traffic = |layer: usize| {
        let of_lane =
            |c: &&Counters| c.traffic.get(usize::from(open.id)).and_then(|layers| layers.get(layer)).copied();
        counters.iter().filter_map(of_lane).fold(PayloadBytes::default(), |sum, lane| PayloadBytes {
            sent_bytes: sum.sent_bytes + lane.sent_bytes,
            received_bytes: sum.received_bytes + lane.received_bytes,
        })
    };
    let layer = |(at, name): (usize, &String)| {
        let PayloadBytes { sent_bytes, received_bytes } = traffic(at);
        let stall = Duration::from_nanos(open.stall_ns[at].load(Ordering::Relaxed));
        let of_layer = |tensor: &&Tensor| tensor.layer as usize == at && tensor.wire != tensor.dtype;
        LayerReport {
            name: name.clone(),
            rounded_to: open.book.tensors.iter().find(of_layer).map(|tensor| tensor.wire),
            bytes_sent: sent_bytes,
            bytes_received: received_bytes,
            stall,
        }
    };
    BookReport {
        name: open.book.name.clone(),
        layers: open.book.layers.iter().enumerate().map(layer).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_core::observe::PeerCounts;

    fn lane(sent_bytes: u64, queued_frames: u64, retransmitted: Vec<u64>) -> LaneCounts {
        let payload = PayloadBytes { sent_bytes, received_bytes: 2 * sent_bytes };
        let peer = PeerCounts { payload, queued_frames, queued_bytes: 10 * queued_frames };
        let seen = Counters { peers: vec![PeerCounts::default(), peer], ..Counters::default() };
        LaneCounts { seen, retransmitted }
    }

    #[test]
    fn peers_are_counted_over_all_lanes_and_what_ended_ones_had_left_waits_no_more() {
        let running = [lane(100, 3, vec![0, 1, 0, 7]), lane(20, 0, Vec::new())];
        let ended = [lane(3, 5, vec![0, 2])];
        let first = PeerReport {
            rank: 1,
            bytes_sent: 123,
            bytes_received: 246,
            queued_frames: 3,
            queued_bytes: 30,
            retransmitted_segments: 3,
        };
        let other = PeerReport { rank: 3, retransmitted_segments: 7, ..PeerReport::default() };
        assert_eq!(of_peers(&running, &ended), [first, other]);
        assert!(of_peers(&[], &[LaneCounts::default()]).is_empty());
    }
}
