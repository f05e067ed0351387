//! What an engine counted.

use crate::accounting::Busy;
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
    /// Bytes of scratch buffers, in use or kept for reuse.
    pub pool_bytes: u64,
    /// The highest rate for which a connection is bound, in bytes per second; `None` before the line rate is known.
    pub line_bytes_per_s: Option<f64>,
    /// Peers with whom bytes are exchanged through shared memory so far, in order: those of this host.
    pub through_memory: Vec<u32>,
    /// Bytes owned by each rank's shard, over all books.
    pub owned_bytes: Vec<u64>,
    /// Each book.
    pub books: Vec<BookReport>,
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

/// Everything that is counted per slice.
pub(crate) fn count(
    rank: Rank,
    ranks: u32,
    lanes: u32,
    counters: &[Counters],
    books: &[Arc<OpenBook>],
) -> Report {
    let sum = |what: fn(&Counters) -> u64| counters.iter().map(what).sum();
    let books_reported: Vec<BookReport> = books.iter().map(|book| of_book(book, counters)).collect();
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
        owned_bytes: (0..ranks as usize)
            .map(|r| books.iter().map(|book| book.book.owned_bytes.get(r).copied().unwrap_or(0)).sum())
            .collect(),
        books: books_reported,
        ..Report::default()
    }
}

fn of_book(open: &OpenBook, counters: &[Counters]) -> BookReport {
    let traffic = |layer: usize| {
        let of_lane =
            |c: &Counters| c.traffic.get(usize::from(open.id)).and_then(|layers| layers.get(layer)).copied();
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
