//! What has come of a round of a gather, by member.

use super::context::Site;
use crate::members::Members;
use crate::memory::Memory;
use crate::types::{Rank, Seq, Step};
use crate::wire::Header;

/// One rank's contribution, as far as it has come.
#[derive(Debug)]
pub(super) enum OfMember<C> {
    /// So many bytes of all of it.
    Pieces {
        /// Its step.
        step: Step,
        /// All.
        total_bytes: u32,
        /// That are here.
        filled_bytes: u32,
        /// The payloads, in order, and their lengths.
        chunks: Vec<(u32, C)>,
    },
    /// The head of its group says that it takes no part.
    Absent,
}

/// A round that some rank has begun and that is not complete here.
#[derive(Debug)]
pub(super) struct OfRound<C> {
    pub(super) seq: Seq,
    /// That of whoever began it.
    pub(super) step: Step,
    /// By member; this one's own is here if it is the head of a group.
    contributions: Vec<Option<OfMember<C>>>,
    /// Of the head of a group: those of others that have said that their groups are in, and in which epoch.
    pub(super) told: Vec<(Rank, u32)>,
    /// Of the head of a group: whether others have what its members gave.
    pub(super) passed_on: bool,
    /// Whether its members have what the others gave.
    pub(super) served: bool,
}

impl<C> OfMember<C> {
    fn is_in(&self) -> bool {
        match self {
            Self::Pieces { total_bytes, filled_bytes, .. } => filled_bytes == total_bytes,
            Self::Absent => true,
        }
    }
}

impl<C> OfRound<C> {
    pub(super) fn begun_by(header: &Header, members: &Members) -> Self {
        let contributions = members.iter().map(|_| None).collect();
        Self {
            seq: header.seq,
            step: header.step,
            contributions,
            told: Vec::new(),
            passed_on: false,
            served: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.contributions.iter().all(Option::is_none)
    }

    /// Forgets the contributions of those for whom this says so.
    pub(super) fn forget(&mut self, which: impl Iterator<Item = bool>) {
        let those = self.contributions.iter_mut().zip(which).filter(|(_, which)| *which);
        those.for_each(|(contribution, _)| *contribution = None);
    }

    pub(super) fn of(&self, index: usize) -> Option<&OfMember<C>> {
        self.contributions[index].as_ref()
    }

    /// Whether anything has come from there.
    pub(super) fn has_begun(&self, index: usize) -> bool {
        self.contributions[index].is_some()
    }

    /// Whether everything has.
    pub(super) fn is_in(&self, index: usize) -> bool {
        self.of(index).is_some_and(OfMember::is_in)
    }

    /// Whether a frame is the next piece from there, or the first of a round that is not open.
    pub(super) fn fits(round: Option<&Self>, index: usize, header: &Header, site: &Site<'_>) -> bool {
        let (total_bytes, len_bytes) = (header.argument, header.payload_bytes);
        let (known_bytes, filled_bytes) = match round.and_then(|round| round.of(index)) {
            Some(contribution) if contribution.is_in() => return false,
            Some(OfMember::Pieces { total_bytes, filled_bytes, .. }) => (*total_bytes, *filled_bytes),
            _ => (total_bytes, 0),
        };
        known_bytes == total_bytes
            && u64::from(total_bytes) <= site.tensor_bytes
            && len_bytes == site.slice.len_bytes.min(total_bytes - filled_bytes)
    }

    /// Takes a piece.
    pub(super) fn add(&mut self, index: usize, header: &Header, payload: Option<C>) {
        let empty = || OfMember::Pieces {
            step: header.step,
            total_bytes: header.argument,
            filled_bytes: 0,
            chunks: Vec::with_capacity(header.argument.div_ceil(header.payload_bytes.max(1)) as usize),
        };
        if let OfMember::Pieces { filled_bytes, chunks, .. } =
            self.contributions[index].get_or_insert_with(empty)
        {
            chunks.extend(payload.map(|payload| (header.payload_bytes, payload)));
            *filled_bytes += header.payload_bytes;
        }
    }

    /// This rank's own.
    pub(super) fn set_whole(&mut self, index: usize, step: Step, total_bytes: u32, chunks: Vec<(u32, C)>) {
        let whole = OfMember::Pieces { step, total_bytes, filled_bytes: total_bytes, chunks };
        self.contributions[index] = Some(whole);
    }

    pub(super) fn set_absent(&mut self, index: usize) {
        self.contributions[index] = Some(OfMember::Absent);
    }

    /// Of which steps they are.
    pub(super) fn steps(&self, members: &Members) -> impl Iterator<Item = (Rank, Step)> + Clone {
        members.iter().zip(&self.contributions).filter_map(|(rank, contribution)| match contribution {
            Some(OfMember::Pieces { step, .. }) => Some((rank, *step)),
            _ => None,
        })
    }

    /// By member the payloads, or that there was a contribution if they are for another rank; none of this rank.
    pub(super) fn into_parts(self, me: Option<usize>, for_me: bool) -> Vec<Option<Vec<C>>> {
        let chunks = |(index, contribution)| match contribution {
            Some(OfMember::Pieces { chunks, .. }) if Some(index) != me => {
                Some(chunks.into_iter().filter(|_| for_me).map(|(_, chunk)| chunk).collect())
            }
            _ => None,
        };
        self.contributions.into_iter().enumerate().map(chunks).collect()
    }
}

/// The first bytes of a memory in pieces, at least one, and how long each is.
pub(super) fn cut<M: Memory>(
    memory: &M::Chunk,
    total_bytes: u32,
    piece_bytes: u32,
    of: &M,
) -> Vec<(u32, M::Chunk)> {
    let count = total_bytes.div_ceil(piece_bytes.max(1)).max(1);
    let piece = |number| {
        let start = number * piece_bytes;
        let len_bytes = piece_bytes.min(total_bytes - start);
        (len_bytes, of.part(memory, start as usize, len_bytes as usize))
    };
    (0..count).map(piece).collect()
}
