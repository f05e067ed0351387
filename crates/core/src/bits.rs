//! A set of small integers with "smallest member" and "largest member" queries; never allocates after sizing.

/// A fixed-capacity bit set.
#[derive(Debug, Clone, Default)]
pub struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// An empty set that can hold `0..capacity`.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { words: vec![0; capacity.div_ceil(64)] }
    }

    /// Makes room for `0..capacity`, keeping the members.
    pub fn grow(&mut self, capacity: usize) {
        let words = capacity.div_ceil(64);
        if words > self.words.len() {
            self.words.resize(words, 0);
        }
    }

    /// Adds `index`.
    pub fn insert(&mut self, index: usize) {
        self.words[index / 64] |= 1 << (index % 64);
    }

    /// Removes `index`.
    pub fn remove(&mut self, index: usize) {
        self.words[index / 64] &= !(1 << (index % 64));
    }

    /// Whether `index` is a member.
    #[must_use]
    pub fn contains(&self, index: usize) -> bool {
        self.words[index / 64] & (1 << (index % 64)) != 0
    }

    /// The smallest member.
    #[must_use]
    pub fn first(&self) -> Option<usize> {
        let word = self.words.iter().position(|&w| w != 0)?;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    /// The largest member.
    #[must_use]
    pub fn last(&self) -> Option<usize> {
        let word = self.words.iter().rposition(|&w| w != 0)?;
        Some(word * 64 + 63 - self.words[word].leading_zeros() as usize)
    }

    /// Whether the set has no member.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_a_set(operations in proptest::collection::vec((any::<bool>(), 0usize..300), 0..200)) {
            let mut bits = Bits::new(300);
            let mut set = BTreeSet::new();
            for (add, index) in operations {
                if add { bits.insert(index); set.insert(index); } else { bits.remove(index); set.remove(&index); }
                prop_assert_eq!(bits.first(), set.first().copied());
                prop_assert_eq!(bits.last(), set.last().copied());
                prop_assert_eq!(bits.is_empty(), set.is_empty());
                prop_assert_eq!(bits.contains(index), set.contains(&index));
            }
        }
    }
}
