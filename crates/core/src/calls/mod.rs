//! Calls: messages and collectives on any memory, by any group of ranks, in the order in which its ranks call them.
//!
//! Books are for training: opened once, exchanged slice by slice. A call is made once. It is named by its group and its
//! number there, which all members count alike, so ranks need not agree on more than the order of calls within a group.
//! It is cut into pieces, each runs a [`plan`], and the plan's messages go through [`mail`](self). All of a group's calls
//! begin in one lane; the pieces of a long one are dealt to others, too, which count the calls that they have a share of.

mod any_source;
mod blocks;
mod mail;
mod plan;
mod request;
mod shape;
mod signature;
mod stage;
mod sum;

pub use blocks::{Share, any_cut_keeps_bits, check, choose, lanes, slices};
pub use plan::CHAIN_BYTES_MIN;
pub use request::Request;
pub use shape::{Shape, VECTORS_MAX};
pub use signature::{CallKind, Signature};
pub use stage::{Buffer, Local, Plan, Span, Stage, Transfer};

use crate::error::Error;
use crate::limits;
use crate::members::Members;
use crate::memory::Memory;
use crate::types::{Dtype, GroupId, Rank};
use crate::wire::{Destination, Header, Op, Outgoing};
use blocks::{piece, under_way};
use mail::{COPY, Mail, Receipt, Refusal, Token};
use request::{Key, MESSAGES};
use std::collections::{BTreeMap, BTreeSet};

/// This rank's part in a call.
#[derive(Debug, Clone)]
pub struct Call<C> {
    /// The caller's name for it.
    pub id: u64,
    /// The group; this rank is a member.
    pub group: GroupId,
    /// What is to be done.
    pub request: Request,
    /// For sums.
    pub op: Op,
    /// For sums.
    pub dtype: Dtype,
    /// Which of its pieces this lane has.
    pub share: Share,
    /// What this rank gives and its length in bytes: the tensor, or a block for each member.
    pub inputs: Vec<(C, u64)>,
    /// Where results go, likewise.
    pub outputs: Vec<(C, u64)>,
}

struct Group {
    members: Vec<Rank>,
    /// This rank's index in it.
    me: u32,
    /// Number of the last call that was begun.
    begun: u32,
    /// Calls that are not complete.
    open: BTreeSet<u32>,
}

/// A piece under way.
struct Piece<C> {
    plan: Plan,
    stage: usize,
    /// The sends of this stage are posted. Its receives are, from the beginning.
    sent: bool,
    /// By stage, receives that are not there.
    missing: Vec<u32>,
    scratch: Vec<C>,
}

struct Running<C> {
    call: Call<C>,
    number: u32,
    signature: Signature,
    shape: Shape,
    /// Of this lane's share.
    pieces: u32,
    /// Pieces that were begun.
    begun: u32,
    /// Pieces that are complete.
    complete: u32,
    under_way: BTreeMap<u32, Piece<C>>,
}

impl<C> Running<C> {
    fn name(&self, piece: u32, transfer: &Transfer) -> (Key, Signature) {
        let tag = piece * limits::CALL_TAGS_MAX + transfer.tag;
        (Key { group: self.call.group, call: self.number, tag }, self.signature)
    }
}

/// What calls bring about.
pub struct Effects<C> {
    /// To be sent, in this order per peer.
    pub frames: Vec<(Rank, Outgoing<C>)>,
    /// Calls that receive from anybody, and from whom, as an index in the group.
    pub sources: Vec<(u64, u32)>,
    /// Calls whose results are in memory.
    pub complete: Vec<u64>,
    /// Peers that are waited for from now on.
    pub awaited: Vec<Rank>,
}

impl<C> Default for Effects<C> {
    fn default() -> Self {
        Self { frames: Vec::new(), sources: Vec::new(), complete: Vec::new(), awaited: Vec::new() }
    }
}

/// All calls of one lane of one rank.
pub struct Calls<M: Memory> {
    me: Rank,
    /// All processes of the job, or of its epoch.
    members: Members,
    /// By rank.
    mail: Vec<Mail<M::Chunk>>,
    groups: BTreeMap<GroupId, Group>,
    running: BTreeMap<u64, Running<M::Chunk>>,
    /// Receives from anybody that nobody's message has met, in the order in which they were posted.
    any_source: Vec<Running<M::Chunk>>,
    /// Taken by whoever stepped.
    pub effects: Effects<M::Chunk>,
    frames: Vec<Outgoing<M::Chunk>>,
}

impl<M: Memory> Calls<M> {
    /// No calls, and no groups.
    #[must_use]
    pub fn new(me: Rank, members: Members) -> Self {
        Self {
            me,
            mail: (0..members.end()).map(|_| Mail::new()).collect(),
            members,
            groups: BTreeMap::new(),
            running: BTreeMap::new(),
            any_source: Vec::new(),
            effects: Effects::default(),
            frames: Vec::new(),
        }
    }

    /// Forms a group; every member must form the same. Messages of it may have come before.
    ///
    /// # Errors
    /// [`Error::Config`] if the number is taken, or the members are not distinct ranks of the job, this one among them.
    pub fn form(&mut self, id: GroupId, members: Vec<Rank>) -> Result<(), Error> {
        let distinct: BTreeSet<Rank> = members.iter().copied().collect();
        let known = distinct.iter().all(|rank| self.members.contains(*rank));
        let me = members.iter().position(|rank| *rank == self.me);
        let (Some(me), true, false) =
            (me, known && distinct.len() == members.len(), self.groups.contains_key(&id))
        else {
            return Err(Error::Config(format!(
                "group {id} exists already, or its members {} are not distinct ranks of the job with rank {} among them",
                listed(&members),
                self.me
            )));
        };
        let group = Group { members, me: me as u32, begun: 0, open: BTreeSet::new() };
        self.groups.insert(id, group);
        Ok(())
    }

    /// Begins a call.
    ///
    /// # Errors
    /// [`Error::Config`] if it does not fit the group or what another rank has called.
    pub fn begin(&mut self, call: Call<M::Chunk>, memory: &mut M) -> Result<(), Error> {
        let Some(group) = self.groups.get_mut(&call.group) else {
            return Err(Error::Config(format!("group {} does not exist", call.group)));
        };
        let (me, ranks) = (group.me, group.members.len() as u32);
        let kind = call.request.kind();
        let lens = |blocks: &[(M::Chunk, u64)]| blocks.iter().map(|(_, len)| *len).collect();
        let (inputs, outputs) = (lens(&call.inputs), lens(&call.outputs));
        let shape = Shape { kind, ranks, me, elem_bytes: call.dtype.size_bytes(), inputs, outputs };
        check(&shape, call.request)?;
        let number = if kind == CallKind::Message {
            MESSAGES
        } else {
            group.begun = group.begun.checked_add(1).unwrap_or(1);
            group.open.insert(group.begun);
            group.begun
        };
        // Blocks of an all-to-all have lengths of their own.
        let len = if kind == CallKind::AllToAll { 0 } else { shape.len_bytes() };
        let signature = Signature::new(kind, call.op, call.dtype, len, shape.vectors());
        self.check_early(&call, number, signature)?;
        let pieces = call.share.count(&shape);
        let longest = piece(&shape, 0);
        if pieces > limits::CALL_PIECES_MAX as u64
            || longest.end - longest.start > limits::MESSAGE_BYTES_MAX as u64
        {
            let (len, max) =
                (shape.len_bytes(), limits::CALL_PIECES_MAX as u64 * limits::MESSAGE_BYTES_MAX as u64);
            return Err(Error::Config(format!("{}: {len} bytes; at most {max} are possible", kind.name())));
        }
        let pieces = pieces as u32;
        let running = Running {
            call,
            number,
            signature,
            shape,
            pieces,
            begun: 0,
            complete: 0,
            under_way: BTreeMap::new(),
        };
        match running.call.request {
            Request::ReceiveAny { tag } => self.receive_any(running, tag, memory),
            Request::Collective(_) => self.advance(running, memory),
            _ => self.message(running, memory),
        }
    }

    /// What others have sent for this call already must be of the same call.
    fn check_early(&self, call: &Call<M::Chunk>, number: u32, signature: Signature) -> Result<(), Error> {
        if number == MESSAGES {
            return Ok(());
        }
        for peer in &self.groups[&call.group].members {
            let theirs = self.mail[peer.index()].early_signature(call.group, number);
            if let Some(theirs) = theirs.filter(|theirs| !theirs.same_action(signature)) {
                let group = call.group;
                let hint = signature.hint(theirs);
                let text = format!("call {number} of group {group}: {theirs} there, {signature} here{hint}");
                return Err(self.error(*peer, Refusal::Mismatch(text)));
            }
        }
        Ok(())
    }

    fn error(&self, peer: Rank, fault: Refusal) -> Error {
        match fault {
            Refusal::Mismatch(text) => Error::Config(format!(
                "rank {peer} (there) and rank {} (here) make calls that do not fit each other: {text}. All ranks of a group must make the \
                 same calls in the same order, with the same dtype, operation and lengths",
                self.me
            )),
            Refusal::Protocol(text) => Error::protocol(peer, text),
        }
    }

    fn flush(&mut self, peer: Rank) {
        self.effects.frames.extend(self.frames.drain(..).map(|frame| (peer, frame)));
    }

    fn send(
        &mut self,
        peer: Rank,
        (key, signature): (Key, Signature),
        what: (M::Chunk, u32),
        token: Token,
        memory: &M,
    ) -> Result<(), Error> {
        let outcome = self.mail[peer.index()].send(key, signature, what, token, memory, &mut self.frames);
        self.flush(peer);
        outcome.map_err(|fault| self.error(peer, fault))
    }

    fn receive(
        &mut self,
        peer: Rank,
        (key, signature): (Key, Signature),
        what: (M::Chunk, u32),
        token: Token,
        memory: &mut M,
    ) -> Result<bool, Error> {
        let outcome = self.mail[peer.index()].receive(key, signature, what, token, memory, &mut self.frames);
        self.flush(peer);
        if outcome == Ok(false) {
            self.effects.awaited.push(peer);
        }
        outcome.map_err(|fault| self.error(peer, fault))
    }

    /// A message, in as many as its length takes; they have one key, so they arrive in order.
    fn message(&mut self, mut running: Running<M::Chunk>, memory: &mut M) -> Result<(), Error> {
        let Running { call, signature, .. } = &running;
        let signature = *signature;
        let (peer, tag, (chunk, _)) = match call.request {
            Request::Send { to, tag } => (to, tag, call.inputs[0].clone()),
            Request::Receive { from, tag } => (from, tag, call.outputs[0].clone()),
            Request::ReceiveAny { .. } | Request::Collective(_) => return Ok(()),
        };
        let sends = matches!(call.request, Request::Send { .. });
        let (id, key) = (call.id, Key { group: call.group, call: MESSAGES, tag });
        let peer = self.groups[&call.group].members[peer as usize];
        let mut missing = 0;
        for number in 0..running.pieces {
            let range = piece(&running.shape, number);
            let part_len = (range.end - range.start) as usize;
            let part = (memory.part(&chunk, range.start as usize, part_len), part_len as u32);
            let token = Token { call: id, piece: 0, stage: 0 };
            if sends {
                self.send(peer, (key, signature), part, token, memory)?;
            } else {
                missing += u32::from(!self.receive(peer, (key, signature), part, token, memory)?);
            }
        }
        if missing == 0 {
            self.effects.complete.push(id);
            return Ok(());
        }
        // One stage without a plan, which ends when all is there.
        running.pieces = 1;
        running.begun = 1;
        let plan = Plan { scratch: Vec::new(), stages: vec![Stage::default()] };
        let piece = Piece { plan, stage: 0, sent: true, missing: vec![missing], scratch: Vec::new() };
        running.under_way.insert(0, piece);
        self.running.insert(id, running);
        Ok(())
    }

    /// Begins pieces as long as there is room, and ends the call after the last.
    fn advance(&mut self, mut running: Running<M::Chunk>, memory: &mut M) -> Result<(), Error> {
        let room = under_way(&running.shape);
        while running.begun < running.pieces && running.begun - running.complete < room {
            let number = running.call.share.piece(&running.shape, running.begun);
            running.begun += 1;
            let plan = running.shape.plan(number);
            let scratch = plan.scratch.iter().map(|len| memory.scratch(*len)).collect();
            let missing = vec![0; plan.stages.len()];
            let mut piece = Piece { plan, stage: 0, sent: false, missing, scratch };
            self.post_receives(&running, number, &mut piece, memory)?;
            self.stages(&mut running, number, piece, memory)?;
        }
        if running.complete < running.pieces {
            self.running.insert(running.call.id, running);
            return Ok(());
        }
        if let Some(group) = self.groups.get_mut(&running.call.group) {
            group.open.remove(&running.number);
        }
        self.effects.complete.push(running.call.id);
        Ok(())
    }

    /// Goes on with a piece whose messages are there, until it has to wait or is complete.
    fn stages(
        &mut self,
        running: &mut Running<M::Chunk>,
        number: u32,
        mut piece: Piece<M::Chunk>,
        memory: &mut M,
    ) -> Result<(), Error> {
        while piece.stage < piece.plan.stages.len() {
            if !piece.sent {
                piece.sent = true;
                self.post_sends(running, number, &piece, memory)?;
            }
            if piece.missing[piece.stage] > 0 {
                running.under_way.insert(number, piece);
                return Ok(());
            }
            let members = self.groups[&running.call.group].members.len() as u32;
            let addends = members * running.shape.vectors();
            compute(&running.call, &piece.plan.stages[piece.stage], &piece.scratch, addends, memory);
            (piece.stage, piece.sent) = (piece.stage + 1, false);
        }
        running.complete += 1;
        Ok(())
    }

    /// Posts the receives of all stages, so that nobody has to ask whether there is memory for them.
    fn post_receives(
        &mut self,
        running: &Running<M::Chunk>,
        number: u32,
        piece: &mut Piece<M::Chunk>,
        memory: &mut M,
    ) -> Result<(), Error> {
        for (stage, missing) in (0..).zip(&mut piece.missing) {
            let token = Token { call: running.call.id, piece: number, stage };
            for transfer in &piece.plan.stages[stage as usize].receives {
                let peer = self.groups[&running.call.group].members[transfer.peer as usize];
                let what = bytes_of(&running.call, &piece.scratch, &transfer.bytes, memory);
                *missing +=
                    u32::from(!self.receive(peer, running.name(number, transfer), what, token, memory)?);
            }
        }
        Ok(())
    }

    fn post_sends(
        &mut self,
        running: &Running<M::Chunk>,
        number: u32,
        piece: &Piece<M::Chunk>,
        memory: &mut M,
    ) -> Result<(), Error> {
        let token = Token { call: running.call.id, piece: number, stage: piece.stage as u32 };
        for transfer in &piece.plan.stages[piece.stage].sends {
            let peer = self.groups[&running.call.group].members[transfer.peer as usize];
            let what = bytes_of(&running.call, &piece.scratch, &transfer.bytes, memory);
            self.send(peer, running.name(number, transfer), what, token, memory)?;
        }
        Ok(())
    }

    /// Where the payload of an arriving frame goes.
    ///
    /// # Errors
    /// [`Error::Protocol`] if nobody asked for it, [`Error::Config`] if the two ranks' calls do not fit.
    pub fn destination(
        &mut self,
        from: Rank,
        header: &Header,
        memory: &mut M,
    ) -> Result<Destination<M::Chunk>, Error> {
        let outcome = self.mail[from.index()].destination(header, memory);
        outcome.map_err(|fault| self.error(from, fault))
    }

    /// A frame is here completely.
    ///
    /// # Errors
    /// As [`Calls::destination`].
    pub fn frame(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        memory: &mut M,
    ) -> Result<(), Error> {
        let outcome = self.mail[from.index()].frame(header, payload, memory, &mut self.frames);
        self.flush(from);
        match outcome.map_err(|fault| self.error(from, fault))? {
            Receipt::Taken => Ok(()),
            Receipt::Kept if header.slice == MESSAGES => self.kept_for_any_source(from, header, memory),
            Receipt::Kept => self.check_kept(from, header),
            Receipt::Completed(token) => self.arrived(token, memory),
        }
    }

    /// A message that nobody here has asked for must be of a call that is not complete.
    fn check_kept(&self, from: Rank, header: &Header) -> Result<(), Error> {
        let (number, theirs) = (header.slice, Signature(header.seq));
        let Some(group) = self.groups.get(&header.book) else { return Ok(()) };
        let is_old = group.begun.wrapping_sub(number) < u32::MAX / 2;
        let text = if !group.members.contains(&from) {
            return Err(Error::protocol(from, format!("it is no member of group {}", header.book)));
        } else if is_old && !group.open.contains(&number) {
            format!("call {number} of group {}: {theirs} there; here it is complete", header.book)
        } else {
            let same =
                |running: &&Running<M::Chunk>| running.call.group == header.book && running.number == number;
            match self.running.values().find(same) {
                Some(running) if !running.signature.same_action(theirs) => {
                    let ours = running.signature;
                    let hint = ours.hint(theirs);
                    format!("call {number} of group {}: {theirs} there, {ours} here{hint}", header.book)
                }
                _ => return Ok(()),
            }
        };
        Err(self.error(from, Refusal::Mismatch(text)))
    }

    fn arrived(&mut self, token: Token, memory: &mut M) -> Result<(), Error> {
        let Some(running) = self.running.get_mut(&token.call) else { return Ok(()) };
        let Some(piece) = running.under_way.get_mut(&token.piece) else { return Ok(()) };
        let stage = token.stage as usize;
        piece.missing[stage] -= 1;
        if piece.missing[stage] > 0 || stage != piece.stage {
            return Ok(());
        }
        let Some(mut running) = self.running.remove(&token.call) else { return Ok(()) };
        if let Some(piece) = running.under_way.remove(&token.piece) {
            self.stages(&mut running, token.piece, piece, memory)?;
        }
        self.advance(running, memory)
    }

    /// The ranks that a call waits for.
    #[must_use]
    pub fn missing(&self, id: u64) -> Vec<Rank> {
        if let Some(running) = self.any_source.iter().find(|running| running.call.id == id) {
            return self.others(running.call.group);
        }
        let waits = |mail: &Mail<M::Chunk>| mail.waiting().any(|token| token.call == id);
        (0..).zip(&self.mail).filter(|(_, mail)| waits(mail)).map(|(rank, _)| Rank(rank)).collect()
    }

    /// Whether any call waits for this rank.
    #[must_use]
    pub fn waits_for(&self, peer: Rank) -> bool {
        self.mail[peer.index()].waiting().next().is_some() || self.waits_for_it_alone(peer)
    }
}

fn listed(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// The memory behind a plan's bytes.
fn bytes_of<M: Memory>(
    call: &Call<M::Chunk>,
    scratch: &[M::Chunk],
    bytes: &Span,
    memory: &M,
) -> (M::Chunk, u32) {
    let chunk = match bytes.of {
        Buffer::Input(block) => &call.inputs[block as usize].0,
        Buffer::Output(block) => &call.outputs[block as usize].0,
        Buffer::Scratch(number) => &scratch[number as usize],
    };
    let len = bytes.range.len();
    (memory.part(chunk, bytes.range.start, len), len as u32)
}

/// What follows when a stage's messages are there.
fn compute<M: Memory>(
    call: &Call<M::Chunk>,
    stage: &Stage,
    scratch: &[M::Chunk],
    addends: u32,
    memory: &mut M,
) {
    for local in &stage.then {
        match local {
            Local::Copy(from, to) => {
                let (from, to) = (bytes_of(call, scratch, from, memory), bytes_of(call, scratch, to, memory));
                memory.reduce(Dtype::Bytes, COPY, &[from.0], &to.0);
            }
            Local::Reduce { inputs, output, last } => {
                let (output, len) = bytes_of(call, scratch, output, memory);
                let inputs: Vec<M::Chunk> =
                    inputs.iter().map(|input| bytes_of(call, scratch, input, memory).0).collect();
                let how = call.op.reduction(if *last { addends } else { 1 });
                if len > 0 {
                    memory.reduce(call.dtype, how, &inputs, &output);
                }
            }
        }
    }
}
