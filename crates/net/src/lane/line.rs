//! What a lane contributes to knowing the line rate, and what it does once that is known: a few system calls per round.

use super::Lane;
use crate::line::{ROUND, Seen};
use std::time::{Duration, Instant};

/// A lane's last look at its connections.
#[derive(Default)]
pub(super) struct Look {
    round: u64,
    /// Before the first connection was looked at; `None`: no rate was known.
    began: Option<Instant>,
}

impl Lane {
    /// Binds the connections to the line rate, if there is one.
    pub(super) fn bind_connections(&self) {
        if let Some(bytes_per_s) = self.shared.line_bytes_per_s() {
            for connection in self.peers.iter().filter_map(|peer| peer.connection.as_ref()) {
                connection.bind_flight(bytes_per_s);
            }
        }
    }

    /// How long the lane may sleep: rounds end at the same time on all lanes. After a failure nobody looks any more.
    pub(super) fn until_round_ends(&self) -> Duration {
        if self.failed.is_some() {
            return Duration::MAX;
        }
        let ends = ROUND * u32::try_from(self.look.round + 1).unwrap_or(u32::MAX);
        ends.saturating_sub(self.shared.age(self.now))
    }

    /// Once per round: tells what got through in it.
    pub(super) fn look_at_line(&mut self) {
        let round = (self.shared.age(self.now).as_millis() / ROUND.as_millis()) as u64;
        if round == self.look.round || self.failed.is_some() {
            return;
        }
        if self.shared.line_bytes_per_s().is_none() {
            self.look = Look { round, ..Look::default() };
            return;
        }
        let began = Instant::now();
        let (mut outside_bytes, mut inside_bytes, mut goes_outside) = (0, 0, false);
        for connection in self.peers.iter_mut().filter_map(|peer| peer.connection.as_mut()) {
            let delivered_bytes = connection.take_delivered_bytes();
            if connection.is_within_host {
                inside_bytes += delivered_bytes;
            } else {
                outside_bytes += delivered_bytes;
                goes_outside = true;
            }
        }
        let last = std::mem::replace(&mut self.look, Look { round, began: Some(began) });
        // The first look only says where counting begins.
        let Some(last_began) = last.began else { return };
        self.shared.look_at_line(Seen {
            round,
            // From before the last look to after this one: what is seen is rather too slow than too fast.
            elapsed: last_began.elapsed(),
            // What stays within the host does not pass its line, unless all of it does.
            delivered_bytes: if goes_outside { outside_bytes } else { inside_bytes },
        });
    }
}
