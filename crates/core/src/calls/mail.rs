//! Messages between this rank and one other: sent, announced, asked for, matched.
//!
//! A message has a key (group, call, tag) and is matched with the receives of that key in the order in which both were
//! posted. A short one travels whole ([`Kind::Message`]) as long as the receiver has room for it: a window of bytes per
//! peer, given back when the program asks for them ([`Kind::Credit`]). A long one, or a short one beyond the window, is
//! offered ([`Kind::Offer`]); its parts follow once the receiver has memory for them ([`Kind::Ready`]) and go straight
//! there. A receiver that knows that a long message will come asks before the offer is there, which saves half a round.
//!
//! Why nothing waits in a circle: what this rank sends before it is asked for (offers, and messages within the window)
//! waits for nothing. Parts wait only for the receive of their own key. So a receive that both sides have posted is
//! always satisfied, whatever else is or is not received: both sides may send first, in any order of keys.
//!
//! Bounds: [`limits::EAGER_WINDOW_BYTES`] of payload that nobody has asked for, and [`limits::OFFERS_MAX`] offers, per peer
//! and lane. A sender beyond the first offers; beyond the second its messages wait here until older ones are asked for.

use super::request::Key;
use super::signature::Signature;
use crate::limits;
use crate::memory::Memory;
use crate::reduce::Reduction;
use crate::types::{Dtype, GroupId};
use crate::wire::{Destination, Header, Kind, Outgoing};
use std::collections::{BTreeMap, VecDeque};

/// Of one input: its bytes.
pub(super) const COPY: Reduction = Reduction::Sum { divisor: 1 };

/// Which piece of which call of this rank a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) call: u64,
    pub(super) piece: u32,
    /// The stage of the piece's plan that waits for it.
    pub(super) stage: u32,
}

/// Why a frame or a call is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The two ranks' calls do not fit each other: an error of the program.
    Mismatch(String),
    /// The peer broke the protocol.
    Protocol(String),
}

struct PostedReceive<C> {
    chunk: C,
    len: u32,
    signature: Signature,
    token: Token,
    /// The peer knows already that there is memory for it.
    asked: bool,
    /// The payload under way goes straight into `chunk`.
    placed: bool,
}

struct Filling<C> {
    chunk: C,
    len: u32,
    filled: u32,
    token: Token,
}

/// What came before this rank asked for it.
struct Early<C> {
    signature: Signature,
    len: u32,
    /// An offer has none.
    whole: bool,
    payload: Option<C>,
}

struct PostedSend<C> {
    chunk: C,
    len: u32,
    signature: Signature,
    token: Token,
    offered: bool,
}

/// First in, first out within each key.
struct Keyed<T> {
    items: BTreeMap<(Key, u64), T>,
    order: u64,
}

impl<T> Default for Keyed<T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), order: 0 }
    }
}

impl<T> Keyed<T> {
    fn push(&mut self, key: Key, item: T) -> (Key, u64) {
        self.order += 1;
        self.items.insert((key, self.order), item);
        (key, self.order)
    }

    fn first(&mut self, key: Key) -> Option<&mut T> {
        self.items.range_mut((key, 0)..=(key, u64::MAX)).next().map(|(_, item)| item)
    }

    fn pop(&mut self, key: Key) -> Option<T> {
        let place = *self.items.range((key, 0)..=(key, u64::MAX)).next()?.0;
        self.items.remove(&place)
    }

    fn of_call(&self, group: GroupId, call: u32) -> impl Iterator<Item = (&Key, &T)> {
        let at = |tag, order| (Key { group, call, tag }, order);
        self.items.range(at(0, 0)..=at(u32::MAX, u64::MAX)).map(|((key, _), item)| (key, item))
    }
}

/// All messages between this rank and one other on one lane.
pub(super) struct Mail<C> {
    receives: Keyed<PostedReceive<C>>,
    filling: Keyed<Filling<C>>,
    early: Keyed<Early<C>>,
    sends: Keyed<PostedSend<C>>,
    /// The peer has asked for what this rank has not sent yet.
    readies: Keyed<(Signature, u32)>,
    /// Sends that wait until fewer are offered.
    unoffered: VecDeque<(Key, u64)>,
    offered_count: usize,
    early_offer_count: usize,
    /// Receives that were asked for and are not offered.
    asked_count: usize,
    /// What this rank may still send whole.
    credit_bytes: usize,
    /// What whole messages that came have cost and was not given back.
    taken_bytes: usize,
    /// Of that, what the program has asked for.
    owed_bytes: usize,
}

fn cost(len: u32) -> usize {
    len as usize + limits::MESSAGE_COST_BYTES
}

fn key_of(header: &Header) -> Key {
    Key { group: header.book, call: header.slice, tag: header.step }
}

fn frame<C>(
    kind: Kind,
    key: Key,
    signature: Signature,
    argument: u32,
    payload: Option<(C, u32)>,
) -> Outgoing<C> {
    let (payload, payload_bytes) = payload.map_or((None, 0), |(chunk, len)| (Some(chunk), len));
    let header = Header {
        book: key.group,
        slice: key.call,
        step: key.tag,
        seq: signature.0,
        argument,
        payload_bytes,
        ..Header::control(kind)
    };
    Outgoing { header, payload }
}

/// Whether what the peer says of a message is what this rank expects.
fn fits(key: Key, ours: (Signature, u32), theirs: (Signature, u32)) -> Result<(), Refusal> {
    if ours == theirs {
        return Ok(());
    }
    let what = key.describe();
    if !ours.0.same_action(theirs.0) {
        let (ours, theirs) = (ours.0, theirs.0);
        return Err(Refusal::Mismatch(format!("{what}: {theirs} there, {ours} here{}", ours.hint(theirs))));
    }
    if ours.1 != theirs.1 {
        let (name, ours, theirs) = (ours.0, ours.1, theirs.1);
        return Err(Refusal::Mismatch(format!(
            "{what} ({name}): a message has {theirs} bytes there, {ours} bytes here, so the tensors' lengths differ"
        )));
    }
    Err(Refusal::Mismatch(format!("{what} ({}): the tensors' lengths differ", ours.0)))
}

/// What has become of a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Receipt {
    /// Nothing that concerns others.
    Taken,
    /// It has completed a receive.
    Completed(Token),
    /// It waits until this rank's call comes to it.
    Kept,
}

impl<C: Clone> Mail<C> {
    pub(super) fn new() -> Self {
        Self {
            receives: Keyed::default(),
            filling: Keyed::default(),
            early: Keyed::default(),
            sends: Keyed::default(),
            readies: Keyed::default(),
            unoffered: VecDeque::new(),
            offered_count: 0,
            early_offer_count: 0,
            asked_count: 0,
            credit_bytes: limits::EAGER_WINDOW_BYTES,
            taken_bytes: 0,
            owed_bytes: 0,
        }
    }

    /// Sends `chunk` of `len` bytes, which must stay unchanged until all of its clones are dropped.
    pub(super) fn send<M: Memory<Chunk = C>>(
        &mut self,
        key: Key,
        signature: Signature,
        (chunk, len): (C, u32),
        token: Token,
        memory: &M,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<(), Refusal> {
        let short = len as usize <= limits::EAGER_BYTES_MAX && cost(len) <= self.credit_bytes;
        if short && self.unoffered.is_empty() {
            self.credit_bytes -= cost(len);
            let payload = (len > 0).then_some((chunk, len));
            out.push(frame(Kind::Message, key, signature, 0, payload));
            return Ok(());
        }
        if let Some(asked) = self.readies.pop(key) {
            fits(key, (signature, len), asked)?;
            out.push(frame(Kind::Offer, key, signature, len, None));
            parts(key, signature, &chunk, len, memory, out);
            return Ok(());
        }
        let offered = self.offered_count < limits::OFFERS_MAX;
        let place = self.sends.push(key, PostedSend { chunk, len, signature, token, offered });
        if offered {
            self.offered_count += 1;
            out.push(frame(Kind::Offer, key, signature, len, None));
        } else {
            self.unoffered.push_back(place);
        }
        Ok(())
    }

    /// Receives a message of `len` bytes into `chunk`. Returns whether it is there already.
    pub(super) fn receive<M: Memory<Chunk = C>>(
        &mut self,
        key: Key,
        signature: Signature,
        (chunk, len): (C, u32),
        token: Token,
        memory: &mut M,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<bool, Refusal> {
        if let Some(early) = self.early.pop(key) {
            fits(key, (signature, len), (early.signature, early.len))?;
            if early.whole {
                if let Some(payload) = early.payload {
                    memory.reduce(Dtype::Bytes, COPY, &[payload], &chunk);
                }
                self.consumed(len, out);
                return Ok(true);
            }
            self.early_offer_count -= 1;
            out.push(frame(Kind::Ready, key, signature, len, None));
            self.filling.push(key, Filling { chunk, len, filled: 0, token });
            return Ok(false);
        }
        // Only the first of its key: the peer takes what it is asked for in the order of its long messages.
        let asked = len as usize > limits::EAGER_BYTES_MAX
            && self.receives.first(key).is_none()
            && self.filling.first(key).is_none()
            && self.asked_count < limits::OFFERS_MAX;
        if asked {
            self.asked_count += 1;
            out.push(frame(Kind::Ready, key, signature, len, None));
        }
        self.receives.push(key, PostedReceive { chunk, len, signature, token, asked, placed: false });
        Ok(false)
    }

    /// Where the payload of an arriving frame goes.
    pub(super) fn destination<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: &mut M,
    ) -> Result<Destination<C>, Refusal> {
        let (key, len) = (key_of(header), header.payload_bytes);
        match header.kind {
            Kind::Message => {
                self.taken_bytes += cost(len);
                if self.taken_bytes > limits::EAGER_WINDOW_BYTES {
                    let max = limits::EAGER_WINDOW_BYTES;
                    return Err(Refusal::Protocol(format!(
                        "it sent more than the {max} bytes that may be unasked for"
                    )));
                }
                let chunk = match self.receives.first(key) {
                    Some(receive) => {
                        let theirs = (Signature(header.seq), len);
                        fits(key, (receive.signature, receive.len), theirs)?;
                        receive.placed = true;
                        receive.chunk.clone()
                    }
                    None if len > 0 => memory.scratch(len as usize),
                    None => return Ok(Destination::None),
                };
                Ok(if len > 0 { Destination::Chunk(chunk) } else { Destination::None })
            }
            Kind::MessagePart => {
                let filling = self.filling.first(key).ok_or_else(|| nobody_asked(key))?;
                let fits = header.argument == filling.filled
                    && len <= filling.len - filling.filled
                    && (len > 0 || filling.len == 0);
                if !fits {
                    return Err(Refusal::Protocol(format!(
                        "{}: {len} bytes from byte {}, expected byte {} of {}",
                        key.describe(),
                        header.argument,
                        filling.filled,
                        filling.len
                    )));
                }
                if len == 0 {
                    return Ok(Destination::None);
                }
                Ok(Destination::Chunk(memory.part(&filling.chunk, filling.filled as usize, len as usize)))
            }
            _ => Ok(Destination::None),
        }
    }

    /// A frame is here completely.
    pub(super) fn frame<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        payload: Option<C>,
        memory: &mut M,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<Receipt, Refusal> {
        let (key, signature) = (key_of(header), Signature(header.seq));
        match header.kind {
            Kind::Message => self.message(key, signature, header.payload_bytes, payload, memory, out),
            Kind::Offer => self.offer(key, signature, header.argument, out),
            Kind::Ready => self.ready(key, signature, header.argument, memory, out),
            Kind::MessagePart => {
                let filling = self.filling.first(key).ok_or_else(|| nobody_asked(key))?;
                filling.filled += header.payload_bytes;
                let (complete, token) = (filling.filled == filling.len, filling.token);
                if !complete {
                    return Ok(Receipt::Taken);
                }
                self.filling.pop(key);
                Ok(Receipt::Completed(token))
            }
            Kind::Credit => {
                self.credit_bytes += header.argument as usize;
                if self.credit_bytes > limits::EAGER_WINDOW_BYTES {
                    return Err(Refusal::Protocol("it gives back more than it was sent".into()));
                }
                Ok(Receipt::Taken)
            }
            kind => Err(Refusal::Protocol(format!("{kind:?} is no frame of a call"))),
        }
    }

    fn message<M: Memory<Chunk = C>>(
        &mut self,
        key: Key,
        signature: Signature,
        len: u32,
        payload: Option<C>,
        memory: &mut M,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<Receipt, Refusal> {
        let Some(receive) = self.receives.pop(key) else {
            self.early.push(key, Early { signature, len, whole: true, payload });
            return Ok(Receipt::Kept);
        };
        // The receive may have been posted while the payload was under way.
        fits(key, (receive.signature, receive.len), (signature, len))?;
        if let Some(payload) = payload.filter(|_| !receive.placed) {
            memory.reduce(Dtype::Bytes, COPY, &[payload], &receive.chunk);
        }
        self.consumed(len, out);
        Ok(Receipt::Completed(receive.token))
    }

    fn offer(
        &mut self,
        key: Key,
        signature: Signature,
        len: u32,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<Receipt, Refusal> {
        if len as usize > limits::MESSAGE_BYTES_MAX {
            let max = limits::MESSAGE_BYTES_MAX;
            return Err(Refusal::Protocol(format!(
                "{}: an offer of {len} bytes, above {max}",
                key.describe()
            )));
        }
        let Some(receive) = self.receives.pop(key) else {
            self.early_offer_count += 1;
            if self.early_offer_count > limits::OFFERS_MAX {
                let max = limits::OFFERS_MAX;
                return Err(Refusal::Protocol(format!("it offers more than {max} messages at a time")));
            }
            self.early.push(key, Early { signature, len, whole: false, payload: None });
            return Ok(Receipt::Kept);
        };
        fits(key, (receive.signature, receive.len), (signature, len))?;
        if receive.asked {
            self.asked_count -= 1;
        } else {
            out.push(frame(Kind::Ready, key, signature, len, None));
        }
        let PostedReceive { chunk, token, .. } = receive;
        self.filling.push(key, Filling { chunk, len, filled: 0, token });
        Ok(Receipt::Taken)
    }

    fn ready<M: Memory<Chunk = C>>(
        &mut self,
        key: Key,
        signature: Signature,
        len: u32,
        memory: &M,
        out: &mut Vec<Outgoing<C>>,
    ) -> Result<Receipt, Refusal> {
        let Some(send) = self.sends.pop(key) else {
            if self.readies.items.len() >= limits::OFFERS_MAX {
                let max = limits::OFFERS_MAX;
                return Err(Refusal::Protocol(format!("it asks for more than {max} messages at a time")));
            }
            self.readies.push(key, (signature, len));
            return Ok(Receipt::Kept);
        };
        fits(key, (send.signature, send.len), (signature, len))?;
        if send.offered {
            self.offered_count -= 1;
        } else {
            out.push(frame(Kind::Offer, key, signature, len, None));
        }
        parts(key, signature, &send.chunk, len, memory, out);
        while self.offered_count < limits::OFFERS_MAX
            && let Some(place) = self.unoffered.pop_front()
        {
            if let Some(next) = self.sends.items.get_mut(&place) {
                next.offered = true;
                self.offered_count += 1;
                out.push(frame(Kind::Offer, place.0, next.signature, next.len, None));
            }
        }
        Ok(Receipt::Taken)
    }

    /// The program has taken a whole message; its room is given back once there is much of it.
    fn consumed(&mut self, len: u32, out: &mut Vec<Outgoing<C>>) {
        self.owed_bytes += cost(len);
        if self.owed_bytes >= limits::EAGER_WINDOW_BYTES / 2 {
            let header = Header { argument: self.owed_bytes as u32, ..Header::control(Kind::Credit) };
            out.push(Outgoing { header, payload: None });
            self.taken_bytes -= self.owed_bytes;
            self.owed_bytes = 0;
        }
    }

    /// Calls that wait for the peer.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Token> {
        let receives = self.receives.items.values().map(|receive| receive.token);
        let filling = self.filling.items.values().map(|filling| filling.token);
        receives.chain(filling).chain(self.sends.items.values().map(|send| send.token))
    }

    /// Whether a message of this key has come, or was offered, that nobody has asked for.
    pub(super) fn has_early(&mut self, key: Key) -> bool {
        self.early.first(key).is_some()
    }

    /// What came early for a call that this rank begins now: the peer's idea of it.
    pub(super) fn early_signature(&self, group: GroupId, call: u32) -> Option<Signature> {
        let early = self.early.of_call(group, call).next().map(|(_, early)| early.signature);
        early.or_else(|| self.readies.of_call(group, call).next().map(|(_, ready)| ready.0))
    }
}

fn nobody_asked(key: Key) -> Refusal {
    Refusal::Protocol(format!("{}: a part of a message that nobody asked for", key.describe()))
}

/// The frames of a message that was asked for.
fn parts<M: Memory>(
    key: Key,
    signature: Signature,
    chunk: &M::Chunk,
    len: u32,
    memory: &M,
    out: &mut Vec<Outgoing<M::Chunk>>,
) {
    if len == 0 {
        out.push(frame(Kind::MessagePart, key, signature, 0, None));
    }
    for start in (0..len).step_by(limits::PART_BYTES_MAX) {
        let part = (len - start).min(limits::PART_BYTES_MAX as u32);
        let payload = (memory.part(chunk, start as usize, part as usize), part);
        out.push(frame(Kind::MessagePart, key, signature, start, Some(payload)));
    }
}
