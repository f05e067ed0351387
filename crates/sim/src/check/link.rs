//! What each link should carry: a second, naive model of a node's queues. Everything that waits is in one list, which is
//! searched from end to end for the frames that may go; the node's choice must be among them and none may be better.
//!
//! The model learns from what the node lets others see what was submitted and what has arrived, and knows nothing of contents, only
//! of what waits: which answers exist follows from who has contributed, and which
//! parts of a collective from its steps and what has come. The steps themselves are the node's; what they come to is
//! checked by the ledger.

mod gather;

use super::{Checker, Violation, check};
use gather::RelayedRound;
use penstock_core::Route;
use penstock_core::layout::Book;
use penstock_core::roles::Fold;
use penstock_core::types::{BookId, Rank, Seq, SliceId};
use penstock_core::wire::{Header, Kind};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// In [`CollectiveSlice::next`]: the step has sent, and waits for its part.
const WAITING: u32 = 1 << 31;

/// What a waiting frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Control(Kind),
    /// An answer, an absence, a result of this step, or a piece of a gather of this length.
    Ready(BookId, SliceId, Seq, u32),
    /// Word that a contribution is in the sum: before the answer, whatever has become of the layer's place meanwhile.
    Summed(BookId, SliceId, Seq),
    /// What counts under the window: a push, or a partial sum of this step.
    Push {
        book: BookId,
        slice: SliceId,
        seq: Seq,
        step: u32,
        number: u32,
        len_bytes: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct WaitingFrame {
    place: u32,
    order: u64,
    what: What,
    /// A newer step of its book has begun (steps are rounds here): the peer stands still for it.
    overdue: bool,
}

/// Slices of one book that a peer may have to hold, by their numbers there.
#[derive(Debug, Default)]
struct Window {
    /// Submitted and not through: their rounds.
    open: BTreeMap<u32, Seq>,
    /// The newest round that was open.
    newest: Seq,
    /// Of those, sent: how much.
    pushed: BTreeMap<u32, u64>,
}

/// A slice of a collective on this rank: the steps whose parts have come, with those of the next round.
#[derive(Debug, Default)]
struct CollectiveSlice {
    /// The open round, and whether this rank contributes.
    open: Option<(Seq, bool)>,
    /// The next step that sends.
    next: u32,
    /// By round and step: whether the part had a payload.
    came: BTreeMap<(Seq, u32), bool>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<WaitingFrame>,
    windows: BTreeMap<BookId, Window>,
}

#[derive(Debug)]
struct ModelBook {
    book: Arc<Book>,
    places: Vec<u32>,
    /// By slice owned here: who has contributed to the open round.
    contributed: BTreeMap<SliceId, (Seq, BTreeSet<Rank>)>,
    /// Of those, whose contributions have numbers.
    with_data: BTreeMap<SliceId, BTreeSet<Rank>>,
    /// And of heads, of how many ranks they are, and after how many times that all had left.
    clients: BTreeMap<(SliceId, Rank), u32>,
    /// By slice of a group that this rank is the head of: who has contributed inside, and who has numbers; and the same of what was
    /// passed on and is not answered.
    inside: BTreeMap<SliceId, (Seq, BTreeSet<Rank>, BTreeSet<Rank>)>,
    passed_on: BTreeMap<SliceId, BTreeSet<Rank>>,
    /// Slices of complete rounds that wait for the program's word; and the other way round.
    waiting: BTreeMap<SliceId, Seq>,
    said: BTreeSet<SliceId>,
    collectives: BTreeMap<SliceId, CollectiveSlice>,
    /// Rounds of gathers that this rank, the head of a group, passes on; and by slice the last that is over.
    relayed: BTreeMap<(SliceId, Seq), RelayedRound>,
    over: BTreeMap<SliceId, Seq>,
}

/// Who the modelled node is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub ranks: u32,
    /// How many of them, the first ones, are workers.
    pub workers: u32,
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
    /// How often all have, and are back.
    epoch: u32,
    /// At a server: leaves of workers that are ahead of the others.
    again: Vec<Rank>,
    queues: Vec<Queue>,
    order: u64,
}

impl LinkModel {
    /// A node without books.
    #[must_use]
    pub fn new(me: Identity) -> Self {
        let queues = (0..me.ranks).map(|_| Queue::default()).collect();
        Self {
            me,
            books: BTreeMap::new(),
            left: BTreeSet::new(),
            epoch: 0,
            again: Vec::new(),
            queues,
            order: 0,
        }
    }

    /// The node opens a book with these places by layer.
    pub fn open_book(&mut self, id: BookId, book: Arc<Book>) {
        let places = (0..book.layers.len() as u32).collect();
        self.books.insert(
            id,
            ModelBook {
                book,
                places,
                contributed: BTreeMap::new(),
                with_data: BTreeMap::new(),
                clients: BTreeMap::new(),
                inside: BTreeMap::new(),
                passed_on: BTreeMap::new(),
                waiting: BTreeMap::new(),
                said: BTreeSet::new(),
                collectives: BTreeMap::new(),
                relayed: BTreeMap::new(),
                over: BTreeMap::new(),
            },
        );
    }

    /// The node learns the order of the forward pass.
    pub fn set_priorities(&mut self, id: BookId, places: &[u32]) {
        if let Some(book) = self.books.get_mut(&id) {
            book.places = places.to_vec();
        }
    }

    /// The rank submits a slice.
    pub fn submit(&mut self, header: &Header) {
        let Header { book: id, slice: slice_id, seq, .. } = *header;
        let Some(book) = self.books.get(&id).map(|state| state.book.clone()) else { return };
        let (slice, absent) = (&book.slices[slice_id as usize], header.kind == Kind::PushAbsent);
        if header.kind == Kind::Gather {
            self.gather(header);
        } else if book.tensor_of(slice_id).route != Route::STORE {
            let collective = self.collective(id, slice_id);
            (collective.open, collective.next) = (Some((seq, !absent)), 0);
            self.open_collective(&book, id, slice_id, seq);
            self.advance(id, slice_id);
        } else {
            let (me, to) = (self.me.rank, book.roles.groups.answered_by(self.me.rank, slice.owner));
            let group = book.roles.groups.of(me);
            if group.is_some_and(|group| group.head() == me) {
                if to != me {
                    self.queues[to.index()].open(id, book.number_at_peer(slice_id), seq);
                }
                self.contribute_inside(me, header);
            } else if to == me {
                self.contribute(me, header);
            } else {
                let len_bytes = if group.is_some() { slice.len_bytes } else { slice.wire_bytes };
                self.push_or_word(to, id, slice_id, seq, (!absent).then_some(len_bytes));
            }
        }
    }

    /// A contribution of so many bytes, or word that there is none.
    fn push_or_word(&mut self, to: Rank, id: BookId, slice: SliceId, seq: Seq, len_bytes: Option<u32>) {
        match len_bytes {
            Some(len_bytes) => {
                let number = self.books[&id].book.number_at_peer(slice);
                self.push(to, id, slice, seq, 0, number, len_bytes.into());
            }
            None => self.queue(to, What::Ready(id, slice, seq, 0)),
        }
    }

    fn contribute_inside(&mut self, from: Rank, header: &Header) {
        let Some(state) = self.books.get_mut(&header.book) else { return };
        let empty = || (header.seq, BTreeSet::new(), BTreeSet::new());
        let (_, who, with_data) = state.inside.entry(header.slice).or_insert_with(empty);
        who.insert(from);
        if header.kind == Kind::Push {
            with_data.insert(from);
        }
        self.pass_on_if_complete(header.book, header.slice);
    }

    /// What the group of this rank, its head, has goes on to the owner once all are in.
    fn pass_on_if_complete(&mut self, id: BookId, slice_id: SliceId) {
        let me = self.me.rank;
        let Some(state) = self.books.get_mut(&id) else { return };
        let book = state.book.clone();
        let Some(group) = book.roles.groups.of(me) else { return };
        let wanted: BTreeSet<Rank> = group.members.iter().filter(|rank| !self.left.contains(rank)).collect();
        let complete = |(_, who, _): &(Seq, BTreeSet<Rank>, BTreeSet<Rank>)| *who == wanted;
        if !state.inside.get(&slice_id).is_some_and(complete) {
            return;
        }
        let Some((seq, who, with_data)) = state.inside.remove(&slice_id) else { return };
        state.passed_on.insert(slice_id, who);
        let (ranks, slice) = (wanted.len() as u32, &book.slices[slice_id as usize]);
        let present = !with_data.is_empty();
        if book.roles.rules.fold == Fold::Updated {
            self.tell(with_data, What::Summed(id, slice_id, seq));
        }
        if slice.owner == me {
            let kind = if present { Kind::Push } else { Kind::PushAbsent };
            let argument = (ranks | (self.epoch & 0xff) << 16) << 8;
            let header = Header { book: id, slice: slice_id, seq, argument, ..Header::control(kind) };
            self.contribute(me, &header);
        } else {
            self.push_or_word(slice.owner, id, slice_id, seq, present.then_some(slice.wire_bytes));
        }
    }

    /// The round has ended: the head's members hear of it.
    fn spread(&mut self, id: BookId, slice: SliceId, seq: Seq) {
        let passed_on = self.books.get_mut(&id).and_then(|state| state.passed_on.remove(&slice));
        self.tell(passed_on.into_iter().flatten(), What::Ready(id, slice, seq, 0));
    }

    #[allow(clippy::too_many_arguments)] // The fields of `What::Push`, and to whom.
    fn push(
        &mut self,
        to: Rank,
        book: BookId,
        slice: SliceId,
        seq: Seq,
        step: u32,
        number: u32,
        len_bytes: u64,
    ) {
        self.queues[to.index()].open(book, number, seq);
        self.queue(to, What::Push { book, slice, seq, step, number, len_bytes });
    }

    /// From its submission on a slice has its turn at every peer to which partial sums of it will go.
    fn open_collective(&mut self, book: &Book, id: BookId, slice_id: SliceId, seq: Seq) {
        let (slice, tensor) = (&book.slices[slice_id as usize], book.tensor_of(slice_id));
        let Some(algorithm) = tensor.route.collective() else { return };
        let ranks = self.me.ranks;
        let position = (self.me.rank.0 + ranks - slice.owner.0) % ranks;
        let elems = u64::from(slice.len_bytes) / tensor.dtype.size_bytes() as u64;
        for number in 0..algorithm.reduce_steps(ranks) {
            if let Some(send) = algorithm.step(ranks, position, elems, number).send {
                let peer = ((send.to + slice.owner.0) % ranks) as usize;
                self.queues[peer].open(id, book.number_at_peer(slice_id), seq);
            }
        }
    }

    fn collective(&mut self, id: BookId, slice: SliceId) -> &mut CollectiveSlice {
        let book = self.books.get_mut(&id).expect("frames of books that are not open are kept");
        book.collectives.entry(slice).or_default()
    }

    /// Queues what the steps allow: a step sends when the parts of all steps before it have come.
    fn advance(&mut self, id: BookId, slice_id: SliceId) {
        let Some((seq, contributes)) = self.collective(id, slice_id).open else { return };
        let book = self.books[&id].book.clone();
        let (slice, tensor) = (&book.slices[slice_id as usize], book.tensor_of(slice_id));
        let Some(algorithm) = tensor.route.collective() else { return };
        let (ranks, elem_bytes) = (self.me.ranks, tensor.dtype.size_bytes() as u64);
        let position = (self.me.rank.0 + ranks - slice.owner.0) % ranks;
        let step = |number| algorithm.step(ranks, position, u64::from(slice.len_bytes) / elem_bytes, number);
        let (half, all) = (algorithm.reduce_steps(ranks), algorithm.steps(ranks));
        loop {
            let collective = self.collective(id, slice_id);
            let number = collective.next;
            if number == all {
                break;
            }
            let came = collective.came.clone();
            if let Some(send) = step(number).send {
                let to = Rank((send.to + slice.owner.0) % ranks);
                // A partial sum has a payload if this rank contributes, or if a part of the same elements had one.
                let covers = |earlier: &u32| {
                    let receive = step(*earlier).receive;
                    receive
                        .is_some_and(|r| r.elems.start <= send.elems.start && send.elems.end <= r.elems.end)
                };
                let present = contributes || (0..number).filter(covers).any(|earlier| came[&(seq, earlier)]);
                let len_bytes = (send.elems.end - send.elems.start) * elem_bytes;
                if number < half && present {
                    self.push(to, id, slice_id, seq, number, book.number_at_peer(slice_id), len_bytes);
                } else {
                    self.queue(to, What::Ready(id, slice_id, seq, number));
                }
            }
            let collective = self.collective(id, slice_id);
            // The step's send is queued; it is through when its part has come.
            collective.next += 1;
            if step(number).receive.is_some() && !came.contains_key(&(seq, number)) {
                collective.next = number | WAITING;
                return;
            }
        }
        let collective = self.collective(id, slice_id);
        collective.open = None;
        collective.came.retain(|(of, _), _| *of != seq);
        for peer in (0..ranks).map(Rank) {
            self.through(id, peer, book.number_at_peer(slice_id));
        }
    }

    /// A part has come; the step that waited for it goes on.
    fn part(&mut self, header: &Header) {
        let collective = self.collective(header.book, header.slice);
        collective.came.insert((header.seq, header.argument), header.payload_bytes > 0);
        let open = collective.open.is_some_and(|(seq, _)| seq == header.seq);
        if open && collective.next == header.argument | WAITING {
            collective.next = header.argument + 1;
            self.advance(header.book, header.slice);
        }
    }

    /// What was sent of a slice occupies nothing at the peer any more.
    fn through(&mut self, id: BookId, peer: Rank, number: u32) {
        let window = self.queues[peer.index()].windows.entry(id).or_default();
        window.open.remove(&number);
        window.pushed.remove(&number);
    }

    /// A frame arrives at the node, whose book is open if it is of one.
    pub fn frame(&mut self, from: Rank, header: &Header) {
        match header.kind {
            Kind::Leave => self.leave(from),
            Kind::Push | Kind::PushAbsent => {
                if self.books[&header.book].book.roles.groups.together(self.me.rank, from) {
                    self.contribute_inside(from, header);
                } else {
                    self.contribute(from, header);
                }
            }
            Kind::Part | Kind::Result => self.part(header),
            Kind::Gather | Kind::GroupIn | Kind::Passed | Kind::NotIn => self.take_given(from, header),
            Kind::Answer | Kind::AnswerAbsent | Kind::AnswerSame | Kind::Summed => {
                let number = self.books[&header.book].book.number_at_peer(header.slice);
                self.through(header.book, from, number);
                if header.kind != Kind::Summed {
                    self.spread(header.book, header.slice, header.seq);
                }
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
        let heard_by = if kind == Kind::Blob { self.me.workers } else { self.me.ranks };
        for peer in (0..heard_by).map(Rank).filter(|peer| *peer != me) {
            self.queue(peer, What::Control(kind));
        }
    }

    fn leave(&mut self, rank: Rank) {
        if !self.left.insert(rank) {
            return self.again.push(rank);
        }
        if self.left.len() == self.me.workers as usize {
            self.left.clear();
            self.epoch += 1;
            self.look_at_rounds();
            std::mem::take(&mut self.again).into_iter().for_each(|rank| self.leave(rank));
            return;
        }
        self.look_at_rounds();
    }

    fn look_at_rounds(&mut self) {
        let open: BTreeSet<(BookId, SliceId)> = (self.books.iter())
            .flat_map(|(id, state)| {
                let relayed = state.relayed.keys().map(|(slice, _)| slice);
                let open = state.inside.keys().chain(state.contributed.keys()).chain(relayed);
                open.map(|slice| (*id, *slice))
            })
            .collect();
        for (book, slice) in open {
            self.pass_on_if_complete(book, slice);
            self.finish_if_complete(book, slice);
            self.relay(book, slice);
        }
    }

    fn contribute(&mut self, from: Rank, header: &Header) {
        let Header { book: id, slice, seq, .. } = *header;
        if let Some(state) = self.books.get_mut(&id) {
            state.contributed.entry(slice).or_insert_with(|| (seq, BTreeSet::new())).1.insert(from);
            if header.kind == Kind::Push {
                state.with_data.entry(slice).or_default().insert(from);
            }
            state.clients.insert((slice, from), header.argument >> 8);
        }
        self.finish_if_complete(id, slice);
    }

    /// The rank's program tells a slice that it owns and updates to go on.
    pub fn proceed(&mut self, id: BookId, slice: SliceId) {
        let Some(state) = self.books.get_mut(&id) else { return };
        match state.waiting.remove(&slice) {
            Some(seq) => {
                let roles = state.book.roles.clone();
                let speaks = |rank: &Rank| roles.groups.of(*rank).is_none_or(|group| group.head() == *rank);
                let clients = roles.contributors().iter().filter(speaks);
                self.tell(clients, What::Ready(id, slice, seq, 0));
                self.spread(id, slice, seq);
            }
            None => drop(state.said.insert(slice)),
        }
    }

    /// Tells these, but not the rank itself.
    fn tell(&mut self, those: impl IntoIterator<Item = Rank>, what: What) {
        let me = self.me.rank;
        those.into_iter().filter(|peer| *peer != me).for_each(|peer| self.queue(peer, what));
    }

    fn finish_if_complete(&mut self, id: BookId, slice: SliceId) {
        let Some(state) = self.books.get_mut(&id) else { return };
        let roles = &state.book.roles;
        let active = |rank: &Rank| !self.left.contains(rank) && roles.rules.needs(*rank);
        let mut wanted: BTreeSet<Rank> = roles.members.iter().filter(active).collect();
        if !roles.groups.is_empty() {
            let clients = roles.groups.iter().map(|group| {
                let ranks = group.members.iter().filter(active).count() as u32;
                (group.head(), ranks)
            });
            let clients: Vec<(Rank, u32)> = clients.filter(|(_, ranks)| *ranks > 0).collect();
            let as_here = |(head, ranks): &(Rank, u32)| {
                state.clients.get(&(slice, *head)) == Some(&(ranks | (self.epoch & 0xff) << 16))
            };
            if !clients.iter().all(as_here) {
                return;
            }
            wanted = clients.into_iter().map(|(head, _)| head).collect();
        }
        if wanted.is_empty() || state.contributed.get(&slice).is_none_or(|(_, who)| *who != wanted) {
            return;
        }
        state.clients.retain(|(of, _), _| *of != slice);
        let seq = state.contributed.remove(&slice).map_or(0, |(seq, _)| seq);
        let with_data = state.with_data.remove(&slice).unwrap_or_default();
        let updated = state.book.roles.rules.fold == Fold::Updated;
        // Nobody has a result yet; who gave numbers hears that they are in.
        let is_summed = updated && !state.said.remove(&slice);
        let told = if is_summed {
            state.waiting.insert(slice, seq);
            with_data
        } else {
            if wanted.contains(&self.me.rank) {
                self.spread(id, slice, seq);
            }
            wanted
        };
        let what = if is_summed { What::Summed(id, slice, seq) } else { What::Ready(id, slice, seq, 0) };
        self.tell(told, what);
    }

    fn queue(&mut self, peer: Rank, what: What) {
        let place = match what {
            What::Ready(book, slice, ..) | What::Push { book, slice, .. } if self.me.priority => {
                let state = &self.books[&book];
                state.places[state.book.tensor_of(slice).layer as usize]
            }
            _ => 0,
        };
        self.order += 1;
        self.queues[peer.index()].waiting.push(WaitingFrame {
            place,
            order: self.order,
            what,
            overdue: false,
        });
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
            let better = class.then(other.urgency().cmp(&chosen.urgency())).is_lt();
            check(!better, Checker::Priority, || {
                format!("{}: {chosen:?} is sent while {other:?} waits", name())
            })?;
            // The exception goes out of turn within its place: it is there to end a wait.
            let turn = !exception && class.is_eq() && other.urgency() == chosen.urgency();
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
        if let What::Push { book, number, len_bytes, .. } = chosen.what {
            *queue.windows.entry(book).or_default().pushed.entry(number).or_default() += len_bytes;
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
            check(empty, Checker::NothingLeft, || {
                format!("link {} to {peer}: {queue:?} is left", self.me.rank)
            })?;
        }
        Ok(())
    }
}

impl What {
    fn is(&self, header: &Header) -> bool {
        // The argument of a frame of the store is its wire type, and of whom it is.
        let in_store = matches!(header.kind, Kind::Push | Kind::PushAbsent | Kind::Answer);
        let step = if in_store { 0 } else { header.argument };
        let id = (header.book, header.slice, header.seq, step);
        let pushed = header.kind == Kind::Push || (header.kind == Kind::Part && header.payload_bytes > 0);
        match *self {
            Self::Control(kind) => kind == header.kind,
            Self::Push { book, slice, seq, step, .. } => pushed && (book, slice, seq, step) == id,
            Self::Ready(book, slice, seq, step) => {
                let ready = header.kind.is_exchange() && !pushed && header.kind != Kind::Summed;
                ready && (book, slice, seq, step) == id
            }
            Self::Summed(book, slice, seq) => {
                header.kind == Kind::Summed && (book, slice, seq) == (header.book, header.slice, header.seq)
            }
        }
    }
}

impl WaitingFrame {
    /// The place, but overdue frames are as urgent as the first layer's.
    fn urgency(&self) -> u32 {
        if self.overdue { 0 } else { self.place }
    }
}

impl Window {
    /// The slice that may always go: without it, ranks that fill each other's windows with different slices would wait
    /// for one another for ever. Of the oldest round the last slice.
    fn exception(&self) -> Option<u32> {
        self.open.iter().min_by_key(|(number, seq)| (**seq, std::cmp::Reverse(**number))).map(|(at, _)| *at)
    }

    fn allows(&self, number: u32, len_bytes: u64, window_bytes: u64) -> bool {
        let overtakes = self.pushed.keys().next().is_some_and(|first| number < *first);
        let limit = if overtakes { 2 * window_bytes } else { window_bytes };
        self.pushed.values().sum::<u64>() + len_bytes <= limit
    }
}

impl Queue {
    /// A round of a slice begins in which pushes go to the peer; what waits of the book's older ones is overdue.
    fn open(&mut self, id: BookId, number: u32, seq: Seq) {
        let window = self.windows.entry(id).or_default();
        window.open.insert(number, seq);
        if seq > window.newest {
            window.newest = seq;
            let older = |what: &What| matches!(what, What::Ready(book, _, of, _) | What::Summed(book, _, of) if *book == id && *of < seq);
            self.waiting.iter_mut().filter(|w| older(&w.what)).for_each(|w| w.overdue = true);
        }
    }

    /// The frames that may go now: the first control frame; of what no window holds
    /// back the first, and the first of each book that is overdue; of each book's pushes the first if the window allows it, and otherwise
    /// the exception. With each, whether it is an exception.
    fn candidates(&self, window_bytes: u64) -> Vec<(bool, WaitingFrame)> {
        let first = |wanted: &dyn Fn(&What) -> bool| {
            self.waiting.iter().filter(|w| wanted(&w.what)).min_by_key(|w| (w.place, w.order)).copied()
        };
        let mut candidates = Vec::new();
        let control = |what: &What| matches!(what, What::Control(_));
        candidates.extend(first(&control).map(|w| (false, w)));
        let ready = |of: Option<BookId>| {
            let is = |w: &&WaitingFrame| matches!(w.what, What::Ready(book, ..) | What::Summed(book, ..) if w.overdue.then_some(book) == of);
            self.waiting.iter().filter(is).min_by_key(|w| (w.place, w.order)).map(|w| (false, *w))
        };
        candidates.extend(ready(None));
        candidates.extend(self.windows.keys().filter_map(|id| ready(Some(*id))));
        for (id, window) in &self.windows {
            let of_book = |what: &What| matches!(what, What::Push { book, .. } if book == id);
            let Some(head) = first(&of_book) else { continue };
            let What::Push { number, len_bytes, .. } = head.what else { continue };
            if window.allows(number, len_bytes, window_bytes) {
                candidates.push((false, head));
                continue;
            }
            let is_exception = |what: &What| matches!(what, What::Push { book, number, .. } if book == id && Some(*number) == window.exception());
            candidates.extend(first(&is_exception).map(|w| (true, w)));
        }
        candidates
    }

    /// `chosen` should not have been: because it was not its turn, or because the window forbids it.
    fn why_not(&self, chosen: &WaitingFrame, window_bytes: u64) -> Result<(), Violation> {
        if let What::Push { book, number, len_bytes, .. } = chosen.what {
            let window = &self.windows[&book];
            if !window.allows(number, len_bytes, window_bytes) {
                return Err(Violation::new(
                    Checker::Window,
                    format!(
                        "{chosen:?} is sent beyond the window of {window_bytes}: under way {:?}",
                        window.pushed
                    ),
                ));
            }
        }
        let same = |w: &&WaitingFrame| w.place == chosen.place && w.order < chosen.order;
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
