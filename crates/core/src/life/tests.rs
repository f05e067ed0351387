//! One rank's view at a time; whole jobs are in the simulator.

use super::*;

/// Rank 0 of so many, connected to all others by one lane.
fn life(ranks: u32) -> Life {
    let mut life = Life::new(Rank(0), Members::all(ranks), 1);
    (1..ranks).for_each(|peer| life.connected(Rank(peer)));
    life
}

fn verdict(evidence: Evidence, accuser: u32, culprit: u32) -> Verdict {
    Verdict::new(evidence, None, Rank(accuser), vec![Rank(culprit)], format!("as rank {accuser} says"))
}

fn quiet(life: &mut Life, now_ns: u64) {
    life.look(now_ns, 0, |_| false);
}

#[test]
fn the_end_of_a_connection_becomes_a_verdict_that_all_tell() {
    let mut life = life(4);
    let ended = verdict(Evidence::Ended, 0, 3);
    life.ended(5, Rank(3), Some("its connection was closed".into()));
    quiet(&mut life, 5 + SUSPICION_NS - 1);
    assert_eq!(life.take_effects(), []);
    assert_eq!(life.deadline_ns(0), Some(5 + SUSPICION_NS));
    quiet(&mut life, 5 + SUSPICION_NS);
    let effects = life.take_effects();
    let [Effect::Tell(told)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((told.evidence, told.culprit()), (Evidence::Ended, Rank(3)));
    let now_ns = 5 + SUSPICION_NS + 1;
    life.aborted(now_ns, Rank(1), &told.encode());
    assert!(!life.is_settled(), "rank 2 may know better");
    // It has found the same at the same time, and will hear that rank 0 has.
    life.aborted(now_ns, Rank(2), &Verdict { accuser: Rank(2), ..ended }.encode());
    assert!(!life.is_settled());
    life.aborted(now_ns, Rank(2), &told.encode());
    assert!(!life.is_settled(), "rank 3 may live, and tell others");
    quiet(&mut life, 5 + SUSPICION_NS + SETTLE_INDIRECT_NS);
    assert_eq!(life.take_effects(), [Effect::Settled(told.clone())]);
}

#[test]
fn a_verdict_settles_at_once_when_everybody_has_told_the_same() {
    let mut life = life(3);
    let own = verdict(Evidence::Own, 1, 1);
    life.aborted(0, Rank(1), &own.encode());
    assert!(!life.is_settled());
    life.aborted(0, Rank(2), &own.encode());
    assert_eq!(life.take_effects(), [Effect::Tell(own.clone()), Effect::Settled(own)]);
}

#[test]
fn the_stronger_evidence_holds_then_the_earlier_step_then_the_lower_accuser() {
    let at = |step| Verdict { step, ..verdict(Evidence::Absent, 2, 1) };
    let order = [
        verdict(Evidence::Own, 2, 2),
        verdict(Evidence::Ended, 1, 2),
        verdict(Evidence::Ended, 2, 1),
        at(4),
        Verdict { accuser: Rank(0), ..at(5) },
        at(5),
    ];
    for (better, worse) in order.iter().zip(&order[1..]) {
        let mut life = life(5);
        life.aborted(0, Rank(1), &worse.encode());
        life.aborted(0, Rank(1), &better.encode());
        assert_eq!(life.verdict(), Some(better));
        life.aborted(0, Rank(1), &worse.encode());
        assert_eq!(life.verdict(), Some(better));
    }
}

#[test]
fn a_verdict_settles_in_bounded_time_whoever_is_silent() {
    let mut life = life(3);
    life.accuse(7, verdict(Evidence::Ended, 0, 2));
    quiet(&mut life, 7 + SETTLE_NS - 1);
    assert!(!life.is_settled());
    quiet(&mut life, 7 + SETTLE_NS);
    assert!(life.is_settled());
}

#[test]
fn where_some_are_not_connected_a_verdict_waits_for_word_through_others() {
    let mut life = Life::new(Rank(0), Members::all(3), 1);
    life.connected(Rank(1));
    life.aborted(7, Rank(1), &verdict(Evidence::Absent, 1, 1).encode());
    assert!(!life.is_settled());
    life.aborted(8, Rank(1), &verdict(Evidence::Ended, 2, 1).encode());
    quiet(&mut life, 7 + SETTLE_INDIRECT_NS);
    assert_eq!(life.verdict().map(|verdict| verdict.evidence), Some(Evidence::Ended));
    assert!(life.is_settled());
}

#[test]
fn its_own_failure_is_settled_at_once_and_nothing_comes_after_it() {
    let mut life = life(3);
    let own = verdict(Evidence::Own, 0, 0);
    life.accuse(0, own.clone());
    life.accuse(0, verdict(Evidence::Frame, 0, 1));
    life.aborted(0, Rank(1), &verdict(Evidence::Ended, 1, 0).encode());
    assert_eq!(life.take_effects(), [Effect::Tell(own.clone()), Effect::Settled(own)]);
}

#[test]
fn an_abort_that_makes_no_sense_is_the_senders_fault() {
    let mut life = life(2);
    life.aborted(0, Rank(1), &verdict(Evidence::Own, 1, 5).encode());
    let verdict = life.verdict().unwrap();
    assert_eq!((verdict.evidence, verdict.culprit()), (Evidence::Frame, Rank(1)));
}

#[test]
fn who_has_left_is_blamed_when_nothing_moves_and_it_is_needed() {
    let mut life = life(3);
    life.departed(10, Rank(2));
    let look = |life: &mut Life, now_ns, moved_ns, needed: bool| {
        life.look(now_ns, moved_ns, |_| needed);
        life.verdict().map(Verdict::culprit)
    };
    assert_eq!(look(&mut life, 10 + DEPARTURE_GRACE_NS, 0, false), None);
    assert_eq!(look(&mut life, 10 + DEPARTURE_GRACE_NS, 11, true), None);
    life.was_away(12, TimeAway { ns: 1, noticed: false });
    assert_eq!(look(&mut life, 11 + DEPARTURE_GRACE_NS, 11, true), None);
    assert_eq!(life.deadline_ns(11), Some(12 + DEPARTURE_GRACE_NS));
    assert_eq!(look(&mut life, 12 + DEPARTURE_GRACE_NS, 11, true), Some(Rank(2)));
}

fn expired(what: &str) -> Expired {
    Expired { about: Some((1, 2)), step: Some(3), what: what.into(), hint: "Look.".into() }
}

fn late(ranks: &[u32]) -> Reply {
    Reply { late: ranks.iter().copied().map(Rank).collect(), ..Reply::default() }
}

/// Rank 0 waits for rank 1, that for rank 2, which waits for nobody.
fn all_reply(life: &mut Life, now_ns: u64, number: u32) {
    life.replied(now_ns, Rank(0), number, late(&[1]));
    life.replied(now_ns, Rank(1), number, late(&[2]));
    life.replied(now_ns, Rank(2), number, Reply::default());
}

#[test]
fn a_question_ends_some_time_after_its_last_reply() {
    let mut life = life(3);
    assert_eq!(life.expired(0, &expired("timeout: a wait")).until_ns(), VERDICT_NS);
    let _ = life.expired(1, &expired("timeout: another"));
    let question = Question { number: 1, about: Some((1, 2)) };
    assert_eq!(Question::of(&question.header()), question);
    assert_eq!(life.take_effects(), [Effect::Ask(question)], "one at a time");
    assert_eq!(life.deadline_ns(0), Some(INQUIRY_NS));
    life.replied(5, Rank(1), 9, Reply::default());
    all_reply(&mut life, 7, 1);
    assert_eq!(life.deadline_ns(0), Some(7 + DOUBT_NS));
    quiet(&mut life, 7 + DOUBT_NS - 1);
    assert_eq!(life.verdict(), None);
    quiet(&mut life, 7 + DOUBT_NS);
    let verdict = life.verdict().unwrap();
    assert_eq!((verdict.evidence, verdict.step, verdict.culprit()), (Evidence::Absent, 3, Rank(2)));
    let begins = "timeout: a wait: it waits for rank 1; rank 1 itself waits for rank 2";
    assert!(verdict.reason.starts_with(begins), "{}", verdict.reason);
}

#[test]
fn who_does_not_answer_in_time_is_blamed() {
    let mut life = life(3);
    let _ = life.expired(0, &expired("timeout: a wait"));
    life.replied(1, Rank(0), 1, late(&[1]));
    life.replied(1, Rank(1), 1, late(&[2]));
    quiet(&mut life, INQUIRY_NS - 1);
    assert_eq!(life.verdict(), None);
    quiet(&mut life, INQUIRY_NS);
    let found = life.verdict().map(|verdict| (verdict.evidence, verdict.culprit()));
    assert_eq!(found, Some((Evidence::Unanswered, Rank(2))));
}

#[test]
fn what_comes_after_all_ends_the_question() {
    let mut life = life(3);
    let _ = life.expired(0, &expired("timeout: a wait"));
    life.came(0, &expired("timeout: another"));
    all_reply(&mut life, 1, 1);
    life.came(1, &expired("timeout: a wait"));
    quiet(&mut life, 1 + DOUBT_NS);
    assert_eq!(life.verdict(), None);
    let _ = life.expired(INQUIRY_NS, &expired("timeout: another"));
    let asked = Effect::Ask(Question { number: 2, about: Some((1, 2)) });
    assert_eq!(life.take_effects().last(), Some(&asked));
}

#[test]
fn waits_are_asked_about_one_after_the_other_and_each_as_often_as_it_is_waited_for() {
    let mut life = life(3);
    let numbers = |life: &mut Life| -> Vec<u32> {
        let asked = |effect| if let Effect::Ask(question) = effect { Some(question.number) } else { None };
        life.take_effects().into_iter().filter_map(asked).collect()
    };
    let (one, another) = (expired("timeout: a wait"), expired("timeout: another"));
    for overdue in [&one, &another, &another] {
        let _ = life.expired(0, overdue);
    }
    assert_eq!(numbers(&mut life), [1]);
    life.came(1, &one);
    assert_eq!(numbers(&mut life), [2], "another is asked about at once");
    life.came(2, &another);
    assert_eq!(numbers(&mut life), [3], "one thread waits no more, a second one does");
    life.came(3, &another);
    assert_eq!(numbers(&mut life), []);
    all_reply(&mut life, 4, 3);
    quiet(&mut life, 4 + DOUBT_NS);
    assert_eq!(life.verdict(), None);
}

#[test]
fn where_no_verdict_comes_either_the_rank_itself_is_at_fault() {
    let mut life = life(3);
    let mut wait = life.expired(5, &expired("timeout: a wait"));
    assert_eq!(life.over(&mut wait, 5 + VERDICT_NS - 1, u64::MAX), None);
    assert_eq!(life.over(&mut wait, 5 + VERDICT_NS, u64::MAX), Some(Over::Fail));
    let Fault { culprit, error } = expired("timeout: a wait").fault(Rank(0));
    assert_eq!((culprit, &error), (Rank(0), &crate::Error::Timeout("timeout: a wait".into())));
    let verdict = Verdict::of_error(&error, Some(culprit), None, Rank(0));
    assert_eq!((verdict.evidence, verdict.culprits), (Evidence::Unanswered, vec![Rank(0)]));
}

#[test]
fn a_process_that_was_away_asks_anew() {
    let mut life = life(3);
    let _ = life.expired(0, &expired("timeout: a wait"));
    all_reply(&mut life, 0, 1);
    life.was_away(INQUIRY_NS, TimeAway { ns: INQUIRY_NS, noticed: false });
    quiet(&mut life, INQUIRY_NS);
    assert_eq!(life.verdict(), None);
    let asked = Effect::Ask(Question { number: 2, about: Some((1, 2)) });
    assert_eq!(life.take_effects().last(), Some(&asked));
}

#[test]
fn who_is_stopped_between_its_goodbyes_has_not_left() {
    let mut life = Life::new(Rank(0), Members::all(2), 2);
    (0..2).for_each(|_| life.connected(Rank(1)));
    life.departed(10, Rank(1));
    life.look(10 + DEPARTURE_GRACE_NS, 0, |_| true);
    assert_eq!(life.verdict(), None);
    life.departed(20, Rank(1));
    life.look(20 + DEPARTURE_GRACE_NS, 0, |_| true);
    assert_eq!(life.verdict().map(|verdict| verdict.evidence), Some(Evidence::Departed));
}

#[test]
fn who_has_left_waits_as_long_as_anything_moves_anywhere() {
    let mut life = life(2);
    let mut wait = Wait::new(WaitKind::Leavers, 0, 100);
    life.heartbeat(5, Rank(1), 2);
    life.heartbeat(6, Rank(1), 2);
    life.heartbeat(7, Rank(1), 1);
    let mut until_ns = |life: &Life, moved_ns| {
        assert_eq!(life.over(&mut wait, 9, moved_ns), None);
        wait.until_ns()
    };
    assert_eq!(until_ns(&life, 4), 105, "an older number is no news");
    life.heartbeat(8, Rank(1), 3);
    assert_eq!(until_ns(&life, 4), 108);
    assert_eq!(until_ns(&life, 9), 109);
    life.was_away(10, TimeAway { ns: 1, noticed: false });
    assert_eq!(until_ns(&life, 9), 110);
    assert_eq!(life.over(&mut wait, 110, 9), Some(Over::Ask));
}

#[test]
fn who_was_away_for_too_long_and_finds_the_others_gone_blames_itself() {
    for noticed in [true, false] {
        let (itself, another) = ((Evidence::Silent, Rank(0)), |evidence| (evidence, Rank(1)));
        let found = |life: &mut Life| {
            quiet(life, 9 + SUSPICION_NS + INQUIRY_NS);
            life.verdict().map(|verdict| (verdict.evidence, verdict.culprit())).unwrap()
        };
        let back = || {
            let mut life = life(2);
            life.was_away(9, TimeAway { ns: 7, noticed });
            life
        };
        let mut life = back();
        life.ended(9, Rank(1), Some("it was closed".into()));
        assert_eq!(found(&mut life), if noticed { itself } else { another(Evidence::Ended) });
        let mut life = back();
        life.unreachable(9, verdict(Evidence::Silent, 0, 1));
        assert_eq!(found(&mut life), if noticed { itself } else { another(Evidence::Silent) });
        let mut life = back();
        let _ = life.expired(9, &expired("timeout: a wait"));
        life.replied(9, Rank(0), 1, late(&[1]));
        assert_eq!(found(&mut life), if noticed { itself } else { another(Evidence::Unanswered) });
        // Somebody goes on: it was not given up.
        let mut life = back();
        life.heartbeat(10 + SUSPICION_NS, Rank(1), 1);
        life.ended(10 + SUSPICION_NS, Rank(1), Some("it was closed".into()));
        assert_eq!(found(&mut life), another(Evidence::Ended));
    }
}

#[test]
fn what_a_peer_says_when_it_refuses_a_connection_is_known_at_once() {
    let mut life = life(3);
    life.unreachable(5, verdict(Evidence::Frame, 0, 2));
    assert_eq!(life.verdict().map(Verdict::culprit), Some(Rank(2)));
}

#[test]
fn that_a_peer_cannot_be_connected_to_is_held_back() {
    let mut life = life(3);
    life.unreachable(5, verdict(Evidence::Silent, 0, 2));
    assert_eq!(life.deadline_ns(0), Some(5 + SUSPICION_NS));
    life.aborted(6, Rank(1), &verdict(Evidence::Ended, 1, 1).encode());
    quiet(&mut life, 5 + SUSPICION_NS);
    assert_eq!(life.verdict().map(Verdict::culprit), Some(Rank(1)), "who it was after all");
}

#[test]
fn where_members_may_be_lost_a_verdict_ends_the_epoch_and_no_call_raises_it() {
    let mut life = life(3);
    life.goes_on_after_losses(0);
    let own = verdict(Evidence::Own, 1, 1);
    life.aborted(0, Rank(1), &own.encode());
    quiet(&mut life, SETTLE_NS);
    let end = Effect::EndEpoch { out: vec![Rank(1)], why: own.reason };
    assert_eq!(life.take_effects(), [end]);
    // Unless this rank is at fault itself.
    let mine = verdict(Evidence::Own, 0, 0);
    let mut life = self::life(3);
    life.goes_on_after_losses(0);
    life.accuse(0, mine.clone());
    assert_eq!(life.take_effects(), [Effect::Tell(mine.clone()), Effect::Settled(mine)]);
}

#[test]
fn no_wait_is_over_while_members_agree_and_none_counts_time_before_its_epoch() {
    let mut ending = life(2);
    ending.goes_on_after_losses(0);
    let mut wait = Wait::new(WaitKind::Result, 5, 100);
    ending.epoch_ends();
    assert_eq!(ending.over(&mut wait, 1000, 0), None);
    let mut next = life(2);
    next.goes_on_after_losses(1000);
    assert_eq!(next.over(&mut wait, 1099, 0), None);
    assert_eq!(next.over(&mut wait, 1100, 0), Some(Over::Ask));
}

/// Where members may be lost.
fn elastic(ranks: u32) -> Life {
    let mut life = life(ranks);
    life.goes_on_after_losses(0);
    life
}

/// Whom the members leave out of the next epoch by this rank's verdict.
fn left_out(life: &mut Life) -> Vec<Rank> {
    match &life.take_effects()[..] {
        [Effect::EndEpoch { out, .. }] => out.clone(),
        effects => panic!("{effects:?}"),
    }
}

#[test]
fn whom_a_rank_loses_in_epoch_after_epoch_while_nothing_comes_is_left_out() {
    let losing = |life: &mut Life| {
        life.accuse(0, verdict(Evidence::Silent, 0, 2));
        left_out(life)
    };
    let mut life = elastic(3);
    for _ in 0..SPARED_MAX {
        assert_eq!(losing(&mut life), []);
        life = life.next_epoch(0, Members::all(3).in_epoch(1));
    }
    let mut one_result = life.next_epoch(0, Members::all(3));
    let mut others = life.next_epoch(0, [0, 2].map(Rank).into_iter().collect());
    assert_eq!(losing(&mut life), [Rank(2)]);
    one_result.landed();
    assert_eq!((losing(&mut one_result), losing(&mut others)), (vec![], vec![]));
}

#[test]
fn its_own_failure_while_the_epoch_ends_is_told_in_the_next_one() {
    let mut life = elastic(3);
    life.accuse(0, verdict(Evidence::Ended, 0, 2));
    assert_eq!(left_out(&mut life), []);
    life.epoch_ends();
    let own = verdict(Evidence::Own, 0, 0);
    life.accuse(1, own.clone());
    life.accuse(2, verdict(Evidence::Own, 0, 0));
    assert_eq!(life.take_effects(), [Effect::Tell(own.clone()), Effect::Settled(own.clone())]);
    let mut next = life.next_epoch(3, [0, 1].map(Rank).into_iter().collect());
    assert!(next.is_settled());
    next.take_effects();
    next.lanes_begin();
    assert_eq!(next.take_effects(), [Effect::Tell(own)]);
    // Whose epoch has ended because of others has nothing to tell.
    let mut life = elastic(3);
    life.accuse(0, verdict(Evidence::Ended, 0, 2));
    let mut next = life.next_epoch(0, Members::all(2));
    next.lanes_begin();
    assert_eq!(next.verdict(), None);
    assert_eq!(next.take_effects(), []);
}
