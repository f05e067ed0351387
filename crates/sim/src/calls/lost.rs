//! Calls of which a rank is lost in the middle.
//!
//! There is no time here, so nobody is timed out: what is checked is what the engines rely on when a connection ends.
//! The nodes go on as far as they can, without an error; what completes has the expected bits; and every call that does
//! not complete waits for the lost rank, or for one whose own calls do. So the loss reaches everybody who needs to know,
//! and no call hangs on ranks that are all there.

use super::{Link, World};
use crate::random::Random;
use penstock_core::types::Rank;
use std::collections::BTreeSet;

/// What became of the calls of the ranks that are left.
#[derive(Debug, Clone, Copy, Default)]
pub struct Loss {
    /// Calls that are complete.
    pub complete: u64,
    /// Calls that wait for the lost rank itself.
    pub direct: u64,
    /// Calls that wait only for others which wait for it.
    pub indirect: u64,
}

/// Draws a job from `seed`, as [`super::run`] does, loses one of its ranks at some moment, and lets the others go on.
///
/// # Errors
/// What went wrong, with the seed.
pub fn run_with_a_loss(seed: u64) -> Result<Loss, String> {
    let mut random = Random::new(seed);
    let ranks = random.pick(&[2, 3, 4, 5, 7, 8, 17]);
    let count = random.between(1, if ranks > 8 { 6 } else { 25 });
    World::new(random, ranks)
        .and_then(|mut world| {
            for _ in 0..count {
                world.draw_call();
            }
            let moves = world.random.magnitude(1, 4000);
            world.advance(moves)?;
            world.lose();
            world.advance(u64::MAX)?;
            world.check_loss()
        })
        .map_err(|error| format!("seed {seed}, {ranks} ranks: {error}"))
}

impl World {
    /// From now on a rank does nothing. What it has written may arrive, up to some frame.
    fn lose(&mut self) {
        let lost = self.random.below(u64::from(self.ranks)) as usize;
        self.lost = Some(Rank(lost as u32));
        for to in 0..self.ranks as usize {
            let Link { writing, arriving, placed } = &mut self.links[lost * self.ranks as usize + to];
            writing.clear();
            arriving.truncate(self.random.below(arriving.len() as u64 + 1) as usize);
            if arriving.is_empty() {
                // Perhaps after the header, before the payload.
                *placed = None;
            }
        }
    }

    fn check_loss(&self) -> Result<Loss, String> {
        let mut loss = Loss::default();
        // By rank: whom its calls wait for.
        let mut waits: Vec<BTreeSet<Rank>> = vec![BTreeSet::new(); self.ranks as usize];
        let mut open = Vec::new();
        for (rank, programs) in self.programs.iter().enumerate().filter(|(rank, _)| !self.is_lost(*rank)) {
            if programs.iter().any(|program| !program.is_empty()) {
                return Err(format!("rank {rank} has not begun all of its calls"));
            }
        }
        for (id, part) in self.parts.iter().enumerate().filter(|(_, part)| !self.is_lost(part.rank.index())) {
            if part.complete {
                loss.complete += 1;
                continue;
            }
            let missing = self.nodes[part.rank.index()].call_missing(id as u64);
            waits[part.rank.index()].extend(&missing);
            open.push((id, missing));
        }
        let reached = self.waiting_for_the_lost(&waits);
        for (id, missing) in open {
            let part = &self.parts[id];
            if missing.iter().any(|rank| self.is_lost(rank.index())) {
                loss.direct += 1;
            } else if missing.iter().any(|rank| reached.contains(rank)) {
                loss.indirect += 1;
            } else {
                let (rank, request) = (part.rank, part.call.request);
                return Err(format!(
                    "rank {rank}: {request:?} waits for {missing:?}, and none of those for rank {:?}",
                    self.lost
                ));
            }
        }
        Ok(loss)
    }

    /// The ranks whose calls wait for the lost one, or for each other and in the end for it.
    fn waiting_for_the_lost(&self, waits: &[BTreeSet<Rank>]) -> BTreeSet<Rank> {
        let mut reached: BTreeSet<Rank> = self.lost.into_iter().collect();
        loop {
            let more: Vec<Rank> = (0..self.ranks)
                .map(Rank)
                .filter(|rank| !reached.contains(rank) && !waits[rank.index()].is_disjoint(&reached))
                .collect();
            if more.is_empty() {
                return reached;
            }
            reached.extend(more);
        }
    }
}
