//! Virtual time: what happens when, ties in the order of planning.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

#[derive(Debug)]
struct Entry<E> {
    at_ns: u64,
    order: u64,
    what: E,
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.order).cmp(&(other.at_ns, other.order))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Entry<E> {}

/// What is going to happen. `E` is an event.
#[derive(Debug)]
pub struct Agenda<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    now_ns: u64,
    order: u64,
}

impl<E> Default for Agenda<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), now_ns: 0, order: 0 }
    }
}

impl<E> Agenda<E> {
    /// The virtual time.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Plans `what` for `at_ns`, or for now if that is past.
    pub fn at(&mut self, at_ns: u64, what: E) {
        self.order += 1;
        self.heap.push(Reverse(Entry { at_ns: at_ns.max(self.now_ns), order: self.order, what }));
    }

    /// Plans `what` for `delay_ns` from now.
    pub fn after(&mut self, delay_ns: u64, what: E) {
        self.at(self.now_ns + delay_ns, what);
    }

    /// Goes on to the next event.
    pub fn advance(&mut self) -> Option<E> {
        let Reverse(entry) = self.heap.pop()?;
        self.now_ns = entry.at_ns;
        Some(entry.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_time_then_in_the_order_of_planning() {
        let mut agenda = Agenda::default();
        for (at_ns, what) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            agenda.at(at_ns, what);
        }
        let mut seen = String::new();
        while let Some(what) = agenda.advance() {
            seen.push(what);
            if what == 'b' {
                agenda.at(0, '!');
            }
        }
        assert_eq!((seen.as_str(), agenda.now_ns()), ("ab!cd", 5));
    }
}
