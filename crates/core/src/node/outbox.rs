//! What waits to be sent to one peer, and which of it may go next.
//!
//! Pushes are limited by a window per book, so that an owner holds a bounded number of bytes for a slow rank. A window alone
//! could deadlock: rank 0 fills its window with slices that rank 1 has not pushed, and the other way round. So of the slices that
//! this rank has submitted and that are unanswered, one may always go, by an order that is the same on all ranks: the oldest round
//! first, and in a round the last slice of the book first. Once every rank has submitted the same slices, that one is pushed by
//! all, is answered, and the next takes its place.
//!
//! Why the last slice first: backward submits them in about that order. A slice submitted later then rarely comes before those
//! under way, and the exception to the window is one slice at a time. The other way round every slice of a backward pass would be
//! an exception when it is submitted, and the window would bound nothing.

use crate::bits::Bits;
use crate::layout::{Book, BookId, Rank, Seq};
use crate::queue::PriorityQueue;
use crate::wire::{Kind, Outgoing};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Pushes of one book to one owner.
struct Pushes<C> {
    queue: PriorityQueue<(u32, Outgoing<C>)>,
    /// Place at which each slice waits, by its number at the owner.
    places: Vec<u32>,
    /// Round in which each slice is open, by its number at the owner; 0 if it is not.
    open: Vec<Seq>,
    /// The open slices in the order of the exception. Answered ones may be in it, but never at the top.
    turns: BinaryHeap<(Reverse<Seq>, u32)>,
    /// Of the open slices those handed to the driver.
    pushed: Bits,
    pushed_bytes: u64,
}

/// The frames for one peer.
pub(super) struct Outbox<C> {
    control: VecDeque<Outgoing<C>>,
    /// Goes last: when it arrives, the peer needs nothing more from this rank.
    goodbye: Option<Outgoing<C>>,
    /// Answers and absences, which no window holds back.
    ready: PriorityQueue<Outgoing<C>>,
    pushes: Vec<Option<Pushes<C>>>,
    window_bytes: u64,
}

/// Which frame may go next.
enum Next {
    Control,
    Ready,
    /// The head of a book's queue.
    Push(usize),
    Goodbye,
    /// The slice of a book whose turn it is, whatever the window says.
    Turn(usize, u32),
}

impl<C> Pushes<C> {
    /// Whether the slice with this number at the owner may be pushed now.
    fn allowed(&self, at_owner: u32, len_bytes: u64, window_bytes: u64) -> bool {
        // A slice that overtakes all that is under way gets a second window, so that a backlog cannot hold it up.
        let overtakes = self.pushed.first().is_some_and(|first| (at_owner as usize) < first);
        let limit = if overtakes { 2 * window_bytes } else { window_bytes };
        self.pushed_bytes + len_bytes <= limit || self.turn() == Some(at_owner)
    }

    fn next(&self, book: usize, window_bytes: u64) -> Option<(usize, u64, Next)> {
        let (place, order, (at_owner, frame)) = self.queue.peek()?;
        if self.allowed(*at_owner, u64::from(frame.header.payload_bytes), window_bytes) {
            return Some((place, order, Next::Push(book)));
        }
        let turn = self.turn().filter(|&turn| !self.pushed.contains(turn as usize))?;
        Some((self.places[turn as usize] as usize, 0, Next::Turn(book, turn)))
    }

    /// The slice that may always go.
    fn turn(&self) -> Option<u32> {
        self.turns.peek().map(|(_, at_owner)| *at_owner)
    }

    fn opened(&mut self, at_owner: u32, seq: Seq) {
        self.open[at_owner as usize] = seq;
        self.turns.push((Reverse(seq), at_owner));
        self.forget_answered();
    }

    fn closed(&mut self, at_owner: u32) {
        self.open[at_owner as usize] = 0;
        self.forget_answered();
    }

    /// Takes answered slices from the top of `turns`, and from all of it when they are most of it.
    fn forget_answered(&mut self) {
        let open = &self.open;
        let is_open = |(Reverse(seq), at_owner): &(Reverse<Seq>, u32)| open[*at_owner as usize] == *seq;
        while self.turns.peek().is_some_and(|top| !is_open(top)) {
            self.turns.pop();
        }
        if self.turns.len() > 2 * open.len() {
            self.turns.retain(is_open);
        }
    }
}

impl<C> Outbox<C> {
    pub(super) fn new(window_bytes: u64) -> Self {
        let mut ready = PriorityQueue::default();
        ready.grow(1);
        Self { control: VecDeque::new(), goodbye: None, ready, pushes: Vec::new(), window_bytes }
    }

    pub(super) fn open_book(&mut self, id: BookId, book: &Book, peer: Rank) {
        let (at, places, slices) =
            (usize::from(id), book.layers.len().max(1), book.owned_slices[peer.index()] as usize);
        if at >= self.pushes.len() {
            self.pushes.resize_with(at + 1, || None);
        }
        self.ready.grow(places);
        let mut queue = PriorityQueue::default();
        queue.grow(places);
        self.pushes[at] = Some(Pushes {
            queue,
            places: vec![0; slices],
            open: vec![0; slices],
            turns: BinaryHeap::with_capacity(2 * slices + 1),
            pushed: Bits::new(slices),
            pushed_bytes: 0,
        });
    }

    pub(super) fn queue_control(&mut self, frame: Outgoing<C>) {
        if frame.header.kind == Kind::Goodbye {
            self.goodbye = Some(frame);
        } else {
            self.control.push_back(frame);
        }
    }

    pub(super) fn queue_ready(&mut self, place: usize, order: u64, frame: Outgoing<C>) -> bool {
        self.ready.push(place, order, frame)
    }

    pub(super) fn queue_push(&mut self, place: usize, order: u64, at_owner: u32, frame: Outgoing<C>) -> bool {
        let Some(Some(pushes)) = self.pushes.get_mut(usize::from(frame.header.book)) else { return false };
        pushes.opened(at_owner, frame.header.seq);
        pushes.places[at_owner as usize] = place as u32;
        pushes.queue.push(place, order, (at_owner, frame))
    }

    /// A slice was answered; returns whether a push that waits may go now.
    pub(super) fn answered(&mut self, book: BookId, at_owner: u32, len_bytes: u32) -> bool {
        let Some(Some(pushes)) = self.pushes.get_mut(usize::from(book)) else { return false };
        let at = at_owner as usize;
        pushes.closed(at_owner);
        if pushes.pushed.contains(at) {
            pushes.pushed.remove(at);
            pushes.pushed_bytes -= u64::from(len_bytes);
        }
        !pushes.queue.is_empty()
    }

    fn next(&self) -> Option<Next> {
        if !self.control.is_empty() {
            return Some(Next::Control);
        }
        let ready = self.ready.peek().map(|(place, order, _)| (place, order, Next::Ready));
        let pushes = self.pushes.iter().enumerate();
        let pushes = pushes.filter_map(|(book, pushes)| pushes.as_ref()?.next(book, self.window_bytes));
        let first = ready.into_iter().chain(pushes).min_by_key(|(place, order, _)| (*place, *order));
        first.map(|(_, _, next)| next).or_else(|| {
            let waits = self.pushes.iter().flatten().any(|pushes| !pushes.queue.is_empty());
            (self.goodbye.is_some() && !waits).then_some(Next::Goodbye)
        })
    }

    pub(super) fn has_frame(&self) -> bool {
        self.next().is_some()
    }

    pub(super) fn pop(&mut self) -> Option<Outgoing<C>> {
        let (pushes, (at_owner, frame)) = match self.next()? {
            Next::Control => return self.control.pop_front(),
            Next::Ready => return self.ready.pop(),
            Next::Goodbye => return self.goodbye.take(),
            Next::Push(book) => {
                let pushes = self.pushes[book].as_mut()?;
                let head = pushes.queue.pop()?;
                (pushes, head)
            }
            Next::Turn(book, turn) => {
                let pushes = self.pushes[book].as_mut()?;
                let place = pushes.places[turn as usize] as usize;
                let taken = pushes.queue.take(place, |(at_owner, _)| *at_owner == turn)?;
                (pushes, taken)
            }
        };
        pushes.pushed.insert(at_owner as usize);
        pushes.pushed_bytes += u64::from(frame.header.payload_bytes);
        Some(frame)
    }
}
