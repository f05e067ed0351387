//! Why a scheme was chosen, for tests and for people.

use crate::types::Dtype;
use crate::way::Way;
use std::fmt;

/// The part of the present way's time that another must save before it takes over.
pub const MARGIN: f64 = 0.1;

/// Why a scheme was chosen. `Display` says it to the user.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// Nothing is sent at all.
    OneWorker,
    /// The layer's gradient can only be sent as it is, and nothing beats the store at that.
    Dense,
    /// Algorithm 1 weighs factors against the store, and of this layer there are none: it has rows.
    NotWeighed,
    /// How many rows the layer has is not known before its first step.
    RowsUnknown,
    /// Algorithm 1: factors are at most as many numbers as the store's.
    FewerNumbers {
        /// 2K(P1-1)(M+N).
        factors: f64,
        /// 2MN(P1+P2-2)/P2.
        store: f64,
    },
    /// Algorithm 1: factors are more numbers.
    MoreNumbers {
        /// 2K(P1-1)(M+N).
        factors: f64,
        /// 2MN(P1+P2-2)/P2.
        store: f64,
    },
    /// Faster than the store.
    Faster {
        /// This scheme's seconds.
        seconds: f64,
        /// The store's seconds.
        store_s: f64,
    },
    /// The store is the fastest.
    StoreFastest {
        /// The next best.
        other: Way,
        /// Its seconds.
        other_s: f64,
        /// The store's seconds.
        store_s: f64,
    },
    /// Another would be faster, but by less than [`MARGIN`].
    Kept {
        /// The faster one.
        other: Way,
        /// Its seconds.
        other_s: f64,
        /// The present one's seconds.
        seconds: f64,
    },
    /// The user has asked for it; or in words, why it is not chosen all the same: the default, or the only one possible.
    Given(String),
    /// The user has asked for this type on the wire.
    Rounded(Dtype),
    /// The user has asked for a way that sends less; what it leaves out, in words.
    Shortened(String),
    /// Decided before training, as the book is; why the store would be best now.
    KeptCollective(Box<Reason>),
    /// The gradient must travel whole, and why.
    StoreOnly(String),
    /// This rank would send the gradient whole, however few its rows.
    WholeOn(u32),
    /// The ranks that went on while this one was away use it; what this one would choose waits for a measurement.
    Adopted,
}

impl Reason {
    /// One word, for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::OneWorker => "one-worker",
            Self::Dense => "dense",
            Self::NotWeighed => "not-weighed",
            Self::RowsUnknown => "rows-unknown",
            Self::FewerNumbers { .. } => "fewer-numbers",
            Self::MoreNumbers { .. } => "more-numbers",
            Self::Faster { .. } => "faster",
            Self::StoreFastest { .. } => "store-fastest",
            Self::Kept { .. } | Self::KeptCollective(_) => "kept",
            Self::Given(_) | Self::Rounded(_) => "given",
            Self::Shortened(_) => "lossy",
            Self::StoreOnly(_) | Self::WholeOn(_) => "store-only",
            Self::Adopted => "adopted",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneWorker => f.write_str("one worker: nothing is sent"),
            Self::Dense => f.write_str("its gradient has no smaller form"),
            Self::NotWeighed => f.write_str("Poseidon's Algorithm 1 weighs factors alone, and it has pairs"),
            Self::RowsUnknown => {
                f.write_str("no rows of it were seen: it has had no step, or its forward pass is compiled")
            }
            Self::FewerNumbers { factors, store } => {
                write!(f, "{} numbers instead of {} through the store", Numbers(*factors), Numbers(*store))
            }
            Self::MoreNumbers { factors, store } => {
                write!(f, "{} numbers; factors would be {}", Numbers(*store), Numbers(*factors))
            }
            Self::Faster { seconds, store_s } => {
                write!(f, "{} instead of {} through the store", Seconds(*seconds), Seconds(*store_s))
            }
            Self::StoreFastest { other, other_s, store_s } => {
                write!(f, "{}; {other} would take {}", Seconds(*store_s), Seconds(*other_s))
            }
            Self::Kept { other, other_s, seconds } => {
                write!(
                    f,
                    "kept at {}: {other} would take {}, and a change must gain {} %",
                    Seconds(*seconds),
                    Seconds(*other_s),
                    MARGIN * 100.0
                )
            }
            Self::Given(why) if why.is_empty() => f.write_str("as given"),
            Self::Given(why) => write!(f, "not chosen: {why}"),
            Self::Rounded(wire) => {
                let name = Way::STORE.rounded_to(*wire).name();
                write!(f, "LOSSY, as given: rounded to {name} on the wire, summed in fp32")
            }
            Self::Shortened(what) => write!(f, "LOSSY, as given: {what}"),
            Self::KeptCollective(now) => write!(f, "as chosen before training; now through the store {now}"),
            Self::StoreOnly(why) => f.write_str(why),
            Self::WholeOn(rank) => write!(f, "rank {rank} would send its gradient whole"),
            Self::Adopted => f.write_str("as on the ranks that went on"),
        }
    }
}

struct Numbers(f64);

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >= 1e6 { write!(f, "{:.1} M", self.0 / 1e6) } else { write!(f, "{:.1} k", self.0 / 1e3) }
    }
}

pub(super) struct Seconds(pub(super) f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            s if s >= 1.0 => write!(f, "{s:.2} s"),
            s if s >= 1e-3 => write!(f, "{:.1} ms", s * 1e3),
            s => write!(f, "{:.0} us", s * 1e6),
        }
    }
}
