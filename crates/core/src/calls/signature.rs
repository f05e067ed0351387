//! What a rank believes a call to be, in 32 bits that travel with each of its messages, so that ranks which call different
//! things hear of it in words instead of waiting for each other.
//!
//! ```text
//!  bit 0      4       7        11          23          32
//!  | kind  | op    | dtype  | root      | length    |
//! ```
//! `root` is the algorithm of an allreduce, and from bit 14 on how many vectors of each rank it sums, less one. `length` is a
//! hash: two lengths may share it, and then the messages' own lengths tell.

use crate::types::Dtype;
use crate::way::Algorithm;
use crate::wire::Op;

/// What a call does. `root` is an index in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallKind {
    /// One message from one rank to another.
    Message,
    /// Nothing but to wait for all.
    Barrier,
    /// The root's tensor, to all.
    Broadcast {
        /// Who has it.
        root: u32,
    },
    /// The sum over all, to the root.
    Reduce {
        /// Who gets it.
        root: u32,
    },
    /// Everybody's block, to the root.
    Gather {
        /// Who gets them.
        root: u32,
    },
    /// The root's blocks, one to each.
    Scatter {
        /// Who has them.
        root: u32,
    },
    /// The sum over all, to all.
    Allreduce {
        /// By which steps; it decides the order of additions, too.
        algorithm: Algorithm,
    },
    /// Everybody's block, to all.
    AllGather,
    /// The sum over all of each block, to the rank of that number.
    ReduceScatter,
    /// From everybody to everybody a block of their own.
    AllToAll,
}

const NAMES: [&str; 10] = [
    "send or recv",
    "barrier",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "allreduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
];

impl CallKind {
    const ALLREDUCE: u32 = 6;

    fn code(self) -> u32 {
        match self {
            Self::Message => 0,
            Self::Barrier => 1,
            Self::Broadcast { .. } => 2,
            Self::Reduce { .. } => 3,
            Self::Gather { .. } => 4,
            Self::Scatter { .. } => 5,
            Self::Allreduce { .. } => Self::ALLREDUCE,
            Self::AllGather => 7,
            Self::ReduceScatter => 8,
            Self::AllToAll => 9,
        }
    }

    /// Its name in the programming interface.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self.code() as usize]
    }

    /// The rank that is not like the others.
    #[must_use]
    pub fn root(self) -> Option<u32> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// Whether numbers are computed, so that the operation and the dtype matter.
    #[must_use]
    pub fn computes(self) -> bool {
        matches!(self, Self::Reduce { .. } | Self::Allreduce { .. } | Self::ReduceScatter)
    }
}

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature(pub u32);

const LENGTH_BITS: u32 = 9;
const ALGORITHM_BITS: u32 = 3;

impl Signature {
    /// Of a call on `len_bytes` of `dtype`, of each of so many vectors. Operation and dtype count only where numbers are computed,
    /// vectors only in an allreduce.
    #[must_use]
    pub fn new(kind: CallKind, op: Op, dtype: Dtype, len_bytes: u64, vectors: u32) -> Self {
        let (op, dtype) = if kind.computes() { (op as u32, dtype_code(dtype)) } else { (0, 0) };
        // Fibonacci hashing: the high bits of the product depend on all bits of the length.
        let hash = len_bytes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - LENGTH_BITS);
        let root = match kind {
            CallKind::Allreduce { algorithm } => algorithm as u32 | (vectors - 1) << ALGORITHM_BITS,
            _ => kind.root().unwrap_or(0),
        };
        Self(kind.code() | op << 4 | dtype << 7 | root << 11 | (hash as u32) << 23)
    }
}

impl Signature {
    /// Whether both are the same but for the length.
    #[must_use]
    pub fn same_action(self, other: Self) -> bool {
        (self.0 ^ other.0) << LENGTH_BITS == 0
    }

    fn algorithm(self) -> Option<Algorithm> {
        let number = self.0 >> 11 & ((1 << ALGORITHM_BITS) - 1);
        let is_allreduce = self.0 & 15 == CallKind::ALLREDUCE;
        Algorithm::ALL.into_iter().find(|known| is_allreduce && *known as u32 == number)
    }

    /// Of each rank, in an allreduce.
    fn vectors(self) -> u32 {
        (self.0 >> 11 & 4095) >> ALGORITHM_BITS
    }

    /// What may be the reason that another rank's call is not this one, if it is not plain from the two.
    #[must_use]
    pub fn hint(self, other: Self) -> &'static str {
        match (self.algorithm(), other.algorithm()) {
            (Some(ours), Some(theirs)) if ours != theirs => {
                " (an algorithm that is not named is chosen by length, dtype, group and rates: name one, or make these alike)"
            }
            _ => "",
        }
    }
}

fn dtype_code(dtype: Dtype) -> u32 {
    dtype as u32 + 1
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, op, dtype) = (self.0 & 15, self.0 >> 4 & 7, self.0 >> 7 & 15);
        let root = self.0 >> 11 & 4095;
        f.write_str(NAMES.get(kind as usize).unwrap_or(&"an unknown call"))?;
        if (2..=5).contains(&kind) {
            write!(f, " (root {root} of the group)")?;
        }
        if let Some(algorithm) = self.algorithm() {
            write!(f, " by {}", algorithm.name())?;
            let vectors = self.vectors() + 1;
            if vectors > 1 {
                write!(f, " of {vectors} vectors per rank")?;
            }
        }
        if dtype > 0 {
            let dtypes = [
                Dtype::F32,
                Dtype::F64,
                Dtype::F16,
                Dtype::Bf16,
                Dtype::I64,
                Dtype::I32,
                Dtype::I16,
                Dtype::I8,
                Dtype::U8,
            ];
            let ops = [Op::Average, Op::Sum, Op::Copy, Op::Min, Op::Max];
            let op = ops.iter().find(|known| **known as u32 == op);
            let dtype = dtypes.iter().find(|known| dtype_code(**known) == dtype);
            match (op, dtype) {
                (Some(op), Some(dtype)) => write!(f, " ({op:?} of {dtype:?})")?,
                _ => write!(f, " (unknown operation or dtype)")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::shape::VECTORS_MAX;

    #[test]
    fn a_signature_tells_what_a_call_is() {
        let of = |kind, len| Signature::new(kind, Op::Average, Dtype::F64, len, 1);
        let reduce = of(CallKind::Reduce { root: 4095 }, 800);
        let text = reduce.to_string();
        assert!(text.starts_with("reduce (root 4095 of the group) (Average of F64)"), "{text}");
        assert_ne!(reduce, of(CallKind::Reduce { root: 4095 }, 808));
        assert_ne!(of(CallKind::AllGather, 8), of(CallKind::AllToAll, 8));
        let [ring, tree] = [Algorithm::Ring, Algorithm::Tree]
            .map(|algorithm| Signature::new(CallKind::Allreduce { algorithm }, Op::Sum, Dtype::F32, 8, 1));
        assert_eq!(ring.to_string(), "allreduce by ring (Sum of F32)");
        assert!(
            !ring.same_action(tree) && ring.hint(tree).contains("name one") && ring.hint(ring).is_empty()
        );
        let most = VECTORS_MAX as u32;
        let several =
            |n| Signature::new(CallKind::Allreduce { algorithm: Algorithm::Ring }, Op::Sum, Dtype::F32, 8, n);
        assert_eq!(
            several(most).to_string(),
            format!("allreduce by ring of {most} vectors per rank (Sum of F32)")
        );
        assert!(!several(2).same_action(several(3)) && several(most).same_action(several(most)));
        let gather = |op, dtype| Signature::new(CallKind::AllGather, op, dtype, 8, 1);
        assert_eq!(gather(Op::Sum, Dtype::F32), gather(Op::Average, Dtype::F64), "bytes are moved");
    }
}
