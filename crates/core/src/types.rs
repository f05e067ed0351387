//! Numbers and types that all of the protocol speaks of. On this file everything else stands, and it on nothing.

/// A process's number, `0..ranks`: workers first, then servers apart, if there are some. Without these every worker also holds one
/// shard of the store, under the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// As an index into per-rank tables.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a book, in the order in which books were opened.
pub type BookId = u16;
/// The number of a layer in its book, in registration order.
pub type LayerId = u32;
/// The number of a tensor in its book.
pub type TensorId = u32;
/// The number of a slice in its book.
pub type SliceId = u32;
/// The number of a group for calls; 0 is all workers.
pub type GroupId = u16;
/// Counts the submissions of one tensor: a round of a slice is named by (book, slice, seq).
pub type Seq = u32;
/// The user's iteration: for reports and messages, and to send first what peers need for an older one. Rounds are told apart
/// by [`Seq`].
pub type Step = u32;

/// Element types that can be summed, and `Bytes`, which can only be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 16-bit integer.
    I16,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Anything else; one element is one byte.
    Bytes,
}

impl Dtype {
    const ALL: [Self; 10] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U8,
        Self::Bytes,
    ];

    /// Bytes per element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bytes => 1,
        }
    }

    /// Its name, as it is parsed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::Bytes => "bytes",
        }
    }

    /// Whether it is an integer type: sums wrap, and there is no average.
    #[must_use]
    pub fn is_integer(self) -> bool {
        matches!(self, Self::I64 | Self::I32 | Self::I16 | Self::I8 | Self::U8)
    }
}

impl std::str::FromStr for Dtype {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        Unknown::unless_among("dtype", name, Self::ALL, Self::name)
    }
}

/// A name that is none of those known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}: expected one of {}", known.join(", "))]
pub struct Unknown {
    what: &'static str,
    name: String,
    known: Vec<&'static str>,
}

impl Unknown {
    /// The one of `all` whose name it is.
    ///
    /// # Errors
    /// This, with the names of all, if there is none.
    pub fn unless_among<T: Copy>(
        what: &'static str,
        name: &str,
        all: impl IntoIterator<Item = T>,
        name_of: impl Fn(T) -> &'static str,
    ) -> Result<T, Self> {
        let mut known = Vec::new();
        for one in all {
            if name_of(one) == name {
                return Ok(one);
            }
            known.push(name_of(one));
        }
        Err(Self { what, name: name.into(), known })
    }
}
