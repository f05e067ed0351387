//! A bounded priority queue: lowest place first, first in first out within a place.
//!
//! Places are small integers (a layer's place in the forward pass), so the queue is one ring per place and a bit set of
//! the places that are not empty. Rings keep their capacity: nothing is allocated in steady state.

use crate::bits::Bits;
use std::collections::VecDeque;

/// The queue. `T` is what waits in it.
#[derive(Debug)]
pub struct PriorityQueue<T> {
    rings: Vec<VecDeque<(u64, T)>>,
    occupied: Bits,
    len: usize,
}

impl<T> Default for PriorityQueue<T> {
    fn default() -> Self {
        Self { rings: Vec::new(), occupied: Bits::new(0), len: 0 }
    }
}

impl<T> PriorityQueue<T> {
    /// Makes places `0..places` usable.
    pub fn grow(&mut self, places: usize) {
        if places > self.rings.len() {
            self.rings.resize_with(places, VecDeque::new);
            self.occupied.grow(places);
        }
    }

    /// Adds an item. `order` must increase from call to call; it decides between queues at equal place.
    /// Returns whether the item overtakes one that was there before: a preemption.
    pub fn push(&mut self, place: usize, order: u64, item: T) -> bool {
        let overtakes = self.occupied.last().is_some_and(|last| last > place);
        self.rings[place].push_back((order, item));
        self.occupied.insert(place);
        self.len += 1;
        overtakes
    }

    /// Place, order and item of the next one.
    #[must_use]
    pub fn peek(&self) -> Option<(usize, u64, &T)> {
        let place = self.occupied.first()?;
        self.rings[place].front().map(|(order, item)| (place, *order, item))
    }

    /// Takes the next one.
    pub fn pop(&mut self) -> Option<T> {
        let place = self.occupied.first()?;
        let (_, item) = self.rings[place].pop_front()?;
        self.removed(place);
        Some(item)
    }

    /// Takes the first item of `place` that `wanted` accepts.
    pub fn take(&mut self, place: usize, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.rings[place].iter().position(|(_, item)| wanted(item))?;
        let (_, item) = self.rings[place].remove(at)?;
        self.removed(place);
        Some(item)
    }

    /// Moves what `wanted` accepts to another queue that has its places; it keeps its place and its order. What is pushed there
    /// later must have a later order.
    pub fn pass_on(&mut self, to: &mut Self, wanted: impl Fn(&T) -> bool) {
        if self.is_empty() {
            return;
        }
        for (place, ring) in self.rings.iter_mut().enumerate() {
            for _ in 0..ring.len() {
                let Some((order, item)) = ring.pop_front() else { break };
                if wanted(&item) {
                    to.push(place, order, item);
                    self.len -= 1;
                } else {
                    ring.push_back((order, item));
                }
            }
            if ring.is_empty() {
                self.occupied.remove(place);
            }
        }
    }

    fn removed(&mut self, place: usize) {
        self.len -= 1;
        if self.rings[place].is_empty() {
            self.occupied.remove(place);
        }
    }

    /// Items waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops everything that waits.
    pub fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lowest_place_first_then_first_in(operations in proptest::collection::vec(proptest::option::of(0usize..20), 0..200)) {
            let mut queue = PriorityQueue::default();
            queue.grow(20);
            let mut model: Vec<(usize, u64)> = Vec::new();
            for (order, operation) in operations.into_iter().enumerate() {
                match operation {
                    Some(place) => {
                        let overtakes = queue.push(place, order as u64, order as u64);
                        prop_assert_eq!(overtakes, model.iter().any(|&(p, _)| p > place));
                        model.push((place, order as u64));
                    }
                    None => {
                        let want = model.iter().min().copied();
                        prop_assert_eq!(queue.peek().map(|(p, o, _)| (p, o)), want);
                        prop_assert_eq!(queue.pop(), want.map(|(_, o)| o));
                        model.retain(|&x| Some(x) != want);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }

    #[test]
    fn what_is_passed_on_keeps_its_place_and_its_order() {
        let [mut from, mut to] = [PriorityQueue::default(), PriorityQueue::default()];
        from.grow(3);
        to.grow(3);
        to.push(2, 0, 'x');
        for (order, (place, item)) in [(2, 'a'), (0, 'b'), (2, 'c'), (2, 'd')].into_iter().enumerate() {
            from.push(place, 1 + order as u64, item);
        }
        from.pass_on(&mut to, |&item| item != 'c');
        assert_eq!((from.len(), from.peek()), (1, Some((2, 3, &'c'))));
        assert_eq!((from.pop(), from.pop()), (Some('c'), None));
        assert_eq!([(); 5].map(|()| to.pop()), [Some('b'), Some('x'), Some('a'), Some('d'), None]);
    }

    #[test]
    fn take_finds_an_item_inside_a_place() {
        let mut queue = PriorityQueue::default();
        queue.grow(2);
        for (order, item) in ["a", "b", "c"].into_iter().enumerate() {
            queue.push(1, order as u64, item);
        }
        assert_eq!(queue.take(1, |&x| x == "b"), Some("b"));
        assert_eq!(queue.take(1, |&x| x == "b"), None);
        assert_eq!((queue.pop(), queue.pop(), queue.is_empty()), (Some("a"), Some("c"), true));
    }
}
