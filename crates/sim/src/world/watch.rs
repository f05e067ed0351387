//! What the nodes let others see, passed on to all that watches a run: the models of the links, the journeys, the trace.

use super::World;
use crate::check::Violation;
use crate::memory::SimMemory;
use crate::program::Sabotage;
use penstock_core::observe::{Counters, Observation, Observe, Point};
use penstock_core::types::{BookId, Rank, Seq, SliceId};
use penstock_core::wire::{Header, Kind};

/// What was seen of a node and is not passed on yet.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    pub(super) counters: Counters,
    seen: Vec<(Point, Header, Option<Rank>)>,
}

impl Observe for Watcher {
    fn observe(&mut self, seen: Observation<'_>) {
        self.counters.observe(seen);
        self.seen.push((seen.point, *seen.header, seen.peer));
    }
}

impl<M: SimMemory> World<M> {
    /// Passes on what a node has let others see: to be called after whatever it was made to do.
    pub(super) fn watch(&mut self, rank: Rank, lane: u32) -> Result<(), Violation> {
        let at = self.at(rank, lane);
        let mut all = std::mem::take(&mut self.nodes[at].observer().seen);
        for (point, header, peer) in all.drain(..) {
            if header.kind.is_exchange() {
                if self.sabotage(Sabotage::Overlook) {
                    continue;
                }
                self.see(rank, point, &header, peer)?;
            }
            let Some(model) = self.model(rank, lane) else { continue };
            match (point, peer) {
                (Point::Submitted, _) => model.submit(&header),
                (Point::Arrived, Some(from)) => model.frame(from, &header),
                _ => {}
            }
        }
        self.nodes[at].observer().seen = all;
        Ok(())
    }

    /// A rank's program has read a slice.
    pub(super) fn applied(
        &mut self,
        rank: Rank,
        (book, slice, seq): (BookId, SliceId, Seq),
    ) -> Result<(), Violation> {
        let header = Header { book, slice, seq, ..Header::control(Kind::Push) };
        self.see(rank, Point::Applied, &header, None)
    }

    fn see(
        &mut self,
        rank: Rank,
        point: Point,
        header: &Header,
        peer: Option<Rank>,
    ) -> Result<(), Violation> {
        self.trace(|| {
            let Header { kind, book, slice, seq, payload_bytes, .. } = *header;
            let at = peer
                .map_or_else(String::new, |peer| format!(", {kind:?}, {payload_bytes} bytes, peer {peer}"));
            format!("rank {rank}: slice {slice} of book {book}, round {seq}: {}{at}", point.name())
        });
        self.journeys.see(rank, point, header, peer)
    }
}
