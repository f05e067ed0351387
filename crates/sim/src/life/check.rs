//! What must hold at the end of a job: everybody has ended in time, and all who ended with an error name the same rank, the
//! right one, for the right reason.

use super::scenario::{Fault, MS, PEER_TIMEOUT_NS, SECOND, Scenario, Style};
use penstock_core::life::{
    DEPARTURE_GRACE_NS, DOUBT_NS, Evidence, INQUIRY_NS, SETTLE_NS, SUSPICION_NS, Verdict,
};

/// How a rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// In order.
    Through,
    /// With this error, at this time.
    Failed(Verdict, u64),
    /// By the fault itself.
    Dead,
    /// Not at all.
    Stuck(String),
}

/// How long anything takes that depends on the machine alone: looks at the clock, links.
const SLACK_NS: u64 = SECOND;

/// # Errors
/// What does not hold.
pub(super) fn check(scenario: &Scenario, ends: &[End], fault_ns: Option<u64>) -> Result<(), String> {
    if let Some((rank, End::Stuck(where_))) =
        ends.iter().enumerate().find(|(_, end)| matches!(end, End::Stuck(_)))
    {
        return Err(format!("rank {rank} never ends: {where_}"));
    }
    let failed: Vec<(usize, &Verdict, u64)> = ends.iter().enumerate().filter_map(failure).collect();
    let Some((first, verdict, _)) = failed.first().copied() else {
        return check_nobody(scenario, ends, fault_ns);
    };
    // Of two who are alone, or before the others begin, and do not hear each other, each can only blame the other.
    let alone = failed.len() <= 2 || !scenario.meshed;
    let pair = matches!(scenario.fault, Fault::Cut(..) | Fault::Reset(..)) && alone;
    if let Some((rank, other, _)) =
        failed.iter().find(|(_, other, _)| !pair && other.culprits != verdict.culprits)
    {
        return Err(format!("rank {first} raises {verdict:?}, but rank {rank} raises {other:?}"));
    }
    let (may, evidence, limit_ns) = expected(scenario);
    let named: Vec<u32> = verdict.culprits.iter().map(|rank| rank.0).collect();
    let right = match scenario.fault {
        Fault::Skip(..) => may.iter().all(|rank| named.contains(rank)),
        // A wait that ends before the silence is noticed names them both, or the one that is waited for.
        Fault::Cut(..) | Fault::Reset(..) => named.iter().all(|rank| may.contains(rank)),
        _ => named == may,
    };
    if !right {
        return Err(format!("{:?}, but they blame {named:?}: {verdict:?}", scenario.fault));
    }
    if let Some((rank, verdict, _)) =
        failed.iter().find(|(_, verdict, _)| !evidence.contains(&verdict.evidence))
    {
        return Err(format!(
            "{:?}, but rank {rank} has seen {:?}: {verdict:?}",
            scenario.fault, verdict.evidence
        ));
    }
    let by_ns = fault_ns.unwrap_or(0).saturating_add(limit_ns + SETTLE_NS + SLACK_NS);
    if let Some((rank, _, at_ns)) = failed.iter().find(|(_, _, at_ns)| *at_ns > by_ns) {
        return Err(format!("rank {rank} ends at {} ms, and should by {} ms", at_ns / MS, by_ns / MS));
    }
    if let Fault::Raise(rank, _) = scenario.fault
        && let Some((_, _, at_ns)) = failed.iter().find(|(who, _, _)| *who == rank as usize)
        && fault_ns != Some(*at_ns)
    {
        return Err(format!("rank {rank} has failed itself, and hears of that only at {} ms", at_ns / MS));
    }
    // With a rank that hangs before it has left, nobody can be through.
    let through = ends.iter().filter(|end| **end == End::Through).count();
    if through > 0 && scenario.style == Style::Join && matches!(scenario.fault, Fault::Hang(..)) {
        return Err("some ranks have seen all leave, others have not".into());
    }
    Ok(())
}

fn failure((rank, end): (usize, &End)) -> Option<(usize, &Verdict, u64)> {
    if let End::Failed(verdict, at_ns) = end { Some((rank, verdict, *at_ns)) } else { None }
}

/// Nobody has raised anything: was there anything to raise?
fn check_nobody(scenario: &Scenario, ends: &[End], fault_ns: Option<u64>) -> Result<(), String> {
    if matches!(scenario.fault, Fault::Garble(..)) && fault_ns.is_some() {
        return Err(format!("{:?}, and nobody minds", scenario.fault));
    }
    let must = match scenario.fault {
        // A stop this long is silence, whenever the last heartbeat came.
        Fault::Stop(_, _, for_ns) => for_ns > PEER_TIMEOUT_NS + SLACK_NS,
        Fault::Hang(..) => true,
        // A rank that is done when it is hit is needed by nobody.
        _ => false,
    };
    if must && ends.iter().filter(|end| **end == End::Through).count() < ends.len() {
        return Err(format!("{:?}, and nobody says so: {ends:?}", scenario.fault));
    }
    Ok(())
}

/// Whom errors may name, on what evidence, and how long after the fault they come.
fn expected(scenario: &Scenario) -> (Vec<u32>, Vec<Evidence>, u64) {
    let operation_ns = scenario.operation_ns;
    let waited_ns = operation_ns + INQUIRY_NS + DOUBT_NS;
    // A rank may compute before it comes to where it waits for the one at fault.
    let longest_ns = scenario.compute_ns.iter().map(|rounds| rounds.iter().sum::<u64>()).max().unwrap_or(0);
    let apart = scenario.style == Style::Join || scenario.window.iter().any(|window| *window > 1);
    let begun_ns = if apart { longest_ns } else { 7 * SECOND };
    let (may, mut evidence, mut limit_ns) = match scenario.fault {
        Fault::None | Fault::Sleep(..) => (vec![], vec![], 0),
        Fault::Kill(rank, _) => (vec![rank], vec![Evidence::Ended], SUSPICION_NS),
        Fault::Raise(rank, _) => (vec![rank], vec![Evidence::Own], 0),
        Fault::Stop(rank, _, for_ns) => {
            // Shorter than the limits by more than the heartbeats' distance: nobody may notice.
            let short = for_ns < (PEER_TIMEOUT_NS * 4 / 5 - SLACK_NS / 2).min(operation_ns - SECOND);
            (if short { vec![] } else { vec![rank] }, vec![Evidence::Silent], PEER_TIMEOUT_NS)
        }
        Fault::Hang(rank, _) => (vec![rank], vec![Evidence::Absent], operation_ns + DOUBT_NS + begun_ns),
        Fault::Garble(rank, ..) => (vec![rank], vec![Evidence::Frame], 0),
        Fault::Skip(rank, _) => {
            (vec![rank], vec![Evidence::Circle, Evidence::Absent, Evidence::Departed], 6 * waited_ns)
        }
        Fault::Depart(rank, _) => {
            // The others come to need it, at the latest after all that they compute. Who needs it directly knows at once, and with
            // everybody connected that settles at once.
            let at_once = scenario.style == Style::Direct && scenario.meshed;
            let limit_ns = longest_ns + DEPARTURE_GRACE_NS + SECOND;
            let limit_ns = if at_once { longest_ns.saturating_sub(SETTLE_NS) } else { limit_ns };
            (vec![rank], vec![Evidence::Departed], limit_ns)
        }
        Fault::Cut(one, other, _) => (vec![one, other], vec![Evidence::Silent], PEER_TIMEOUT_NS),
        Fault::Reset(one, other, _) => (vec![one, other], vec![Evidence::Ended], SUSPICION_NS),
    };
    if !scenario.meshed {
        // Who has no connection to it learns only that it cannot be reached, or that it does not answer.
        evidence.extend([Evidence::Silent, Evidence::Unanswered, Evidence::Absent, Evidence::Ended]);
        limit_ns += longest_ns + 2 * waited_ns + PEER_TIMEOUT_NS;
    }
    let waits = matches!(scenario.fault, Fault::Skip(..) | Fault::Depart(..));
    // A spoke that another connects to, to ask it, may be about to end.
    evidence.extend((waits && scenario.style == Style::Hub).then_some(Evidence::Ended));
    if operation_ns < PEER_TIMEOUT_NS && (waits || evidence.contains(&Evidence::Silent)) {
        evidence.extend([Evidence::Unanswered, Evidence::Absent, Evidence::Circle]);
    }
    (may, evidence, limit_ns)
}
