//! How a layer travels, in words that everything else shares: which algorithm makes the sum, which route contributions take.

use crate::types::Unknown;

/// An exact allreduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// The sharded store: the owner of each slice sums it and answers all; owners take turns.
    Store,
    /// The store with one shard: one rank sums everything.
    Central,
    /// Up a binomial tree and down again; each slice's owner is its root.
    Tree,
    /// Around a ring, twice.
    Ring,
    /// Recursive halving and doubling.
    Butterfly,
}

impl Algorithm {
    /// All, the store first.
    pub const ALL: [Self; 5] = [Self::Store, Self::Central, Self::Tree, Self::Ring, Self::Butterfly];

    /// Those that are collectives among all ranks: all but the store.
    pub const COLLECTIVES: [Self; 4] = [Self::Central, Self::Tree, Self::Ring, Self::Butterfly];

    /// Its word in the glossary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Central => "central",
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::Butterfly => "butterfly",
        }
    }
}

/// What becomes of the contributions to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// They become one result, by this algorithm.
    Sum(Algorithm),
    /// Every rank's bytes, of any length up to the tensor's, to every other rank; nothing is summed.
    Gather,
}

impl Route {
    /// The sharded store.
    pub const STORE: Self = Self::Sum(Algorithm::Store);

    /// Its word in the glossary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum(algorithm) => algorithm.name(),
            Self::Gather => "gather",
        }
    }

    /// The algorithm, if it is a collective among all ranks.
    #[must_use]
    pub fn collective(self) -> Option<Algorithm> {
        match self {
            Self::Sum(algorithm) if self != Self::STORE => Some(algorithm),
            Self::Sum(_) | Self::Gather => None,
        }
    }
}

impl std::str::FromStr for Route {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        let all = Algorithm::ALL.map(Self::Sum).into_iter().chain([Self::Gather]);
        Unknown::unless_among("scheme", name, all, Self::name)
    }
}
