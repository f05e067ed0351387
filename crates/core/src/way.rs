//! How a layer travels, in words that everything else shares: what of it, by which route, as which type.

use crate::types::{Dtype, Unknown};

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

impl std::str::FromStr for Algorithm {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        Unknown::unless_among("algorithm", name, Self::ALL, Self::name)
    }
}

/// What becomes of contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// They become one result, by this algorithm.
    Sum(Algorithm),
    /// Every rank's bytes, of any length up to the tensor's, to every other rank; nothing is summed.
    Gather,
    /// Every rank's bytes to the layer's owner, which answers with the whole. Of layers alone: in a book that is two gathers, one
    /// for the owner alone, and one in which only the owner has anything.
    Owner,
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
            Self::Owner => "owner",
        }
    }

    /// The algorithm, if it is a collective among all ranks.
    #[must_use]
    pub fn collective(self) -> Option<Algorithm> {
        match self {
            Self::Sum(algorithm) if self != Self::STORE => Some(algorithm),
            _ => None,
        }
    }
}

impl std::str::FromStr for Route {
    type Err = Unknown;

    /// Those that a tensor of a book can have.
    fn from_str(name: &str) -> Result<Self, Unknown> {
        let all = Algorithm::ALL.map(Self::Sum).into_iter().chain([Self::Gather]);
        Unknown::unless_among("route", name, all, Self::name)
    }
}

/// Kinds of layers, by what their gradients are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// A product of two matrices.
    Linear,
    /// Rows that a step looked up.
    Embedding,
    /// Anything else: indecomposable.
    Other,
}

impl LayerKind {
    /// All.
    pub const ALL: [Self; 3] = [Self::Linear, Self::Embedding, Self::Other];

    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Embedding => "embedding",
            Self::Other => "other",
        }
    }
}

impl std::str::FromStr for LayerKind {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        Unknown::unless_among("kind", name, Self::ALL, Self::name)
    }
}

/// What of a layer's gradient travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// All of it.
    Whole,
    /// Sufficient factors of a linear layer.
    Factors,
    /// (index, row) pairs of an embedding.
    Pairs,
    /// A bit for each weight of a linear layer; the rest is kept.
    OneBit,
    /// The largest numbers, with their indices (Deep Gradient Compression); the rest is kept.
    Dgc,
}

impl Payload {
    /// The kind of layer that has it; none: every kind.
    #[must_use]
    pub fn kind(self) -> Option<LayerKind> {
        match self {
            Self::Factors | Self::OneBit => Some(LayerKind::Linear),
            Self::Pairs => Some(LayerKind::Embedding),
            Self::Whole | Self::Dgc => None,
        }
    }
}

/// How a layer is synchronised: what travels, where to, and as which type. The ways that there are have a name each, which is
/// what users call a scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Way {
    /// What travels.
    pub payload: Payload,
    /// What becomes of it.
    pub route: Route,
    /// The half type to which fp32 is rounded on the wire; none if elements travel as they are.
    pub wire: Option<Dtype>,
}

impl Way {
    /// The sharded store.
    pub const STORE: Self = Self::by(Payload::Whole, Route::STORE);
    /// Factors, from every rank to every other.
    pub const FACTORS: Self = Self::by(Payload::Factors, Route::Gather);
    /// Pairs, from every rank to every other.
    pub const PAIRS: Self = Self::by(Payload::Pairs, Route::Gather);
    /// Project Adam's: factors to the layer's owner, the full matrix back. For comparison; chosen only if asked for.
    pub const ADAM: Self = Self::by(Payload::Factors, Route::Owner);
    /// The store with fp32 gradients rounded to bf16 on the wire.
    pub const BF16: Self = Self::STORE.rounded_to(Dtype::Bf16);
    /// The same with IEEE half precision.
    pub const FP16: Self = Self::STORE.rounded_to(Dtype::F16);
    /// 1-bit quantisation.
    pub const ONE_BIT: Self = Self::by(Payload::OneBit, Route::Gather);
    /// Deep Gradient Compression.
    pub const DGC: Self = Self::by(Payload::Dgc, Route::Gather);
    /// All, in the order in which ties are decided.
    pub const ALL: [Self; 12] = [
        Self::STORE,
        Self::sum(Algorithm::Central),
        Self::sum(Algorithm::Tree),
        Self::sum(Algorithm::Ring),
        Self::sum(Algorithm::Butterfly),
        Self::FACTORS,
        Self::PAIRS,
        Self::ADAM,
        Self::BF16,
        Self::FP16,
        Self::ONE_BIT,
        Self::DGC,
    ];

    /// What may be chosen while training, besides what whole gradients travel by, which the book fixes.
    pub const WHILE_TRAINING: [Self; 2] = [Self::FACTORS, Self::PAIRS];

    const fn by(payload: Payload, route: Route) -> Self {
        Self { payload, route, wire: None }
    }

    /// The whole gradient, summed by this algorithm.
    #[must_use]
    pub const fn sum(algorithm: Algorithm) -> Self {
        Self::by(Payload::Whole, Route::Sum(algorithm))
    }

    /// The same, rounded on the wire.
    #[must_use]
    pub const fn rounded_to(self, wire: Dtype) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// Its word in the glossary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match (self.payload, self.route, self.wire) {
            (Payload::Whole, _, Some(Dtype::F16)) => "fp16",
            (Payload::Whole, _, Some(wire)) => wire.name(),
            (Payload::Whole, route, None) => route.name(),
            (Payload::Factors, Route::Owner, _) => "adam",
            (Payload::Factors, ..) => "factors",
            (Payload::Pairs, ..) => "pairs",
            (Payload::OneBit, ..) => "1bit",
            (Payload::Dgc, ..) => "dgc",
        }
    }

    /// Whether all of the gradient travels, as the book says.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.payload == Payload::Whole
    }

    /// Whether what travels is rows, of activations or of the gradient itself, from which every gradient is rebuilt exactly.
    #[must_use]
    pub fn sends_rows(self) -> bool {
        matches!(self.payload, Payload::Factors | Payload::Pairs)
    }

    /// Whether a rank leaves out a part of its gradient, which it keeps for later.
    #[must_use]
    pub fn shortens(self) -> bool {
        matches!(self.payload, Payload::OneBit | Payload::Dgc)
    }

    /// Whether results differ from the exact ones by more than the rounding of fp32 sums. Such a way is for users to ask for.
    #[must_use]
    pub fn is_lossy(self) -> bool {
        self.wire.is_some() || self.shortens()
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Way {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        Unknown::unless_among("scheme", name, Self::ALL, Self::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_and_every_kind_of_layer_has_a_name_of_its_own() {
        for way in Way::ALL {
            assert_eq!(way.name().parse(), Ok(way));
        }
        for kind in LayerKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!(
            Way::ALL.map(Way::name).join(" "),
            "store central tree ring butterfly factors pairs adam bf16 fp16 1bit dgc"
        );
        let lossy: Vec<&str> = Way::ALL.iter().filter(|way| way.is_lossy()).map(|way| way.name()).collect();
        assert_eq!(lossy, ["bf16", "fp16", "1bit", "dgc"]);
    }
}
