//! What a lane does for the life of the job: it shows the state machine what its connections show, and sends what that wants.

use super::{Lane, Peer};
use crate::memory::Chunk;
use crate::shared::OpenBook;
use penstock_core::life::{Contact, Farewell, PeerTimes, Question, Reply, Sign, unreached};
use penstock_core::node::Waits;
use penstock_core::wire::Outgoing;
use penstock_core::{Error, Header, Kind, Rank, TensorId};
use std::sync::atomic::Ordering;

impl Peer {
    fn contact(&self) -> Contact {
        match &self.connection {
            Some(connection) => Contact::Open { written: connection.all_written() },
            None if self.gone => Contact::Gone,
            None => Contact::Never,
        }
    }
}

impl Lane {
    /// A control frame has arrived.
    pub(super) fn control(&mut self, from: Rank, header: &Header, payload: Option<&Chunk>) {
        let bytes = payload.map(Chunk::to_vec).unwrap_or_default();
        self.idle_frames += u64::from(header.kind.is_idle());
        match header.kind {
            Kind::Blob => {
                if let Err(error) = self.shared.blob(from, header.seq, bytes) {
                    self.shared.fail(error);
                }
            }
            Kind::Abort => self.shared.live(|life, now_ns| life.aborted(now_ns, from, &bytes)),
            Kind::Heartbeat => self.shared.live(|life, now_ns| life.heartbeat(now_ns, from, header.argument)),
            Kind::Goodbye => {
                self.pulse.goodbye_heard(from);
                self.shared.live(|life, now_ns| life.departed(now_ns, from));
            }
            Kind::Ask => {
                let question = Question::of(header);
                let reply = self.reply(question).encode();
                let payload_bytes = reply.len() as u32;
                let header = Header { seq: question.number, payload_bytes, ..Header::control(Kind::Reply) };
                self.say(from, Outgoing { header, payload: Some(self.shared.pool.copy_of(&reply)) });
            }
            Kind::Reply => match Reply::decode(&bytes, self.node.members()) {
                Ok(reply) => {
                    self.shared.live(|life, now_ns| life.replied(now_ns, from, header.seq, reply));
                }
                Err(why) => self.shared.fail(Error::protocol(from, why)),
            },
            // The others never come here.
            _ => {}
        }
    }

    /// Sends what is not the node's, behind what that has given out.
    fn say(&mut self, to: Rank, frame: Outgoing<Chunk>) {
        if let Some(connection) = &mut self.peers[to.index()].connection {
            connection.depart(frame);
            self.enqueue(to.index());
        }
    }

    /// A connection is gone; `why` if it ended without a goodbye.
    pub(super) fn drop_connection(&mut self, peer: usize, why: Option<String>) {
        let dropped = &mut self.peers[peer];
        dropped.gone = true;
        if let Some(mut connection) = dropped.connection.take() {
            dropped.retransmitted = connection.retransmitted_segments();
            // Fails only if it is not registered, which is what is wanted.
            let _ = self.poll.registry().deregister(connection.watched());
            self.shared.live(|life, now_ns| life.ended(now_ns, Rank(peer as u32), why));
        }
    }

    pub(super) fn closed(&mut self, peer: usize, why: String) {
        self.drop_connection(peer, self.pulse.loss(Rank(peer as u32), why));
    }

    /// Tells every peer of the verdict that is held now.
    pub(super) fn fail_all(&mut self, header: Header, reason: Chunk) {
        let abort = Outgoing { header, payload: Some(reason) };
        let first = self.failed.replace(abort.clone()).is_none();
        for peer in 0..self.peers.len() {
            if let Some(connection) = &mut self.peers[peer].connection {
                if first {
                    connection.cancel_unstarted();
                }
                connection.depart(abort.clone());
                self.enqueue(peer);
            }
        }
        if first {
            self.reach_all();
            self.shared.update(|state| state.lanes_quiet += 1);
        }
        self.note_told();
    }

    /// Connects to the peers that have yet to hear of the verdict.
    fn reach_all(&self) {
        let Some(admission) = self.admission.get() else { return };
        self.unreached().for_each(|rank| admission.dial(self.index, rank));
    }

    /// Peers that are still to be connected, to be told of the verdict.
    pub(super) fn unreached(&self) -> impl Iterator<Item = Rank> {
        let others = self.node.members().iter().filter(|rank| *rank != self.me);
        unreached(self.index, others.map(|rank| (rank, self.peers[rank.index()].contact())))
    }

    /// What only the clock tells.
    pub(super) fn tick(&mut self) {
        self.ticked = self.now;
        if self.failed.is_none() {
            self.look_at_line();
            self.look_at_peers();
        }
        self.shared.look(|rank| self.node.needed(self.waits()).contains(&rank));
    }

    fn look_at_peers(&mut self) {
        let now_ns = self.shared.ns_of(self.now);
        let mut signs = std::mem::take(&mut self.signs);
        let links = self.peers.iter().enumerate().filter_map(|(peer, Peer { connection, .. })| {
            let connection = connection.as_ref()?;
            let (heard_ns, spoke_ns) =
                (self.shared.ns_of(connection.heard), self.shared.ns_of(connection.spoke));
            Some(PeerTimes { peer: Rank(peer as u32), heard_ns, spoke_ns, written: connection.all_written() })
        });
        if let Some(away) = self.pulse.look(now_ns, links, &mut signs) {
            self.shared.live(|life, now_ns| life.was_away(now_ns, away));
        }
        for sign in signs.drain(..) {
            match sign {
                Sign::Heartbeat(peer) => {
                    let header =
                        Header { argument: self.shared.progress(), ..Header::control(Kind::Heartbeat) };
                    self.say(peer, Outgoing { header, payload: None });
                }
                Sign::Silent(peer, silence_ns) => {
                    self.shared.live(|life, now_ns| life.silent(now_ns, peer, silence_ns));
                }
            }
        }
        self.signs = signs;
        if let Some(rank) = self.pulse.parted(|rank| self.node.a_call_waits_for(rank)) {
            self.shared.live(|life, now_ns| life.needed(now_ns, rank));
        }
    }

    /// What this lane says to a question.
    pub(super) fn reply(&self, question: Question) -> Reply {
        let mut program = self.shared.reply();
        program.blocked |= self.calls.values().any(|handle| handle.is_awaited());
        if program.what.is_empty() {
            program.what = self.under_way();
        }
        self.node.reply(question, self.waits(), program)
    }

    /// The tensors of which this lane has slices that are not in memory.
    fn open_tensors(&self) -> impl Iterator<Item = (&OpenBook, TensorId)> {
        let lane = 1 << self.index;
        self.books.iter().flatten().flat_map(move |open| {
            let is_open = move |tensor: &TensorId| {
                let state = &open.tensors[*tensor as usize];
                state.remaining.load(Ordering::Acquire) != 0 && open.lanes[*tensor as usize] & lane != 0
            };
            (0..open.tensors.len() as TensorId).filter(is_open).map(|tensor| (&**open, tensor))
        })
    }

    fn waits(&self) -> Waits {
        let open =
            self.open_tensors().map(|(open, tensor)| (open.id, tensor, open.open_slices(tensor, self.index)));
        self.node.waits(open, self.calls.keys().copied())
    }

    /// In words, one thing that is under way here: a call if there is one.
    fn under_way(&self) -> String {
        if let Some(handle) = self.calls.values().next_back() {
            return handle.to_string();
        }
        let first = self.open_tensors().next();
        first.map_or_else(String::new, |(open, tensor)| {
            format!("layer {} of {}", open.book.layer_name(tensor), open.book.name)
        })
    }

    /// While leaving: says goodbye to each peer that has everything, and finds out when all is said.
    pub(super) fn say_goodbyes(&mut self) {
        if !self.leaving || self.failed.is_some() || self.done {
            return;
        }
        let mut done = true;
        let me = self.me;
        let others: Vec<Rank> = self.node.members().iter().filter(|rank| *rank != me).collect();
        for rank in others {
            let contact = self.peers[rank.index()].contact();
            match self.pulse.farewell(rank, contact, self.node.has_frame(rank)) {
                Farewell::Done => {}
                Farewell::Wait => {
                    done = false;
                    if contact == Contact::Never {
                        self.wake(rank);
                    }
                }
                Farewell::Say => {
                    self.say(rank, Outgoing { header: Header::control(Kind::Goodbye), payload: None });
                    done = false;
                }
            }
        }
        if done {
            self.done = true;
            self.shared.update(|state| state.lanes_done += 1);
        }
    }
}
