//! All contributions to one round are of one step, or the ranks do not train alike.
//!
//! Ranks count their submissions by themselves, so a rank that does two backward passes where the others do one, or leaves out
//! a `step()`, still meets them in every round, and gradients of different steps would be averaged. Frames carry the step, which
//! tells.

use super::context::Site;
use crate::error::Error;
use crate::types::{Rank, Step};

/// The error that names the ranks at each step.
///
/// Most ranks are right; of as many at two steps those at the higher one, because what usually happens is that a rank leaves
/// something out. So every rank that knows the same steps names the same rank.
pub(super) fn out_of_step(site: &Site<'_>, steps: impl Iterator<Item = (Rank, Step)>) -> Error {
    let mut steps: Vec<(Step, Rank)> = steps.map(|(rank, step)| (step, rank)).collect();
    steps.sort_unstable();
    let groups: Vec<(Step, Vec<Rank>)> = steps
        .chunk_by(|one, other| one.0 == other.0)
        .map(|group| (group[0].0, group.iter().map(|(_, rank)| *rank).collect()))
        .collect();
    let usual = groups.iter().max_by_key(|(step, ranks)| (ranks.len(), *step)).map_or(0, |(step, _)| *step);
    let odd = groups.iter().filter(|(step, _)| *step != usual).flat_map(|(_, ranks)| ranks).min();
    let said: Vec<String> =
        groups.iter().map(|(step, ranks)| format!("{} at step {step}", are(ranks))).collect();
    let layer = site.layer;
    let reason = format!(
        "{} in the same round of layer {layer}: the ranks do not call backward() and step() equally often, or layers \
         that synchronise in forward. A rank does more backward passes per step than the others (use no_sync() on all of \
         them), has left out a step(), for a NaN for example, or has caught an exception in backward() and gone on; ranks \
         with fewer batches go under ps.join()",
        said.join(", ")
    );
    Error::Mismatch { rank: odd.copied().unwrap_or(site.rank), layer: layer.into(), step: usual, reason }
}

fn are(ranks: &[Rank]) -> String {
    let names: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    match &names[..] {
        [one] => format!("rank {one} is"),
        several => format!("ranks {} are", several.join(", ")),
    }
}
