//! Journeys: what nodes let others see of each slice comes in an order that makes sense, and nothing of it is missing at the end.

use super::{Checker, Violation, check};
use penstock_core::observe::Point;
use penstock_core::types::{BookId, Rank, Seq, SliceId};
use penstock_core::wire::Header;
use std::collections::BTreeMap;

/// What one rank has let others see of one slice in one round.
#[derive(Debug, Default)]
struct Visit {
    submitted: bool,
    landed: bool,
    summed: bool,
    /// Whether a frame with a contribution, and one with a result, has arrived.
    arrived: [bool; 2],
}

/// Frames of one slice in one round from one rank to another: how many were queued, were begun, and have arrived.
#[derive(Debug, Default)]
struct Transit {
    queued: u32,
    begun: u32,
    arrived: u32,
}

/// A slice and a round.
type Name = (BookId, SliceId, Seq);

/// All journeys of a run.
#[derive(Debug, Default)]
pub struct Journeys {
    visits: BTreeMap<(Name, Rank), Visit>,
    /// By sender, receiver and whether the frames carry results.
    transits: BTreeMap<(Name, Rank, Rank, bool), Transit>,
}

impl Journeys {
    /// A rank has let others see this of a slice.
    ///
    /// # Errors
    /// [`Checker::Journey`] if something that comes before it was not seen, or it was seen already.
    pub fn see(
        &mut self,
        rank: Rank,
        point: Point,
        header: &Header,
        peer: Option<Rank>,
    ) -> Result<(), Violation> {
        let name = (header.book, header.slice, header.seq);
        let visit = self.visits.entry((name, rank)).or_default();
        let result = !header.kind.takes_part();
        let holds = match point {
            Point::Submitted => !std::mem::replace(&mut visit.submitted, true),
            // The head of a group passes on what has come, also when its own program has left.
            Point::Queued => visit.submitted || visit.arrived[0],
            Point::FirstByteOut => true,
            Point::Arrived => {
                visit.arrived[usize::from(result)] = true;
                true
            }
            Point::Summed => {
                visit.summed = true;
                visit.submitted || visit.arrived[0]
            }
            // What has nothing in it was not summed; of collectives, results are passed on.
            Point::Answered => header.payload_bytes == 0 || visit.summed || visit.arrived[1],
            Point::Landed => visit.submitted && !std::mem::replace(&mut visit.landed, true),
            Point::Applied => visit.landed,
        };
        let holds = holds && peer.is_none_or(|peer| self.moved(name, rank, peer, point, result));
        check(holds, Checker::Journey, || {
            let visit = &self.visits[&(name, rank)];
            format!(
                "rank {rank}, peer {peer:?}: {point:?} comes too early or again, for {header:?}: {visit:?}"
            )
        })
    }

    /// A frame has come this far; whether it may have.
    fn moved(&mut self, name: Name, rank: Rank, peer: Rank, point: Point, result: bool) -> bool {
        let (from, to) = if point == Point::Arrived { (peer, rank) } else { (rank, peer) };
        let transit = self.transits.entry((name, from, to, result)).or_default();
        match point {
            Point::Queued | Point::Answered => transit.queued += 1,
            Point::FirstByteOut => transit.begun += 1,
            Point::Arrived => transit.arrived += 1,
            Point::Submitted | Point::Summed | Point::Landed | Point::Applied => return false,
        }
        transit.queued >= transit.begun && transit.begun >= transit.arrived
    }

    /// At the end: what was submitted has landed, and what was queued has arrived.
    ///
    /// # Errors
    /// [`Checker::Journey`].
    pub fn finish(&self) -> Result<(), Violation> {
        for (name, visit) in &self.visits {
            check(visit.submitted == visit.landed, Checker::Journey, || {
                format!("{name:?} ends as {visit:?}")
            })?;
        }
        for (name, transit) in &self.transits {
            let all = transit.queued == transit.begun && transit.begun == transit.arrived;
            check(all, Checker::Journey, || format!("{name:?} ends as {transit:?}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Point::{Answered, Applied, Arrived, FirstByteOut, Landed, Queued, Submitted, Summed};
    use penstock_core::wire::Kind;

    const WHOLE: [(u32, Point, Kind, Option<u32>); 12] = [
        (1, Submitted, Kind::Push, None),
        (1, Queued, Kind::Push, Some(0)),
        (0, Submitted, Kind::Push, None),
        (1, FirstByteOut, Kind::Push, Some(0)),
        (0, Arrived, Kind::Push, Some(1)),
        (0, Summed, Kind::Push, None),
        (0, Answered, Kind::Answer, Some(1)),
        (0, Landed, Kind::Push, None),
        (0, FirstByteOut, Kind::Answer, Some(1)),
        (1, Arrived, Kind::Answer, Some(0)),
        (1, Landed, Kind::Answer, None),
        (1, Applied, Kind::Push, None),
    ];

    /// Whether this is a journey from end to end.
    fn holds(points: &[(u32, Point, Kind, Option<u32>)]) -> bool {
        let mut journeys = Journeys::default();
        let see = |&(rank, point, kind, peer): &(u32, Point, Kind, Option<u32>)| {
            let header = Header { seq: 1, payload_bytes: 4, ..Header::control(kind) };
            journeys.see(Rank(rank), point, &header, peer.map(Rank))
        };
        points.iter().try_for_each(see).and_then(|()| journeys.finish()).is_ok()
    }

    #[test]
    fn a_journey_is_whole_and_none_of_it_may_be_missing() {
        assert!(holds(&WHOLE));
        // The last step is the program's own; nothing comes after it.
        for missing in 0..WHOLE.len() - 1 {
            let rest = [&WHOLE[..missing], &WHOLE[missing + 1..]].concat();
            assert!(!holds(&rest), "without {:?}", WHOLE[missing]);
        }
    }

    #[test]
    fn no_point_comes_before_the_one_that_leads_to_it() {
        // Each with the one before it on its way, by their places above.
        for (before, after) in [(0, 1), (1, 3), (3, 4), (5, 6), (6, 8), (8, 9), (2, 7), (10, 11)] {
            let mut points = WHOLE;
            points[before..=after].rotate_right(1);
            assert!(!holds(&points), "{:?} before {:?}", WHOLE[after], WHOLE[before]);
        }
    }

    #[test]
    fn nothing_is_submitted_or_lands_twice() {
        for again in [0, 10] {
            let mut points = WHOLE.to_vec();
            points.insert(again, WHOLE[again]);
            assert!(!holds(&points), "{:?} twice", WHOLE[again]);
        }
    }
}
