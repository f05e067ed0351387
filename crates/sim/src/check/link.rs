//! What each link should carry: a second, naive model of a node's queues. Everything that waits is in one list, which is
//! searched from end to end for the frames that may go; the node's choice must be among them and none may be better.
//!
//! The model knows nothing of contents, only of what waits: which answers exist follows from who has contributed.

use super::{Checker, Violation, check};
use penstock_core::layout::{Book, BookId, Rank, Seq, SliceId, TensorId};
use penstock_core::wire::{Header, Kind};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a waiting frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Control(Kind),
    /// An answer, an absence or a piece of a gather.
    Ready(BookId, SliceId, Seq),
    Push {
        book: BookId,
        slice: SliceId,
        seq: Seq,
        at_owner: u32,
        len_bytes: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    place: u32,
    order: u64,
    what: What,
}

/// Slices of one book pushed to one owner.
#[derive(Debug, Default)]
struct Window {
    /// Submitted and not answered: their rounds.
    open: BTreeMap<u32, Seq>,
    /// Of those, sent: their lengths.
    pushed: BTreeMap<u32, u64>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Waiting>,
    windows: BTreeMap<BookId, Window>,
}

#[derive(Debug)]
struct ModelBook {
    book: Arc<Book>,
    places: Vec<u32>,
    /// By slice owned here: who has contributed to the open round.
    contributed: BTreeMap<SliceId, (Seq, BTreeSet<Rank>)>,
}

/// Who the modelled node is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub ranks: u32,
    /// Its lane.
    pub lane: u32,
    /// Its window.
    pub window_bytes: u64,
    /// Whether places count.
    pub priority: bool,
}

/// The model of one node's links.
#[derive(Debug)]
pub struct LinkModel {
    me: Identity,
    books: BTreeMap<BookId, ModelBook>,
    left: BTreeSet<Rank>,
    queues: Vec<Queue>,
    early: Vec<(Rank, Header)>,
    order: u64,
}

impl LinkModel {
    /// A node without books.
    #[must_use]
    pub fn new(me: Identity) -> Self {
        let queues = (0..me.ranks).map(|_| Queue::default()).collect();
        Self { me, books: BTreeMap::new(), left: BTreeSet::new(), queues, early: Vec::new(), order: 0 }
    }

    /// The node opens a book with these places by layer.
    pub fn open_book(&mut self, id: BookId, book: Arc<Book>) {
        let places = (0..book.layers.len() as u32).collect();
        self.books.insert(id, ModelBook { book, places, contributed: BTreeMap::new() });
        let (now, later) = self.early.drain(..).partition(|(_, header)| header.book == id);
        self.early = later;
        let now: Vec<(Rank, Header)> = now;
        for (from, header) in now {
            self.frame(from, &header);
        }
    }

    /// The node learns the order of the forward pass.
    pub fn set_priorities(&mut self, id: BookId, places: &[u32]) {
        if let Some(book) = self.books.get_mut(&id) {
            book.places = places.to_vec();
        }
    }

    /// The rank contributes so many bytes to a gather: frames to all others, which nothing holds back.
    pub fn gather(&mut self, id: BookId, tensor: TensorId, seq: Seq, len_bytes: u32) {
        let Some(book) = self.books.get(&id).map(|state| state.book.clone()) else { return };
        let slice_id = book.slices_of(tensor).start;
        let slice = &book.slices[slice_id as usize];
        if slice.lane != self.me.lane {
            return;
        }
        let frames = len_bytes.div_ceil(slice.len_bytes).max(1);
        for peer in (0..self.me.ranks).map(Rank) {
            if peer != self.me.rank && !self.left.contains(&peer) {
                (0..frames).for_each(|_| self.queue(peer, What::Ready(id, slice_id, seq)));
            }
        }
    }

    /// The rank submits a tensor that is summed.
    pub fn submit(&mut self, id: BookId, tensor: TensorId, seq: Seq, absent: bool) {
        let Some(book) = self.books.get(&id).map(|state| state.book.clone()) else { return };
        for slice_id in book.slices_of(tensor) {
            let slice = &book.slices[slice_id as usize];
            if slice.lane != self.me.lane {
                continue;
            }
            if slice.owner == self.me.rank {
                self.contribute(self.me.rank, id, slice_id, seq);
            } else if absent {
                self.queue(slice.owner, What::Ready(id, slice_id, seq));
            } else {
                let (at_owner, len_bytes) = (slice.at_owner, u64::from(slice.len_bytes));
                let window = self.queues[slice.owner.index()].windows.entry(id).or_default();
                window.open.insert(at_owner, seq);
                self.queue(slice.owner, What::Push { book: id, slice: slice_id, seq, at_owner, len_bytes });
            }
        }
    }

    /// A frame arrives at the node.
    pub fn frame(&mut self, from: Rank, header: &Header) {
        match header.kind {
            Kind::Leave => self.leave(from),
            Kind::Push | Kind::PushAbsent if self.books.contains_key(&header.book) => {
                self.contribute(from, header.book, header.slice, header.seq);
            }
            Kind::Push | Kind::PushAbsent => self.early.push((from, *header)),
            // Whatever arrives, nothing is sent for it.
            Kind::Gather => {}
            Kind::Answer | Kind::AnswerAbsent | Kind::AnswerSame => {
                let at_owner = self.books[&header.book].book.slices[header.slice as usize].at_owner;
                let window = self.queues[from.index()].windows.entry(header.book).or_default();
                window.open.remove(&at_owner);
                window.pushed.remove(&at_owner);
            }
            _ => {}
        }
    }

    /// The rank itself leaves.
    pub fn leave_myself(&mut self) {
        self.control(Kind::Leave);
        self.leave(self.me.rank);
    }

    /// The node sends a control frame to all.
    pub fn control(&mut self, kind: Kind) {
        let me = self.me.rank;
        for peer in (0..self.me.ranks).map(Rank).filter(|peer| *peer != me) {
            self.queue(peer, What::Control(kind));
        }
    }

    fn leave(&mut self, rank: Rank) {
        self.left.insert(rank);
        if self.left.len() == self.me.ranks as usize {
            self.left.clear();
            return;
        }
        let open: Vec<(BookId, SliceId)> = (self.books.iter())
            .flat_map(|(id, state)| state.contributed.keys().map(|slice| (*id, *slice)))
            .collect();
        for (book, slice) in open {
            self.finish_if_complete(book, slice);
        }
    }

    fn contribute(&mut self, from: Rank, id: BookId, slice: SliceId, seq: Seq) {
        if let Some(state) = self.books.get_mut(&id) {
            state.contributed.entry(slice).or_insert_with(|| (seq, BTreeSet::new())).1.insert(from);
        }
        self.finish_if_complete(id, slice);
    }

    fn finish_if_complete(&mut self, id: BookId, slice: SliceId) {
        let Some(state) = self.books.get_mut(&id) else { return };
        let active = |rank: &Rank| !self.left.contains(rank);
        let wanted: BTreeSet<Rank> = (0..self.me.ranks).map(Rank).filter(active).collect();
        if state.contributed.get(&slice).is_none_or(|(_, who)| *who != wanted) {
            return;
        }
        let seq = state.contributed.remove(&slice).map_or(0, |(seq, _)| seq);
        let me = self.me.rank;
        for peer in wanted.into_iter().filter(|peer| *peer != me) {
            self.queue(peer, What::Ready(id, slice, seq));
        }
    }

    fn queue(&mut self, peer: Rank, what: What) {
        let place = match what {
            What::Ready(book, slice, _) | What::Push { book, slice, .. } if self.me.priority => {
                let state = &self.books[&book];
                state.places[state.book.tensor_of(slice).layer as usize]
            }
            _ => 0,
        };
        self.order += 1;
        self.queues[peer.index()].waiting.push(Waiting { place, order: self.order, what });
    }

    /// The node has chosen what to send to `peer`, or found nothing.
    ///
    /// # Errors
    /// What is wrong with its choice.
    pub fn chosen(&mut self, peer: Rank, header: Option<&Header>) -> Result<(), Violation> {
        let queue = &mut self.queues[peer.index()];
        let name = || format!("link {} to {peer}, lane {}", self.me.rank, self.me.lane);
        let Some(header) = header else {
            let candidates = queue.candidates(self.me.window_bytes);
            return check(candidates.is_empty(), Checker::Window, || {
                format!("{}: nothing is sent, but {:?} may go", name(), candidates[0].1.what)
            });
        };
        let Some(at) = queue.waiting.iter().position(|waiting| waiting.what.is(header)) else {
            return Err(Violation::new(Checker::Protocol, format!("{}: {header:?} is unexpected", name())));
        };
        let chosen = queue.waiting[at];
        let control = |what: &What| matches!(what, What::Control(_));
        let candidates = queue.candidates(self.me.window_bytes);
        for (exception, other) in &candidates {
            let class = (!control(&other.what)).cmp(&!control(&chosen.what));
            let better = class.then(other.place.cmp(&chosen.place)).is_lt();
            check(!better, Checker::Priority, || {
                format!("{}: {chosen:?} is sent while {other:?} waits", name())
            })?;
            // The exception goes out of turn within its place: it is there to end a wait.
            let turn = !exception && class.is_eq() && other.place == chosen.place;
            let mine = candidates.iter().any(|(exception, w)| w.order == chosen.order && !exception);
            check(!(turn && mine && other.order < chosen.order), Checker::FirstInFirstOut, || {
                format!("{}: {chosen:?} is sent before {other:?}", name())
            })?;
        }
        let among = candidates.iter().any(|(_, candidate)| candidate.order == chosen.order);
        if !among {
            queue.why_not(&chosen, self.me.window_bytes).map_err(|mut violation| {
                violation.message = format!("{}: {}", name(), violation.message);
                violation
            })?;
        }
        queue.waiting.remove(at);
        if let What::Push { book, at_owner, len_bytes, .. } = chosen.what {
            queue.windows.entry(book).or_default().pushed.insert(at_owner, len_bytes);
        }
        Ok(())
    }

    /// At the end: nothing waits and no window is in use.
    ///
    /// # Errors
    /// [`Checker::NothingLeft`].
    pub fn finish(&self) -> Result<(), Violation> {
        for (peer, queue) in self.queues.iter().enumerate() {
            let empty = queue.waiting.is_empty() && queue.windows.values().all(|w| w.open.is_empty());
            check(empty && self.early.is_empty(), Checker::NothingLeft, || {
                format!("link {} to {peer}: {queue:?} is left, early frames {:?}", self.me.rank, self.early)
            })?;
        }
        Ok(())
    }
}

impl What {
    fn is(&self, header: &Header) -> bool {
        let id = (header.book, header.slice, header.seq);
        match (*self, header.kind) {
            (Self::Control(kind), other) => kind == other,
            (Self::Push { book, slice, seq, .. }, Kind::Push) => (book, slice, seq) == id,
            (Self::Ready(..), Kind::Push) => false,
            (Self::Ready(book, slice, seq), kind) => kind.is_exchange() && (book, slice, seq) == id,
            _ => false,
        }
    }
}

impl Window {
    /// The slice that may always go: without it, ranks that fill each other's windows with different slices would wait
    /// for one another for ever. Of the oldest round the last slice.
    fn exception(&self) -> Option<u32> {
        self.open
            .iter()
            .min_by_key(|(at_owner, seq)| (**seq, std::cmp::Reverse(**at_owner)))
            .map(|(at, _)| *at)
    }

    fn allows(&self, at_owner: u32, len_bytes: u64, window_bytes: u64) -> bool {
        let overtakes = self.pushed.keys().next().is_some_and(|first| at_owner < *first);
        let limit = if overtakes { 2 * window_bytes } else { window_bytes };
        self.pushed.values().sum::<u64>() + len_bytes <= limit
    }
}

impl Queue {
    /// The frames that may go now: a goodbye if nothing else waits; the first other control frame; of what no window holds back the first; of each book's pushes the
    /// first if the window allows it, and otherwise the exception. With each, whether it is an exception.
    fn candidates(&self, window_bytes: u64) -> Vec<(bool, Waiting)> {
        let first = |wanted: &dyn Fn(&What) -> bool| {
            self.waiting.iter().filter(|w| wanted(&w.what)).min_by_key(|w| (w.place, w.order)).copied()
        };
        let mut candidates = Vec::new();
        let goodbye = |what: &What| *what == What::Control(Kind::Goodbye);
        if self.waiting.iter().all(|w| goodbye(&w.what)) {
            candidates.extend(self.waiting.first().map(|w| (false, *w)));
        }
        let control = |what: &What| matches!(what, What::Control(_)) && !goodbye(what);
        candidates.extend(first(&control).map(|w| (false, w)));
        candidates.extend(first(&|what| matches!(what, What::Ready(..))).map(|w| (false, w)));
        for (id, window) in &self.windows {
            let of_book = |what: &What| matches!(what, What::Push { book, .. } if book == id);
            let Some(head) = first(&of_book) else { continue };
            let What::Push { at_owner, len_bytes, .. } = head.what else { continue };
            if window.allows(at_owner, len_bytes, window_bytes) {
                candidates.push((false, head));
                continue;
            }
            let is_exception = |what: &What| matches!(what, What::Push { book, at_owner, .. } if book == id && Some(*at_owner) == window.exception());
            candidates.extend(first(&is_exception).map(|w| (true, w)));
        }
        candidates
    }

    /// `chosen` should not have been: because it was not its turn, or because the window forbids it.
    fn why_not(&self, chosen: &Waiting, window_bytes: u64) -> Result<(), Violation> {
        if let What::Push { book, at_owner, len_bytes, .. } = chosen.what {
            let window = &self.windows[&book];
            if !window.allows(at_owner, len_bytes, window_bytes) {
                return Err(Violation::new(
                    Checker::Window,
                    format!(
                        "{chosen:?} is sent beyond the window of {window_bytes}: under way {:?}",
                        window.pushed
                    ),
                ));
            }
        }
        let same = |w: &&Waiting| w.place == chosen.place && w.order < chosen.order;
        let checker = if self.waiting.iter().any(|w| w.place < chosen.place) {
            Checker::Priority
        } else if self.waiting.iter().any(|w| same(&w)) {
            Checker::FirstInFirstOut
        } else {
            Checker::Window
        };
        Err(Violation::new(checker, format!("{chosen:?} is sent out of turn")))
    }
}
