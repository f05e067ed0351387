//! Calls at a node: their frames go through the same queues, as urgent as the most urgent layer.

use super::{Action, Node};
use crate::calls::Call;
use crate::error::Error;
use crate::memory::Memory;
use crate::observe::{Observation, Observe, Point};
use crate::types::Rank;
use crate::wire::Header;

/// Calls count as most urgent: somebody waits for them.
const PLACE: usize = 0;

impl<M: Memory, O: Observe> Node<M, O> {
    pub(super) fn call(
        &mut self,
        call: Call<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let outcome = self.calls.begin(call, &mut self.memory);
        self.call_effects(actions);
        outcome
    }

    pub(super) fn call_frame(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let outcome = self.calls.frame(from, header, payload, &mut self.memory);
        self.call_effects(actions);
        outcome
    }

    fn call_effects(&mut self, actions: &mut Vec<Action<M::Chunk>>) {
        for (peer, frame) in self.calls.effects.frames.drain(..) {
            self.order += 1;
            let header = frame.header;
            let overtakes = self.outboxes[peer.index()].queue_ready(PLACE, self.order, frame);
            let (point, header, peer_of) = (Point::Queued, &header, Some(peer));
            self.observer.observe(Observation { point, header, layer: None, peer: peer_of, overtakes });
            actions.push(Action::Wake(peer));
        }
        // Whoever waits for a peer must hear of its loss, so it needs a connection to it.
        actions.extend(self.calls.effects.awaited.drain(..).map(Action::Wake));
        let sources = self.calls.effects.sources.drain(..);
        actions.extend(sources.map(|(id, from)| Action::CallSource { id, from }));
        actions.extend(self.calls.effects.complete.drain(..).map(Action::CallComplete));
    }
}
