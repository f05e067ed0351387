//! What waits to be sent to one peer, and which of it may go next.
//!
//! What the peer may have to keep in scratch until it takes part itself (pushes to an owner, partial sums of a collective) is
//! limited by a window per book, so that a peer holds a bounded number of bytes for a rank that is ahead. A window alone could
//! deadlock: rank 0 fills its window with slices that rank 1 has not pushed, and the other way round. So of the slices that this
//! rank has submitted and that are not through, one may always go, by an order that is the same on all ranks: the oldest round
//! first, and in a round the last slice of the book first. Once every rank has submitted the same slices, that one is sent by
//! all, is through, and the next takes its place.
//!
//! Why the last slice first: backward submits them in about that order. A slice submitted later then rarely comes before those
//! under way, and the exception to the window is one slice at a time. The other way round every slice of a backward pass would be
//! an exception when it is submitted, and the window would bound nothing.
//!
//! A rank that begins to push for a newer step has every result of the step before. What it still has to send of that, the peer
//! stands still for, so it goes before all of the newer step, however urgent that is. Otherwise a rank that gets its last
//! results a little later than the others is kept from them by what they send it of the next step, and falls further behind.
//!
//! Slices are known here by [`Book::number_at_peer`].

use crate::bits::Bits;
use crate::layout::Book;
use crate::queue::PriorityQueue;
use crate::types::{BookId, Rank, Seq, Step};
use crate::wire::{Header, Outgoing};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What goes to the peer for one book: under its window, and what is overdue. Tables are by the slice's number at the peer.
struct Pushes<C> {
    queue: PriorityQueue<(u32, Outgoing<C>)>,
    slices: Vec<SliceWindow>,
    /// How many slices there may be; the table is made when the first is used.
    slice_count: usize,
    /// The newest step for which anything was opened. Not a round: tensors count theirs each by itself.
    newest: Step,
    /// What no window holds back and waited when that step began.
    overdue: PriorityQueue<Outgoing<C>>,
    /// The open slices in the order of the exception. Those that are through may be in it, but never at the top.
    turns: BinaryHeap<(Reverse<Seq>, u32)>,
    /// Of the open slices those of which something was handed to the driver.
    pushed: Bits,
    pushed_bytes: u64,
}

/// One slice in the window.
#[derive(Clone, Copy, Default)]
struct SliceWindow {
    /// The round that is open; 0 if none is.
    open: Seq,
    /// Place at which its frames wait.
    place: u32,
    /// Frames that wait.
    waiting: u32,
    /// Bytes handed to the driver that count.
    pushed_bytes: u64,
}

/// The frames for one peer.
pub(super) struct Outbox<C> {
    control: VecDeque<Outgoing<C>>,
    /// What no window holds back: answers, absences, results, parts of gathers.
    ready: PriorityQueue<Outgoing<C>>,
    pushes: Vec<Option<Pushes<C>>>,
    window_bytes: u64,
}

/// Which frame may go next.
enum Next {
    Control,
    /// What is overdue of a book.
    Overdue(usize),
    Ready,
    /// The head of a book's queue.
    Push(usize),
    /// The slice of a book whose turn it is, whatever the window says.
    Turn(usize, u32),
}

impl<C> Pushes<C> {
    /// Whether the slice with this number may send so much now.
    fn allowed(&self, number: u32, len_bytes: u64, window_bytes: u64) -> bool {
        // A slice that overtakes all that is under way gets a second window, so that a backlog cannot hold it up.
        let overtakes = self.pushed.first().is_some_and(|first| (number as usize) < first);
        let limit = if overtakes { 2 * window_bytes } else { window_bytes };
        self.pushed_bytes + len_bytes <= limit || self.turn() == Some(number)
    }

    fn next(&self, book: usize, window_bytes: u64) -> Option<(usize, u64, Next)> {
        let (place, order, (number, frame)) = self.queue.peek()?;
        if self.allowed(*number, u64::from(frame.header.payload_bytes), window_bytes) {
            return Some((place, order, Next::Push(book)));
        }
        let turn = self.turn().filter(|&turn| self.slices[turn as usize].waiting > 0)?;
        Some((self.slices[turn as usize].place as usize, 0, Next::Turn(book, turn)))
    }

    /// The slice that may always go.
    fn turn(&self) -> Option<u32> {
        self.turns.peek().map(|(_, number)| *number)
    }

    /// This rank takes part in a round of this slice, if it does not yet.
    fn open(&mut self, number: u32, seq: Seq) {
        if self.slices.is_empty() {
            self.slices.resize(self.slice_count, SliceWindow::default());
            self.pushed.grow(self.slice_count);
            self.turns.reserve(2 * self.slice_count + 1);
        }
        if std::mem::replace(&mut self.slices[number as usize].open, seq) != seq {
            self.turns.push((Reverse(seq), number));
            self.forget_those_through();
        }
    }

    /// A frame of this slice joins the queue; returns the place at which those of its frames wait that wait already.
    fn joined(&mut self, number: u32, place: usize) -> usize {
        let slice = &mut self.slices[number as usize];
        if slice.waiting == 0 {
            slice.place = place as u32;
        }
        slice.waiting += 1;
        slice.place as usize
    }

    /// A frame of this slice was handed to the driver.
    fn departed(&mut self, number: u32, len_bytes: u64) {
        let slice = &mut self.slices[number as usize];
        slice.waiting -= 1;
        slice.pushed_bytes += len_bytes;
        self.pushed_bytes += len_bytes;
        self.pushed.insert(number as usize);
    }

    fn closed(&mut self, number: u32) {
        let Some(slice) = self.slices.get_mut(number as usize) else { return };
        slice.open = 0;
        self.pushed_bytes -= std::mem::take(&mut slice.pushed_bytes);
        self.pushed.remove(number as usize);
        self.forget_those_through();
    }

    /// Takes slices that are through from the top of `turns`, and from all of it when they are most of it.
    fn forget_those_through(&mut self) {
        let slices = &self.slices;
        let is_open = |(Reverse(seq), number): &(Reverse<Seq>, u32)| slices[*number as usize].open == *seq;
        while self.turns.peek().is_some_and(|top| !is_open(top)) {
            self.turns.pop();
        }
        if self.turns.len() > 2 * slices.len() {
            self.turns.retain(is_open);
        }
    }
}

impl<C> Outbox<C> {
    pub(super) fn new(window_bytes: u64) -> Self {
        let mut ready = PriorityQueue::default();
        ready.grow(1);
        Self { control: VecDeque::new(), ready, pushes: Vec::new(), window_bytes }
    }

    pub(super) fn open_book(&mut self, id: BookId, book: &Book, peer: Rank) {
        let (at, places) = (usize::from(id), book.layers.len().max(1));
        let slice_count = book.numbers_at_peer(peer) as usize;
        if at >= self.pushes.len() {
            self.pushes.resize_with(at + 1, || None);
        }
        self.ready.grow(places);
        let (mut queue, mut overdue) = (PriorityQueue::default(), PriorityQueue::default());
        queue.grow(places);
        overdue.grow(places);
        self.pushes[at] = Some(Pushes {
            queue,
            slices: Vec::new(),
            slice_count,
            newest: 0,
            overdue,
            turns: BinaryHeap::new(),
            pushed: Bits::new(0),
            pushed_bytes: 0,
        });
    }

    pub(super) fn queue_control(&mut self, frame: Outgoing<C>) {
        self.control.push_back(frame);
    }

    pub(super) fn queue_ready(&mut self, place: usize, order: u64, frame: Outgoing<C>) -> bool {
        self.ready.push(place, order, frame)
    }

    /// A round of a slice begins in which something may be queued by [`Outbox::queue_push`], now or later: its turn counts
    /// from now on. Otherwise slices that are forwarded one after the other would each be an exception to the window.
    pub(super) fn open_slice(&mut self, book: BookId, number: u32, seq: Seq, step: Step) {
        let Some(Some(pushes)) = self.pushes.get_mut(usize::from(book)) else { return };
        pushes.open(number, seq);
        if step > pushes.newest {
            pushes.newest = step;
            let is_older =
                |header: &Header| header.kind.is_exchange() && header.book == book && header.step < step;
            self.ready.pass_on(&mut pushes.overdue, |frame| is_older(&frame.header));
        }
    }

    pub(super) fn queue_push(&mut self, place: usize, order: u64, number: u32, frame: Outgoing<C>) -> bool {
        let Header { book, seq, step, .. } = frame.header;
        self.open_slice(book, number, seq, step);
        let Some(Some(pushes)) = self.pushes.get_mut(usize::from(book)) else { return false };
        let place = pushes.joined(number, place);
        pushes.queue.push(place, order, (number, frame))
    }

    /// Nothing of a slice occupies the peer's scratch any more; returns whether a frame that waits may go now.
    pub(super) fn consumed(&mut self, book: BookId, number: u32) -> bool {
        let Some(Some(pushes)) = self.pushes.get_mut(usize::from(book)) else { return false };
        pushes.closed(number);
        !pushes.queue.is_empty()
    }

    /// Whether something of this slice waits that the window holds back, though the peer has nothing of this book: the slice whose
    /// turn it is has nothing to send yet. The peer is no reason for that.
    pub(super) fn holds_back(&self, book: BookId, number: u32) -> bool {
        let at = usize::from(book);
        self.pushes.get(at).and_then(Option::as_ref).is_some_and(|pushes| {
            let waits = pushes.slices.get(number as usize).is_some_and(|slice| slice.waiting > 0);
            waits && pushes.pushed_bytes == 0 && pushes.next(at, self.window_bytes).is_none()
        })
    }

    fn next(&self) -> Option<Next> {
        if !self.control.is_empty() {
            return Some(Next::Control);
        }
        // As urgent as a call: somebody stands still for it.
        let overdue = self.pushes.iter().enumerate().filter_map(|(book, pushes)| {
            let (_, order, _) = pushes.as_ref()?.overdue.peek()?;
            Some((0, order, Next::Overdue(book)))
        });
        let ready = self.ready.peek().map(|(place, order, _)| (place, order, Next::Ready));
        let pushes = self.pushes.iter().enumerate();
        let pushes = pushes.filter_map(|(book, pushes)| pushes.as_ref()?.next(book, self.window_bytes));
        let first =
            ready.into_iter().chain(overdue).chain(pushes).min_by_key(|(place, order, _)| (*place, *order));
        first.map(|(_, _, next)| next)
    }

    pub(super) fn has_frame(&self) -> bool {
        self.next().is_some()
    }

    pub(super) fn pop(&mut self) -> Option<Outgoing<C>> {
        let (pushes, (number, frame)) = match self.next()? {
            Next::Control => return self.control.pop_front(),
            Next::Overdue(book) => return self.pushes[book].as_mut()?.overdue.pop(),
            Next::Ready => return self.ready.pop(),
            Next::Push(book) => {
                let pushes = self.pushes[book].as_mut()?;
                let head = pushes.queue.pop()?;
                (pushes, head)
            }
            Next::Turn(book, turn) => {
                let pushes = self.pushes[book].as_mut()?;
                let place = pushes.slices[turn as usize].place as usize;
                let taken = pushes.queue.take(place, |(number, _)| *number == turn)?;
                (pushes, taken)
            }
        };
        pushes.departed(number, u64::from(frame.header.payload_bytes));
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Tensor;
    use crate::types::Dtype;
    use crate::wire::Kind;

    /// To a peer that owns four slices, by a window that holds back every slice but the one whose turn it is.
    fn outbox() -> Outbox<()> {
        let tensors = (0..8).map(|i| Tensor::new(format!("t{i}"), 0, Dtype::F32, 1024)).collect();
        let book = Book::new("model", vec!["layer".into()], tensors, 2, 4096, 1).unwrap();
        let mut outbox = Outbox::new(1);
        outbox.open_book(0, &book, Rank(1));
        outbox
    }

    fn push(outbox: &mut Outbox<()>, number: u32) {
        let header =
            Header { seq: 1, step: 1, slice: number, payload_bytes: 4096, ..Header::control(Kind::Push) };
        outbox.queue_push(0, u64::from(number), number, Outgoing { header, payload: None });
    }

    #[test]
    fn a_window_holds_back_what_waits_for_a_turn_while_the_peer_has_nothing() {
        let mut outbox = outbox();
        outbox.open_slice(0, 3, 1, 1);
        assert!(!outbox.holds_back(0, 1), "it has not begun");
        push(&mut outbox, 1);
        assert!(outbox.holds_back(0, 1) && !outbox.has_frame());
        assert!(!outbox.holds_back(0, 3), "its turn, and nothing of it waits");
        push(&mut outbox, 3);
        assert!(!outbox.holds_back(0, 1), "it comes next but one");
        assert_eq!(outbox.pop().map(|frame| frame.header.slice), Some(3));
        assert!(!outbox.has_frame() && !outbox.holds_back(0, 1), "the peer has something to answer");
        outbox.consumed(0, 3);
        assert!(!outbox.holds_back(0, 1) && outbox.has_frame(), "its own turn");
    }
}
