//! What one rank does in a call, as data: rounds of messages, and what is computed between them.
//!
//! A call cuts its tensor into pieces, each with a plan of its own, so that one piece is on the wire while another is
//! summed. Sums are in the order of the group's ranks, whichever plan is taken, so a result does not depend on lengths;
//! half types accumulate in single precision ([`crate::reduce`]).
//!
//! Cost for p ranks, latency a, S bytes and B bytes per second of each link, without the time to sum; received by the
//! busiest rank:
//!
//! | action | plan | rounds | bytes |
//! |---|---|---|---|
//! | barrier | dissemination | ⌈log2 p⌉ | 0 |
//! | broadcast | binomial tree, up to [`CHAIN_BYTES_MIN`] | ⌈log2 p⌉ | S (the root sends ⌈log2 p⌉ S) |
//! | | chain of pieces | p - 1 for the first piece | S |
//! | allreduce | everybody to everybody, up to [`DIRECT_BYTES_MAX`] together | 1 | (p-1) S |
//! | | reduce-scatter, all-gather | 2 | 2 (p-1)/p S |
//! | reduce | to the root, up to [`DIRECT_BYTES_MAX`] together | 1 | (p-1) S |
//! | | reduce-scatter, gather | 2 | 2 (p-1)/p S |
//! | reduce_scatter | everybody to everybody | 1 | (p-1)/p S, S being all blocks together |
//! | gather, scatter, all_gather, all_to_all | everybody to everybody, or to or from the root | 1 | (p-1)/p S, likewise |
//!
//! Why memory may be overwritten while a message from it may still be waiting to be written to a socket: it never is. A
//! plan writes to what it has sent only with what follows from the arrival of that very message (the sum of a block comes
//! back from the rank that had to have this rank's part of it), or sends a copy.

use super::signature::Action;
use std::ops::Range;

/// All ranks' tensors together up to this size are exchanged in one round.
pub const DIRECT_BYTES_MAX: u64 = 128 << 10;
/// From this size on a broadcast goes from rank to rank.
pub const CHAIN_BYTES_MIN: u64 = 256 << 10;
/// Blocks of a sum begin at multiples of this many elements.
const ALIGN_ELEMS: usize = 16;

/// Memory that a plan speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Buffer {
    /// A block of what the caller gave.
    Input(u32),
    /// A block of where the result goes.
    Output(u32),
    /// A buffer of the plan.
    Scratch(u32),
}

/// Bytes of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bytes {
    /// The buffer.
    pub of: Buffer,
    /// Which bytes.
    pub range: Range<usize>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank, as an index in the group.
    pub peer: u32,
    /// Tells messages of one piece between the same two ranks apart.
    pub stage: u32,
    /// From or to where.
    pub bytes: Bytes,
}

/// What is computed once a round's messages are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// Byte for byte.
    Copy(Bytes, Bytes),
    /// The call's operation over the inputs, in this order.
    Reduce(Vec<Bytes>, Bytes),
}

/// Messages that need not wait for each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    /// To be sent.
    pub sends: Vec<Transfer>,
    /// To be received; the round ends when all are there.
    pub receives: Vec<Transfer>,
    /// To be done then, in order.
    pub then: Vec<Local>,
}

/// One piece of one rank's part in a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Lengths of scratch buffers in bytes.
    pub scratch: Vec<usize>,
    /// One after the other.
    pub rounds: Vec<Round>,
}

/// A call as one rank sees it, in lengths alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// What is done.
    pub action: Action,
    /// Ranks of the group.
    pub ranks: u32,
    /// This rank's index in it.
    pub me: u32,
    /// Bytes of an element.
    pub elem_bytes: usize,
    /// Lengths of the blocks that are given.
    pub inputs: Vec<u64>,
    /// Lengths of the blocks that are to be filled.
    pub outputs: Vec<u64>,
}

impl Shape {
    /// Bytes that the call cuts into pieces: of the whole tensor, or of the largest block.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.inputs.iter().chain(&self.outputs).copied().max().unwrap_or(0)
    }

    /// Whether everything goes in one round of short messages.
    fn is_direct(&self) -> bool {
        self.len_bytes() * u64::from(self.ranks) <= DIRECT_BYTES_MAX
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        // Each rank begins with another one, so that not all send to the same at once.
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// The plan for the bytes `piece` of the tensor, or of each block.
    #[must_use]
    pub fn plan(&self, piece: &Range<u64>) -> Plan {
        let plan = match self.action {
            // The caller knows the peer: see `super::run`.
            Action::Message => Plan::default(),
            Action::Barrier => self.barrier(),
            Action::Broadcast { root } => self.broadcast(root, piece),
            Action::Reduce { root } if self.is_direct() => self.reduce_directly(root, piece),
            Action::Reduce { root } => self.reduce_by_blocks(root, piece),
            Action::Gather { root } => self.gather(root, piece),
            Action::Scatter { root } => self.scatter(root, piece),
            Action::Allreduce if self.is_direct() => self.allreduce_directly(piece),
            Action::Allreduce => self.allreduce_by_blocks(piece),
            Action::AllGather => self.all_gather(piece),
            Action::ReduceScatter => self.reduce_scatter(piece),
            Action::AllToAll => self.all_to_all(piece),
        };
        debug_assert!(plan.rounds.iter().all(|round| {
            round.sends.iter().chain(&round.receives).all(|transfer| transfer.peer != self.me)
        }));
        plan
    }

    /// The part of a block that lies in `piece`; the first piece has a part, if an empty one, of every block.
    fn part(&self, of: Buffer, piece: &Range<u64>) -> Option<Bytes> {
        let len = match of {
            Buffer::Input(block) => self.inputs[block as usize],
            Buffer::Output(block) => self.outputs[block as usize],
            Buffer::Scratch(_) => return None,
        };
        let range = piece.start.min(len) as usize..piece.end.min(len) as usize;
        (piece.start == 0 || !range.is_empty()).then_some(Bytes { of, range })
    }

    fn transfer(&self, peer: u32, of: Buffer, piece: &Range<u64>) -> Option<Transfer> {
        Some(Transfer { peer, stage: 0, bytes: self.part(of, piece)? })
    }

    fn copy(&self, from: Buffer, to: Buffer, piece: &Range<u64>) -> Option<Local> {
        Some(Local::Copy(self.part(from, piece)?, self.part(to, piece)?))
    }

    /// Hensgen, Finkel, Manber 1988: in round k everybody hears of the 2^k before it.
    fn barrier(&self) -> Plan {
        let empty = Bytes { of: Buffer::Scratch(0), range: 0..0 };
        let rounds = (0..).map(|k| (k, 1 << k)).take_while(|(_, distance)| *distance < self.ranks);
        let rounds = rounds.map(|(stage, distance)| Round {
            sends: vec![Transfer { peer: (self.me + distance) % self.ranks, stage, bytes: empty.clone() }],
            receives: vec![Transfer {
                peer: (self.me + self.ranks - distance) % self.ranks,
                stage,
                bytes: empty.clone(),
            }],
            then: Vec::new(),
        });
        Plan { scratch: vec![0], rounds: rounds.collect() }
    }

    /// In place, in output block 0.
    fn broadcast(&self, root: u32, piece: &Range<u64>) -> Plan {
        let place = (self.me + self.ranks - root) % self.ranks;
        let rank = |place: u32| (place + root) % self.ranks;
        let (parent, children): (Option<u32>, Vec<u32>) = if self.len_bytes() >= CHAIN_BYTES_MIN {
            (place.checked_sub(1), vec![place + 1])
        } else {
            // The parent of a place lacks its lowest bit; the largest subtree is served first.
            let (parent, lowest) = match place {
                0 => (None, self.ranks.next_power_of_two()),
                _ => (Some(place & (place - 1)), place & place.wrapping_neg()),
            };
            (parent, (0..lowest.trailing_zeros()).rev().map(|bit| place + (1 << bit)).collect())
        };
        let children = children.into_iter().filter(|place| *place < self.ranks);
        let transfer = |place| self.transfer(rank(place), Buffer::Output(0), piece);
        let received =
            Round { receives: parent.and_then(transfer).into_iter().collect(), ..Round::default() };
        let sends = children.filter_map(transfer).collect();
        Plan { scratch: Vec::new(), rounds: vec![received, Round { sends, ..Round::default() }] }
    }

    /// The blocks of a piece, one for each rank, at multiples of whole cache lines.
    fn blocks(&self, piece: &Range<u64>) -> Vec<Range<usize>> {
        let elems = (piece.end - piece.start) as usize / self.elem_bytes;
        let each = elems.div_ceil(self.ranks as usize).next_multiple_of(ALIGN_ELEMS);
        let at = |k: usize| piece.start as usize + (each * k).min(elems) * self.elem_bytes;
        (0..self.ranks as usize).map(|k| at(k)..at(k + 1)).collect()
    }

    /// A round in which rank k gets block k of everybody's input and sums them into `output`. Scratch 0 to p-1.
    fn sum_blocks(&self, blocks: &[Range<usize>], output: Buffer) -> Round {
        let input = |rank: u32| Bytes { of: Buffer::Input(0), range: blocks[rank as usize].clone() };
        let mine = blocks[self.me as usize].clone();
        let scratch = |rank: u32| Bytes { of: Buffer::Scratch(rank), range: 0..mine.len() };
        let transfer = |peer, bytes| Transfer { peer, stage: 0, bytes };
        let busy = |rank: &u32| !blocks[*rank as usize].is_empty();
        let receivers = self.others().filter(busy);
        let senders = self.others().filter(|_| !mine.is_empty());
        let inputs = (0..self.ranks).map(|rank| if rank == self.me { input(rank) } else { scratch(rank) });
        let range = if output == Buffer::Output(0) { mine.clone() } else { 0..mine.len() };
        Round {
            sends: receivers.map(|rank| transfer(rank, input(rank))).collect(),
            receives: senders.map(|rank| transfer(rank, scratch(rank))).collect(),
            then: vec![Local::Reduce(inputs.collect(), Bytes { of: output, range })],
        }
    }

    fn allreduce_by_blocks(&self, piece: &Range<u64>) -> Plan {
        let blocks = self.blocks(piece);
        let output = |rank: u32| Bytes { of: Buffer::Output(0), range: blocks[rank as usize].clone() };
        let others = || self.others().filter(|rank| !blocks[*rank as usize].is_empty());
        let spread = Round {
            sends: (self.others().filter(|_| !blocks[self.me as usize].is_empty()))
                .map(|peer| Transfer { peer, stage: 1, bytes: output(self.me) })
                .collect(),
            receives: others().map(|peer| Transfer { peer, stage: 1, bytes: output(peer) }).collect(),
            then: Vec::new(),
        };
        let scratch = vec![blocks[self.me as usize].len(); self.ranks as usize];
        Plan { scratch, rounds: vec![self.sum_blocks(&blocks, Buffer::Output(0)), spread] }
    }

    fn reduce_by_blocks(&self, root: u32, piece: &Range<u64>) -> Plan {
        let blocks = self.blocks(piece);
        let mine = blocks[self.me as usize].clone();
        let last = self.ranks;
        let mut scratch = vec![mine.len(); self.ranks as usize];
        let (output, collect) = if self.me == root {
            let others = self.others().filter(|rank| !blocks[*rank as usize].is_empty());
            let receives = others.map(|peer| {
                let bytes = Bytes { of: Buffer::Output(0), range: blocks[peer as usize].clone() };
                Transfer { peer, stage: 1, bytes }
            });
            (Buffer::Output(0), Round { receives: receives.collect(), ..Round::default() })
        } else {
            scratch.push(mine.len());
            let bytes = Bytes { of: Buffer::Scratch(last), range: 0..mine.len() };
            let sends = (!mine.is_empty()).then_some(Transfer { peer: root, stage: 1, bytes });
            (Buffer::Scratch(last), Round { sends: sends.into_iter().collect(), ..Round::default() })
        };
        Plan { scratch, rounds: vec![self.sum_blocks(&blocks, output), collect] }
    }

    fn whole(&self, of: Buffer, piece: &Range<u64>) -> Bytes {
        let range = match of {
            Buffer::Scratch(_) => 0..(piece.end - piece.start) as usize,
            _ => piece.start as usize..piece.end as usize,
        };
        Bytes { of, range }
    }

    /// Everybody sends a copy of its input: the result may be written over the input before that is on the wire.
    fn allreduce_directly(&self, piece: &Range<u64>) -> Plan {
        let scratch = |rank: u32| self.whole(Buffer::Scratch(rank), piece);
        let copied = Round {
            then: vec![Local::Copy(self.whole(Buffer::Input(0), piece), scratch(self.me))],
            ..Round::default()
        };
        let transfers = |of: fn(u32, u32) -> u32| {
            let bytes = move |peer| scratch(of(peer, self.me));
            self.others().map(|peer| Transfer { peer, stage: 0, bytes: bytes(peer) }).collect()
        };
        let inputs = (0..self.ranks).map(scratch).collect();
        let exchanged = Round {
            sends: transfers(|_, me| me),
            receives: transfers(|peer, _| peer),
            then: vec![Local::Reduce(inputs, self.whole(Buffer::Output(0), piece))],
        };
        let len = (piece.end - piece.start) as usize;
        Plan { scratch: vec![len; self.ranks as usize], rounds: vec![copied, exchanged] }
    }

    fn reduce_directly(&self, root: u32, piece: &Range<u64>) -> Plan {
        let input = self.whole(Buffer::Input(0), piece);
        if self.me != root {
            let sends = vec![Transfer { peer: root, stage: 0, bytes: input }];
            return Plan { scratch: Vec::new(), rounds: vec![Round { sends, ..Round::default() }] };
        }
        let scratch = |rank: u32| self.whole(Buffer::Scratch(rank), piece);
        let inputs = (0..self.ranks).map(|rank| if rank == root { input.clone() } else { scratch(rank) });
        let round = Round {
            sends: Vec::new(),
            receives: self.others().map(|peer| Transfer { peer, stage: 0, bytes: scratch(peer) }).collect(),
            then: vec![Local::Reduce(inputs.collect(), self.whole(Buffer::Output(0), piece))],
        };
        let len = (piece.end - piece.start) as usize;
        Plan { scratch: vec![len; self.ranks as usize], rounds: vec![round] }
    }

    fn gather(&self, root: u32, piece: &Range<u64>) -> Plan {
        let round = if self.me == root {
            Round {
                sends: Vec::new(),
                receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
                then: self.copy(Buffer::Input(0), Buffer::Output(root), piece).into_iter().collect(),
            }
        } else {
            let sends = self.transfer(root, Buffer::Input(0), piece).into_iter().collect();
            Round { sends, ..Round::default() }
        };
        Plan { scratch: Vec::new(), rounds: vec![round] }
    }

    fn scatter(&self, root: u32, piece: &Range<u64>) -> Plan {
        let round = if self.me == root {
            Round {
                sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(k), piece)).collect(),
                receives: Vec::new(),
                then: self.copy(Buffer::Input(root), Buffer::Output(0), piece).into_iter().collect(),
            }
        } else {
            let receives = self.transfer(root, Buffer::Output(0), piece).into_iter().collect();
            Round { receives, ..Round::default() }
        };
        Plan { scratch: Vec::new(), rounds: vec![round] }
    }

    fn all_gather(&self, piece: &Range<u64>) -> Plan {
        let round = Round {
            sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(0), piece)).collect(),
            receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
            then: self.copy(Buffer::Input(0), Buffer::Output(self.me), piece).into_iter().collect(),
        };
        Plan { scratch: Vec::new(), rounds: vec![round] }
    }

    fn all_to_all(&self, piece: &Range<u64>) -> Plan {
        let round = Round {
            sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(k), piece)).collect(),
            receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
            then: self.copy(Buffer::Input(self.me), Buffer::Output(self.me), piece).into_iter().collect(),
        };
        Plan { scratch: Vec::new(), rounds: vec![round] }
    }

    fn reduce_scatter(&self, piece: &Range<u64>) -> Plan {
        let len = (piece.end - piece.start) as usize;
        let scratch = |rank: u32| Bytes { of: Buffer::Scratch(rank), range: 0..len };
        let mine = self.whole(Buffer::Input(self.me), piece);
        let inputs = (0..self.ranks).map(|rank| if rank == self.me { mine.clone() } else { scratch(rank) });
        let round = Round {
            sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(k), piece)).collect(),
            receives: self.others().map(|peer| Transfer { peer, stage: 0, bytes: scratch(peer) }).collect(),
            then: vec![Local::Reduce(inputs.collect(), self.whole(Buffer::Output(0), piece))],
        };
        Plan { scratch: vec![len; self.ranks as usize], rounds: vec![round] }
    }
}
