//! One lane of one rank: a worker and its shard of the store. Events in, actions and frames out.
//!
//! A driver gives [`Node::step`] what happens (a submission, a frame that arrived) and carries out the actions that follow.
//! [`Node::destination`] says where a payload goes, before it is read; [`Node::next_frame`] says which frame a peer gets next, at the
//! last moment before it is written. The node keeps books, queues and counts. What a slice does is its exchange's
//! ([`crate::exchange`]); what may go to a peer, and when, is its outbox's (`node/outbox.rs`).

mod calls;
mod events;
mod outbox;
mod presence;
mod recovery;
mod waits;

use crate::calls::Calls;
use crate::error::Error;
use crate::exchange::{Context, Effect, Exchange, Field, Flow, Site};
use crate::layout::{Book, Slice, Tensor};
use crate::limits;
use crate::members::Members;
use crate::memory::Memory;
use crate::observe::{Observation, Observe, Point};
use crate::roles::Roles;
use crate::submission::{Gives, Submission};
use crate::types::{BookId, LayerId, Rank, SliceId, TensorId};
use crate::way::Route;
use crate::wire::{
    Destination, Header, Kind, Outgoing, other_wire_type, unexpected, wire_argument, wire_part,
};
pub use events::{Action, Config, Event};
use outbox::Outbox;
use presence::{Active, Left, Presence};
use std::collections::BTreeMap;
use std::sync::Arc;
pub use waits::Waits;

struct BookState<C> {
    book: Arc<Book>,
    slices: Vec<Exchange<C>>,
    /// Place in the forward pass by layer.
    places: Vec<u32>,
    active: Active,
}

struct EarlyFrame<C> {
    from: Rank,
    header: Header,
    payload: Option<C>,
}

/// What such a frame takes of [`limits::EARLY_BYTES_MAX`].
fn early_bytes(header: &Header) -> usize {
    header.payload_bytes as usize + limits::EARLY_COST_BYTES
}

/// The state machine. See the crate's documentation.
pub struct Node<M: Memory, O: Observe = ()> {
    config: Config,
    memory: M,
    observer: O,
    books: Vec<Option<BookState<M::Chunk>>>,
    outboxes: Vec<Outbox<M::Chunk>>,
    presence: Presence,
    /// Frames for books that peers have opened before this rank did.
    early: BTreeMap<BookId, Vec<EarlyFrame<M::Chunk>>>,
    early_bytes: usize,
    /// Decides between frames of equal place: first in, first out.
    order: u64,
    calls: Calls<M>,
    /// Both reused from event to event, so that an exchange allocates nothing.
    inputs: Vec<M::Chunk>,
    effects: Vec<Effect<M::Chunk>>,
}

impl<M: Memory> Node<M> {
    /// A node without books, which nobody watches.
    pub fn new(config: Config, memory: M) -> Self {
        Self::watched(config, memory, ())
    }
}

impl<M: Memory, O: Observe> Node<M, O> {
    /// A node without books, and who watches it.
    pub fn watched(config: Config, memory: M, observer: O) -> Self {
        Self {
            outboxes: (0..config.members.end()).map(|_| Outbox::new(config.window_bytes)).collect(),
            calls: Calls::new(config.rank, config.members.clone()),
            presence: Presence::of_all(config.workers.clone(), config.rank),
            config,
            memory,
            observer,
            books: Vec::new(),
            early: BTreeMap::new(),
            early_bytes: 0,
            order: 0,
            inputs: Vec::new(),
            effects: Vec::new(),
        }
    }

    /// All processes of the job, or of its epoch.
    pub fn members(&self) -> &Members {
        &self.config.members
    }

    /// The memory this node runs over.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Who watches this node.
    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    /// Opens a book; frames of it that came early are processed now.
    ///
    /// # Errors
    /// [`Error::Config`] if the number is taken or too large; [`Error::Protocol`] for an early frame that does not fit.
    pub fn open_book(
        &mut self,
        id: BookId,
        book: Arc<Book>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let at = usize::from(id);
        if at >= limits::BOOKS_MAX || self.books.get(at).is_some_and(Option::is_some) {
            return Err(Error::Config(format!(
                "book {id} ({}) is open already or beyond the limit of {}",
                book.name,
                limits::BOOKS_MAX
            )));
        }
        if at >= self.books.len() {
            self.books.resize_with(at + 1, || None);
        }
        for (peer, outbox) in self.outboxes.iter_mut().enumerate() {
            outbox.open_book(id, &book, Rank(peer as u32));
        }
        let slices =
            (0..book.slices.len() as u32).map(|slice| Exchange::new(book.tensor_of(slice).route)).collect();
        let places = (0..book.layers.len() as u32).collect();
        let active = self.presence.of_book(&book.roles);
        self.books[at] = Some(BookState { book, slices, places, active });
        for EarlyFrame { from, header, payload } in self.early.remove(&id).unwrap_or_default() {
            self.early_bytes -= early_bytes(&header);
            if let Some(Some(state)) = self.books.get(at) {
                self.check(state, from, &header)?;
            }
            self.frame(from, &header, payload, actions)?;
        }
        Ok(())
    }

    /// Sets each layer's place in the forward pass, from 0. Frames queued already keep theirs.
    pub fn set_priorities(&mut self, book: BookId, places: &[u32]) {
        if let Some(Some(state)) = self.books.get_mut(usize::from(book)) {
            let most = state.places.len().saturating_sub(1) as u32;
            for (place, &new) in state.places.iter_mut().zip(places) {
                *place = new.min(most);
            }
        }
    }

    /// Takes an event and appends what follows from it to `actions`.
    ///
    /// # Errors
    /// [`Error::Protocol`] if a peer broke the protocol, [`Error::Config`] if the caller did. The node must not be used after.
    pub fn step(&mut self, event: Event<M::Chunk>, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        match event {
            Event::Submit(submission) => self.submit(&submission, actions),
            Event::Frame { from, header, payload } => self.arrived(from, &header, payload, actions),
            Event::Control { to, header, payload } => {
                self.control(to, header, payload.as_ref(), actions);
                Ok(())
            }
            Event::Proceed { book, slice, step, update } => {
                let header = Header { book, slice, step, ..Header::control(Kind::Push) };
                self.slice_kept_here(book, slice)?;
                self.exchange(
                    &header,
                    |exchange, context| exchange.proceed(&header, update, context),
                    actions,
                )
            }
            Event::Order { book, slice, update } => {
                let header = Header { book, slice, ..Header::control(Kind::Push) };
                self.slice_kept_here(book, slice)?;
                self.exchange(&header, |exchange, context| exchange.order(&header, update, context), actions)
            }
            Event::Close { book, slice, seq } => {
                let header = Header { book, slice, seq, ..Header::control(Kind::Push) };
                self.slice_kept_here(book, slice)?;
                self.exchange(&header, |exchange, context| exchange.close(&header, context), actions)
            }
            Event::Group(id, members) => self.calls.form(id, members),
            Event::Call(call) => self.call(*call, actions),
            Event::Leave => {
                self.control(None, Header::control(Kind::Leave), None, actions);
                self.leave(self.config.rank, actions)
            }
        }
    }

    fn submit(
        &mut self,
        submission: &Submission<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        self.submit_those(submission, |_| true, actions)
    }

    /// As [`Node::submit`], with some of the tensor's slices.
    fn submit_those(
        &mut self,
        submission: &Submission<M::Chunk>,
        those: impl Fn(SliceId) -> bool,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let Submission { book, tensor, ref memory, gives, .. } = *submission;
        let Some(Some(state)) = self.books.get(usize::from(book)) else {
            return Err(Error::Config(format!("book {book} is not open")));
        };
        let ids = state.book.clone();
        let is_member = |id| ids.members_of(id).contains(self.config.rank);
        if !ids.slices_of(tensor).all(is_member) {
            let (rank, name) = (self.config.rank, &ids.name);
            return Err(Error::Config(format!("{name}: rank {rank} is none of those that the book is for")));
        }
        let Tensor { name, dtype, wire, layer, .. } = &ids.tensors[tensor as usize];
        if let Some((op, why)) = gives.op().and_then(|op| Some((op, op.refused_on_wire(*dtype, *wire)?))) {
            return Err(Error::Config(format!("{}: {op:?} of {name} ({dtype:?}): {why}", ids.name)));
        }
        for id in ids.slices_of(tensor).filter(|id| those(*id)) {
            let slice = &ids.slices[id as usize];
            if slice.lane == self.config.lane {
                let (start, len) = match gives {
                    // A gather has one slice, which says how long frames are, and not the contribution.
                    Gives::Gathered(len_bytes) => (0, len_bytes as usize),
                    Gives::Whole(_) | Gives::Nothing(_) => {
                        (slice.offset_bytes as usize, slice.len_bytes as usize)
                    }
                };
                let chunk = self.memory.part(memory, start, len);
                let header = submission.header(id);
                self.saw(Point::Submitted, &header, Some(*layer), None);
                self.exchange(
                    &header,
                    |exchange, context| exchange.submit(&header, chunk, gives, context),
                    actions,
                )?;
            }
        }
        Ok(())
    }

    /// That this lane keeps something of this slice.
    fn slice_kept_here(&self, book: BookId, slice: SliceId) -> Result<(), Error> {
        let state = self.books.get(usize::from(book)).and_then(Option::as_ref);
        let at = state.and_then(|state| state.book.slices.get(slice as usize));
        let here = at.is_some_and(|at| at.lane == self.config.lane && at.is_kept_by(self.config.rank));
        if here {
            Ok(())
        } else {
            Err(Error::Config(format!("slice {slice} of book {book} is not kept here")))
        }
    }

    /// Of a tensor, those of this lane's slices, and where in the tensor they are.
    fn parts_of(
        &self,
        book: BookId,
        tensor: TensorId,
        those: impl Fn(&Book, &Slice) -> bool,
    ) -> Vec<(SliceId, usize, usize)> {
        let Some(Some(BookState { book, .. })) = self.books.get(usize::from(book)) else { return Vec::new() };
        if tensor as usize >= book.tensors.len() {
            return Vec::new();
        }
        let slices = book.slices_of(tensor).map(|id| (id, &book.slices[id as usize]));
        let here = slices.filter(|(_, at)| at.lane == self.config.lane && those(book, at));
        here.map(|(id, at)| (id, at.offset_bytes as usize, at.len_bytes as usize)).collect()
    }

    /// The slices of the store that this lane owns in a book, or keeps as a replica, the most urgent first.
    pub fn kept(&self, book: BookId) -> Vec<SliceId> {
        self.mine(book, |at| at.is_kept_by(self.config.rank))
    }

    fn mine(&self, book: BookId, those: impl Fn(&Slice) -> bool) -> Vec<SliceId> {
        let Some(Some(state)) = self.books.get(usize::from(book)) else { return Vec::new() };
        let (tensors, slices) = (&state.book.tensors, state.book.slices.iter().zip(0..));
        let in_store = |at: &Slice| tensors[at.tensor as usize].route == Route::STORE;
        let mine = |at: &Slice| at.lane == self.config.lane && those(at) && in_store(at);
        let here = slices.filter(|(at, _)| mine(at));
        let mut owned: Vec<_> = here
            .map(|(at, slice)| (state.places[tensors[at.tensor as usize].layer as usize], slice))
            .collect();
        owned.sort_unstable();
        owned.into_iter().map(|(_, slice)| slice).collect()
    }

    /// Takes what this lane keeps of a tensor from `whole`, which has all of it; see [`Field`]. A value comes first, with the number
    /// of updates that it has had, and then the optimizer's states in order, unless it has had none. Between rounds.
    ///
    /// # Errors
    /// [`Error::Config`] if nothing is kept of it, or states come out of order.
    pub fn load(
        &mut self,
        book: BookId,
        tensor: TensorId,
        (field, updates): (Field, u64),
        whole: &M::Chunk,
    ) -> Result<(), Error> {
        let open = self.books.get(usize::from(book)).and_then(Option::as_ref);
        let may_lend = open.is_some_and(|state| state.book.may_lend(tensor));
        let field = match field {
            Field::Lent if !may_lend => Field::Value,
            Field::Moved if !may_lend => {
                return Err(Error::Config("a value that is not lent does not move".into()));
            }
            field => field,
        };
        let me = self.config.rank;
        // Where members may be lost any of them may have to keep it next.
        let takes = |book: &Book, at: &Slice| at.owner == me || book.roles.rules.recoverable;
        for (slice, start, len) in self.parts_of(book, tensor, takes) {
            let from = self.memory.part(whole, start, len);
            let header = Header { book, slice, ..Header::control(Kind::Push) };
            let load = |exchange: &mut Exchange<_>, context: &mut Context<'_, M>| {
                exchange.load(field, updates, &from, context)
            };
            self.exchange(&header, load, &mut Vec::new())?;
        }
        Ok(())
    }

    /// Copies what this lane owns of a tensor to its places in `whole`, and says how often it was updated; `None` if it keeps
    /// no such thing.
    ///
    /// # Errors
    /// [`Error::Config`] if slices differ in that: a round is under way. [`Error::MembersChanged`] if states are on their way here.
    pub fn save(
        &mut self,
        book: BookId,
        tensor: TensorId,
        field: Field,
        whole: &M::Chunk,
    ) -> Result<Option<u64>, Error> {
        let mut updates = Vec::new();
        let me = self.config.rank;
        for (slice, start, len) in self.parts_of(book, tensor, |_, at| at.owner == me) {
            let to = self.memory.part(whole, start, len);
            let header = Header { book, slice, ..Header::control(Kind::Push) };
            let save = |exchange: &mut Exchange<_>, context: &mut Context<'_, M>| {
                if context.site.rules.recoverable && !exchange.has_states() {
                    let layer = context.site.layer;
                    let what =
                        format!("what this rank is to keep of layer {layer} from now on is on its way here");
                    return Err(Error::MembersChanged(what));
                }
                updates.push(exchange.save(field, &to, context));
                Ok(())
            };
            self.exchange(&header, save, &mut Vec::new())?;
        }
        updates.dedup();
        match updates[..] {
            [] => Ok(None),
            [updates] => Ok(updates),
            _ => Err(Error::Config(format!("tensor {tensor} of book {book} is being updated"))),
        }
    }

    /// Of every slice of a book that this lane owns, the most urgent first, the sum of the squares of the sum that waits here; `None` unless all of
    /// them wait. Of those to which nobody contributed it is 0.
    pub fn squares(&mut self, book: BookId) -> Option<Vec<(SliceId, f64)>> {
        let mut all = Some(Vec::new());
        for slice in self.mine(book, |at| at.owner == self.config.rank) {
            let header = Header { book, slice, ..Header::control(Kind::Push) };
            let square = |exchange: &mut Exchange<_>, context: &mut Context<'_, M>| {
                let squares = exchange.squares(context);
                all = all.take().zip(squares).map(|(mut all, squares)| {
                    all.push((slice, squares));
                    all
                });
                Ok(())
            };
            self.exchange(&header, square, &mut Vec::new()).ok()?;
        }
        all
    }

    fn saw(&mut self, point: Point, header: &Header, layer: Option<LayerId>, peer: Option<Rank>) {
        self.observer.observe(Observation { point, header, layer, peer, overtakes: false });
    }

    /// Lets the exchange of the slice that `header` names (and that exists) handle an event, and does what it wants.
    fn exchange(
        &mut self,
        header: &Header,
        handle: impl FnOnce(&mut Exchange<M::Chunk>, &mut Context<'_, M>) -> Result<(), Error>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let Some(Some(state)) = self.books.get_mut(usize::from(header.book)) else { return Ok(()) };
        let mut context = Context {
            site: site(self.config.rank, &state.book, &state.active, header.slice),
            memory: &mut self.memory,
            inputs: &mut self.inputs,
            effects: &mut self.effects,
        };
        let outcome = handle(&mut state.slices[header.slice as usize], &mut context);
        self.perform(header, actions);
        outcome
    }

    /// Does what an exchange wants done.
    fn perform(&mut self, header: &Header, actions: &mut Vec<Action<M::Chunk>>) {
        let Some(Some(state)) = self.books.get(usize::from(header.book)) else { return };
        let slice = &state.book.slices[header.slice as usize];
        let layer = state.book.tensors[slice.tensor as usize].layer;
        let place = if self.config.priority { state.places[layer as usize] as usize } else { 0 };
        let number = state.book.number_at_peer(header.slice);
        let mut saw = |point, header: &Header, peer, overtakes| {
            self.observer.observe(Observation { point, header, layer: Some(layer), peer, overtakes });
        };
        for effect in self.effects.drain(..) {
            match effect {
                Effect::Send { to, frame, flow } => {
                    self.order += 1;
                    let outbox = &mut self.outboxes[to.index()];
                    let sent = frame.header;
                    // Before the answer, whatever becomes of the layer's place meanwhile: who has that expects nothing more.
                    let place = if sent.kind == Kind::Summed { 0 } else { place };
                    let overtakes = match flow {
                        Flow::Window => outbox.queue_push(place, self.order, number, frame),
                        Flow::Free => outbox.queue_ready(place, self.order, frame),
                    };
                    let point = if sent.kind.takes_part() { Point::Queued } else { Point::Answered };
                    saw(point, &sent, Some(to), overtakes);
                    actions.push(Action::Wake(to));
                }
                Effect::Opens { to } => {
                    self.outboxes[to.index()].open_slice(header.book, number, header.seq, header.step);
                }
                Effect::Consumed { by } => {
                    if self.outboxes[by.index()].consumed(header.book, number) {
                        actions.push(Action::Wake(by));
                    }
                }
                Effect::Gathered { parts } => {
                    actions.push(Action::Gathered { book: header.book, slice: header.slice, parts });
                }
                Effect::Waits => actions.push(Action::Waits { book: header.book, slice: header.slice }),
                Effect::Enough { seq, after_ns } => {
                    actions.push(Action::Enough { book: header.book, slice: header.slice, seq, after_ns });
                }
                Effect::Late { of } => {
                    actions.push(Action::Late { book: header.book, slice: header.slice, of });
                }
                Effect::Summed { seq } => saw(Point::Summed, &Header { seq, ..*header }, None, false),
                Effect::Complete { seq, present, version, kept } => {
                    saw(Point::Landed, &Header { seq, ..*header }, None, false);
                    let (book, slice) = (header.book, header.slice);
                    actions.push(Action::Complete { book, slice, seq, present, version, kept });
                }
            }
        }
    }

    /// Checks an arriving frame and says where its payload goes.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the frame does not fit this rank's books or what it waits for.
    pub fn destination(&mut self, from: Rank, header: &Header) -> Result<Destination<M::Chunk>, Error> {
        if header.kind.is_call() {
            return self.calls.destination(from, header, &mut self.memory);
        }
        let len = header.payload_bytes as usize;
        if let Some(Some(state)) =
            self.books.get(usize::from(header.book)).filter(|_| header.kind.is_exchange())
        {
            self.check(state, from, header)?;
            let site = site(self.config.rank, &state.book, &state.active, header.slice);
            if let Some(chunk) = state.slices[header.slice as usize].destination(header, &site, &self.memory)
            {
                return Ok(Destination::Chunk(chunk));
            }
        } else if header.kind.is_exchange() {
            let too_early = !header.kind.takes_part()
                || usize::from(header.book) >= limits::BOOKS_MAX
                || self.early_bytes + early_bytes(header) > limits::EARLY_BYTES_MAX;
            if too_early {
                return Err(unexpected(from, header));
            }
        }
        Ok(if len == 0 { Destination::None } else { Destination::Chunk(self.memory.scratch(len)) })
    }

    /// Checks that `header` names a slice of this lane, and a frame that its exchange expects.
    fn check(&self, state: &BookState<M::Chunk>, from: Rank, header: &Header) -> Result<(), Error> {
        let slice = state.book.slices.get(header.slice as usize);
        let between_members = || {
            let members = state.book.members_of(header.slice);
            [from, self.config.rank].iter().all(|rank| members.contains(*rank))
        };
        if slice.is_none_or(|slice| slice.lane != self.config.lane) || !between_members() {
            return Err(unexpected(from, header));
        }
        let site = site(self.config.rank, &state.book, &state.active, header.slice);
        let carries_slice = matches!(header.kind, Kind::Push | Kind::Answer);
        let (wire, _) = site.wire_with(from);
        if carries_slice && wire_part(header.argument) != wire_argument(site.dtype, wire) {
            let tensor = state.book.tensor_of(header.slice);
            return Err(other_wire_type(from, header, &tensor.name, wire));
        }
        let expected = state.slices[header.slice as usize].expects(from, header, &site);
        // What is done with the contributions is said by those who contribute; answers need not repeat it. A gather does nothing.
        let combined = header.kind.takes_part() && !header.kind.is_gathers();
        let refused = combined && header.op.refused_on_wire(site.dtype, site.wire).is_some();
        if expected && !refused { Ok(()) } else { Err(unexpected(from, header)) }
    }

    /// A frame is here completely.
    fn arrived(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        if !header.kind.is_exchange() {
            self.saw(Point::Arrived, header, None, Some(from));
        }
        if header.kind == Kind::Leave {
            return self.leave(from, actions);
        }
        if header.kind.is_call() {
            return self.call_frame(from, header, payload, actions);
        }
        if !header.kind.is_exchange() {
            actions.push(Action::Control { from, header: *header, payload });
            return Ok(());
        }
        let Some(Some(state)) = self.books.get(usize::from(header.book)) else {
            self.early_bytes += early_bytes(header);
            self.early.entry(header.book).or_default().push(EarlyFrame { from, header: *header, payload });
            return Ok(());
        };
        if header.kind.takes_part() {
            // Again: the book may have been opened after the header came and before the payload was complete.
            self.check(state, from, header)?;
        }
        self.frame(from, header, payload, actions)
    }

    /// A frame of an open book, whose header was checked.
    fn frame(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let Some(Some(state)) = self.books.get(usize::from(header.book)) else { return Ok(()) };
        let layer = state.book.tensor_of(header.slice).layer;
        self.saw(Point::Arrived, header, Some(layer), Some(from));
        self.exchange(header, |exchange, context| exchange.frame(from, header, payload, context), actions)
    }

    fn control(
        &mut self,
        to: Option<Rank>,
        header: Header,
        payload: Option<&M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) {
        // All-gathers are the workers' own.
        let Config { rank, members, workers, .. } = &self.config;
        let all = if header.kind == Kind::Blob { workers } else { members };
        for peer in all.iter().filter(|peer| peer != rank) {
            if to.is_none_or(|to| to == peer) {
                self.outboxes[peer.index()].queue_control(Outgoing { header, payload: payload.cloned() });
                actions.push(Action::Wake(peer));
            }
        }
    }

    /// A rank has left: rounds that only waited for it end now.
    fn leave(&mut self, rank: Rank, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        match self.presence.leave(rank)? {
            Left::Ahead => Ok(()),
            Left::One => {
                for id in 0..self.books.len() {
                    if self.books[id].as_mut().is_some_and(|state| state.active.leave(rank)) {
                        self.look_at_rounds(id as BookId, actions)?;
                    }
                }
                Ok(())
            }
            // At once, in the same event: a peer that has seen all leave may push again before this rank's user knows.
            // No round can end here: what is open was pushed by such peers, and this rank has not submitted yet. But a server may have
            // heard from all groups.
            Left::All { again } => {
                for state in self.books.iter_mut().flatten() {
                    state.active = self.presence.of_book(&state.book.roles);
                }
                actions.push(Action::AllLeft);
                for id in 0..self.books.len() {
                    let grouped = |state: &&BookState<_>| !state.book.roles.groups.is_empty();
                    if self.books[id].as_ref().filter(grouped).is_some() {
                        self.look_at_rounds(id as BookId, actions)?;
                    }
                }
                again.into_iter().try_for_each(|rank| self.leave(rank, actions))
            }
        }
    }

    /// Ranks have left, or come back: ends the rounds of a book that waited for nothing else.
    fn look_at_rounds(&mut self, book: BookId, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        let slices = self.books[usize::from(book)].as_ref().map_or(0, |state| state.slices.len());
        for slice in 0..slices as u32 {
            let header = Header { book, slice, ..Header::control(Kind::Push) };
            self.exchange(&header, |exchange, context| exchange.left(&header, context), actions)?;
        }
        Ok(())
    }

    /// The frame to send to `peer` next, decided now. Its payload must stay unchanged until it is written; when that begins, the
    /// node is to be told ([`Node::first_byte_out`]).
    pub fn next_frame(&mut self, peer: Rank) -> Option<Outgoing<M::Chunk>> {
        let mut frame = self.outboxes[peer.index()].pop()?;
        if frame.header.kind.is_exchange() {
            let at = usize::from(frame.header.book);
            if let Some(Some(state)) = self.books.get(at) {
                let wire = state.book.tensor_of(frame.header.slice).wire;
                let slice_is_whole = matches!(frame.header.kind, Kind::Push | Kind::Answer);
                let is_rounded = slice_is_whole && wire_part(frame.header.argument) != 0;
                // Rounded now and not when it was queued: so no more scratch is in use than what is being written. Of an
                // answer this loses nothing, for the result has been rounded.
                if let Some(payload) = frame.payload.as_mut().filter(|_| is_rounded) {
                    let rounded = self.memory.scratch(frame.header.payload_bytes as usize);
                    self.memory.round(wire, payload, &rounded);
                    *payload = rounded;
                }
            }
        }
        Some(frame)
    }

    /// The first byte of a frame that [`Node::next_frame`] gave for `peer` is written.
    pub fn first_byte_out(&mut self, peer: Rank, header: &Header) {
        if !O::WATCHES {
            return;
        }
        let book = self.books.get(usize::from(header.book)).filter(|_| header.kind.is_exchange());
        let layer = book.and_then(Option::as_ref).map(|state| state.book.tensor_of(header.slice).layer);
        self.saw(Point::FirstByteOut, header, layer, Some(peer));
    }

    /// Whether [`Node::next_frame`] would give a frame.
    pub fn has_frame(&self, peer: Rank) -> bool {
        self.outboxes[peer.index()].has_frame()
    }
}

fn site<'a>(rank: Rank, book: &'a Book, active: &'a Active, slice: SliceId) -> Site<'a> {
    let (members, tensor, Roles { rules, groups, .. }) =
        (book.members_of(slice), book.tensor_of(slice), &book.roles);
    let active = if tensor.route == Route::STORE { &active.members } else { &active.contributors };
    let (dtype, wire, tensor_bytes) = (tensor.dtype, tensor.wire, tensor.len_bytes());
    let layer = book.layers[tensor.layer as usize].as_str();
    let only_to = tensor.owner.filter(|_| tensor.route == Route::Gather);
    let slice = &book.slices[slice as usize];
    Site { rank, members, active, rules, groups, only_to, slice, layer, dtype, wire, tensor_bytes }
}
