//! Where the time with something in flight went: hidden under the program's own work, or spent waiting.

use std::time::{Duration, Instant};

/// What the program does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Computing gradients.
    Backward,
    /// Computing the loss.
    Forward,
    /// Anything else.
    Other,
}

impl std::str::FromStr for Phase {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "backward" => Ok(Self::Backward),
            "forward" => Ok(Self::Forward),
            "other" => Ok(Self::Other),
            _ => Err(format!("unknown phase {name:?}: expected backward, forward or other")),
        }
    }
}

/// Time with at least one tensor in flight, by what the program did meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub struct Busy {
    /// While it computed gradients.
    pub backward: Duration,
    /// While it computed the loss.
    pub forward: Duration,
    /// While it waited for a result.
    pub stalled: Duration,
    /// While it did anything else.
    pub other: Duration,
}

/// The clock behind [`Busy`].
#[derive(Debug)]
pub(crate) struct Accounting {
    in_flight: u64,
    waiting: u32,
    phase: Phase,
    since: Instant,
    busy: Busy,
}

impl Accounting {
    pub(crate) fn new(now: Instant) -> Self {
        Self { in_flight: 0, waiting: 0, phase: Phase::Other, since: now, busy: Busy::default() }
    }

    /// Books the time since the last change.
    fn settle(&mut self, now: Instant) {
        if self.in_flight > 0 {
            let place = match (self.waiting > 0, self.phase) {
                (true, _) => &mut self.busy.stalled,
                (false, Phase::Backward) => &mut self.busy.backward,
                (false, Phase::Forward) => &mut self.busy.forward,
                (false, Phase::Other) => &mut self.busy.other,
            };
            *place += now.saturating_duration_since(self.since);
        }
        self.since = now;
    }

    /// So many tensors are in flight from now on.
    pub(crate) fn submitted(&mut self, count: u64, now: Instant) {
        self.settle(now);
        self.in_flight += count;
    }

    /// How many tensors are in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    pub(crate) fn completed(&mut self, now: Instant) {
        self.settle(now);
        self.in_flight -= 1;
    }

    pub(crate) fn set_phase(&mut self, phase: Phase, now: Instant) {
        self.settle(now);
        self.phase = phase;
    }

    pub(crate) fn wait_began(&mut self, now: Instant) {
        self.settle(now);
        self.waiting += 1;
    }

    pub(crate) fn wait_ended(&mut self, now: Instant) {
        self.settle(now);
        self.waiting -= 1;
    }

    /// Whether the program waits for a result.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    pub(crate) fn busy(&mut self, now: Instant) -> Busy {
        self.settle(now);
        self.busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_flight_goes_to_what_the_program_did() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut accounting = Accounting::new(start);
        accounting.set_phase(Phase::Backward, at(1)); // nothing in flight: not counted
        accounting.submitted(1, at(2));
        accounting.submitted(1, at(3));
        assert_eq!(accounting.in_flight(), 2);
        accounting.set_phase(Phase::Forward, at(5));
        accounting.completed(at(6));
        accounting.wait_began(at(9));
        accounting.completed(at(14));
        accounting.wait_ended(at(20));
        let busy = accounting.busy(at(30));
        let seconds = [busy.backward, busy.forward, busy.stalled, busy.other].map(|d| d.as_secs());
        assert_eq!((seconds, accounting.is_waiting()), ([3, 4, 5, 0], false));
    }
}
