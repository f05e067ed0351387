//! What a rank asks for, and the names of its messages.

use super::signature::CallKind;
use crate::limits;
use crate::types::GroupId;

/// The call number of messages, whose tag is the user's. Others count from 1.
pub(super) const MESSAGES: u32 = 0;

/// What a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) group: GroupId,
    pub(super) call: u32,
    pub(super) tag: u32,
}

impl Key {
    pub(super) fn describe(self) -> String {
        let Self { group, call, tag } = self;
        if call == MESSAGES {
            return format!("message with tag {tag} in group {group}");
        }
        let (piece, tag) = (tag / limits::CALL_TAGS_MAX, tag % limits::CALL_TAGS_MAX);
        format!("call {call} of group {group} (piece {piece}, tag {tag})")
    }
}

/// What is to be done. Ranks are indexes in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// A message, matched with the receive of the same group and tag that was posted in the same order.
    Send {
        /// The receiver.
        to: u32,
        /// Told apart from messages with other tags.
        tag: u32,
    },
    /// The next message of this sender and tag.
    Receive {
        /// The sender.
        from: u32,
        /// See `Send`.
        tag: u32,
    },
    /// The next message of any sender with this tag; [`super::Effects::sources`] says whose it is.
    ReceiveAny {
        /// See `Send`.
        tag: u32,
    },
    /// What all members take part in.
    Collective(CallKind),
}

impl Request {
    /// The kind of call.
    #[must_use]
    pub fn kind(self) -> CallKind {
        match self {
            Self::Collective(kind) => kind,
            Self::Send { .. } | Self::Receive { .. } | Self::ReceiveAny { .. } => CallKind::Message,
        }
    }
}
