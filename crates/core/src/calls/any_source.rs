//! Receives that name no sender: matched with the first message of their tag that nobody else's receive takes.
//!
//! Of messages that are there already the member that comes first in the group is served first. Once a sender is found, all of
//! its message, which may travel in several parts, is received from it.

use super::request::{Key, MESSAGES, Request};
use super::{Calls, Running};
use crate::error::Error;
use crate::memory::Memory;
use crate::types::{GroupId, Rank};
use crate::wire::Header;

impl<M: Memory> Calls<M> {
    /// The members of a group but this rank.
    pub(super) fn others(&self, group: GroupId) -> Vec<Rank> {
        let members = self.groups.get(&group).map_or(&[][..], |group| &group.members);
        members.iter().copied().filter(|member| *member != self.me).collect()
    }

    pub(super) fn receive_any(
        &mut self,
        running: Running<M::Chunk>,
        tag: u32,
        memory: &mut M,
    ) -> Result<(), Error> {
        let group = running.call.group;
        let key = Key { group, call: MESSAGES, tag };
        let others = self.others(group);
        if let Some(from) = others.iter().find(|member| self.mail[member.index()].has_early(key)) {
            return self.receive_from(running, *from, tag, memory);
        }
        // The loss of any of them must be heard of.
        self.effects.awaited.extend(others);
        self.any_source.push(running);
        Ok(())
    }

    /// A message is here that no receive has named, or is offered.
    pub(super) fn kept_for_any_source(
        &mut self,
        from: Rank,
        header: &Header,
        memory: &mut M,
    ) -> Result<(), Error> {
        let (group, tag) = (header.book, header.step);
        let fits = |running: &Running<M::Chunk>| {
            (running.call.group, running.call.request) == (group, Request::ReceiveAny { tag })
        };
        let is_member = self.groups.get(&group).is_some_and(|group| group.members.contains(&from));
        let Some(at) = self.any_source.iter().position(fits).filter(|_| is_member) else { return Ok(()) };
        // What is kept may be a request for a message instead.
        if !self.mail[from.index()].has_early(Key { group, call: MESSAGES, tag }) {
            return Ok(());
        }
        let running = self.any_source.remove(at);
        self.receive_from(running, from, tag, memory)
    }

    fn receive_from(
        &mut self,
        mut running: Running<M::Chunk>,
        from: Rank,
        tag: u32,
        memory: &mut M,
    ) -> Result<(), Error> {
        let members = &self.groups[&running.call.group].members;
        let Some(index) = members.iter().position(|member| *member == from) else { return Ok(()) };
        let from = index as u32;
        running.call.request = Request::Receive { from, tag };
        self.effects.sources.push((running.call.id, from));
        self.message(running, memory)
    }

    /// Whether a receive from anybody can be met by nobody but this peer.
    pub(super) fn waits_for_it_alone(&self, peer: Rank) -> bool {
        self.any_source.iter().any(|running| self.others(running.call.group) == [peer])
    }
}
