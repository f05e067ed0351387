//! Which ranks share a host: what they send each other touches no interface, and what they send others shares one.
//!
//! Omitted: hosts with several interfaces, of which each rank has its own. There each rank counts as a host.

/// By rank: its host. Where hosts are not known, or do not matter, each rank has its own, and the positions of a
/// [`super::Traffic`] are ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    of: Vec<usize>,
    /// By host: its ranks.
    ranks: Vec<u64>,
}

impl Hosts {
    /// Each rank has its own.
    #[must_use]
    pub fn apart(ranks: u32) -> Self {
        Self { of: (0..ranks as usize).collect(), ranks: vec![1; ranks as usize] }
    }

    /// Ranks with the same number share a host. Hosts are counted from that of rank 0, whatever their numbers.
    #[must_use]
    pub fn numbered(numbers: &[u32]) -> Self {
        let mut seen: Vec<u32> = Vec::new();
        let mut found = Self { of: Vec::with_capacity(numbers.len()), ranks: Vec::new() };
        for number in numbers {
            let host = seen.iter().position(|one| one == number).unwrap_or(seen.len());
            if host == seen.len() {
                seen.push(*number);
                found.ranks.push(0);
            }
            found.of.push(host);
            found.ranks[host] += 1;
        }
        found
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// That of a rank.
    #[must_use]
    pub fn of(&self, rank: usize) -> usize {
        self.of[rank]
    }

    /// How many ranks a host has.
    #[must_use]
    pub fn ranks_of(&self, host: usize) -> u64 {
        self.ranks[host]
    }

    /// Ranks of the host that has most.
    #[must_use]
    pub fn most_ranks(&self) -> u64 {
        self.ranks.iter().copied().max().unwrap_or(0)
    }

    /// By host: the sum of what its ranks have.
    #[must_use]
    pub fn sums(&self, by_rank: &[u64]) -> Vec<u64> {
        let mut sums = vec![0; self.count()];
        by_rank.iter().zip(&self.of).for_each(|(count, host)| sums[*host] += count);
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_counted_as_they_come() {
        let hosts = Hosts::numbered(&[7, 3, 7, 3, 3]);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| hosts.of(rank)), [0, 1, 0, 1, 1]);
        assert_eq!((hosts.count(), hosts.ranks_of(1), hosts.most_ranks()), (2, 3, 3));
        assert_eq!(hosts.sums(&[1, 10, 100, 1000, 10_000]), [101, 11_010]);
        assert_eq!(Hosts::numbered(&[5, 6, 9]), Hosts::apart(3));
        assert_eq!(Hosts::apart(0).most_ranks(), 0);
    }
}
