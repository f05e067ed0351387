//! What a lane does with the line rate once it is known, and how its connections correct it: one system call each per look.

use super::Lane;
use crate::line::LOOK;
use std::time::Instant;

impl Lane {
    /// The rate to which connections are to be bound: once it is known, and while there are books. The bound is for the
    /// sake of their urgent slices, and costs a butterfly of 53 MB between 8 hosts a seventh of its time.
    pub(super) fn bound_bytes_per_s(&self) -> Option<f64> {
        self.shared.line_bytes_per_s().filter(|_| self.has_books())
    }

    /// Binds the connections to the line rate, if they are to be bound.
    pub(super) fn bind_connections(&mut self) {
        if let Some(bytes_per_s) = self.bound_bytes_per_s() {
            for connection in self.peers.iter_mut().filter_map(|peer| peer.connection.as_mut()) {
                connection.bind_send_buffer(bytes_per_s);
            }
        }
    }

    /// Now and then: lets every connection learn from what got through since the last look.
    pub(super) fn look_at_line(&mut self) {
        if self.now.saturating_duration_since(self.looked) < LOOK {
            return;
        }
        // From before the last look to after this one: what is seen is rather too slow than too fast.
        let last = std::mem::replace(&mut self.looked, Instant::now());
        for connection in self.peers.iter_mut().filter_map(|peer| peer.connection.as_mut()) {
            if let Some(bytes_per_s) = connection.correct_rate(last) {
                self.shared.note_rate(bytes_per_s);
            }
        }
    }
}
