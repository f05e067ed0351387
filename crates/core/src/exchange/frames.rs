//! Frames of the store's exchange, as effects: answers, and what else its files send.

use super::context::{Context, Effect, Flow};
use super::entry::copy;
use crate::memory::Memory;
use crate::types::Rank;
use crate::wire::{Header, Kind, Outgoing, wire_argument, wire_part};

/// Sends word that a round has ended: with the result, without one, or that it is what the receiver gave.
pub(crate) fn tell<M: Memory>(
    to: Rank,
    header: &Header,
    result: Option<&M::Chunk>,
    same: bool,
    context: &mut Context<'_, M>,
) {
    let (wire, len_bytes) = context.site.wire_with(to);
    let payload = result.filter(|_| !same).cloned();
    let (kind, argument, payload_bytes) = match payload {
        Some(_) => (Kind::Answer, wire_argument(context.site.dtype, wire), len_bytes),
        None if same => (Kind::AnswerSame, 0, 0),
        None => (Kind::AnswerAbsent, 0, 0),
    };
    send(to, &Header { kind, argument, payload_bytes, ..*header }, payload, Flow::Free, context);
}

/// Sends a frame.
pub(super) fn send<M: Memory>(
    to: Rank,
    header: &Header,
    payload: Option<M::Chunk>,
    flow: Flow,
    context: &mut Context<'_, M>,
) {
    let frame = Outgoing { header: *header, payload };
    context.effects.push(Effect::Send { to, frame, flow });
}

/// Whether elements come as this rank has them, and not rounded.
pub(super) fn is_unrounded(header: &Header) -> bool {
    wire_part(header.argument) == 0
}

/// The one contribution to a copy, in this rank's memory if it has some: so that the source's buffer is free when its window is.
pub(super) fn copied<M: Memory>(
    source: Rank,
    mine: Option<M::Chunk>,
    context: &mut Context<'_, M>,
) -> M::Chunk {
    match mine {
        Some(mine) if source != context.site.rank => {
            copy(context.memory, &context.inputs[0], &mine);
            mine
        }
        _ => context.inputs[0].clone(),
    }
}
