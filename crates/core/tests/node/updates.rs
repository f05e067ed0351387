//! Owners that apply an optimizer, by lengths: what waits for the program's word, what is said meanwhile, and what does not fit.

use super::*;
use penstock_core::exchange::Field;
use penstock_core::optimizer::{Optimizer, Rule};
use penstock_core::roles::{Answered, Fold, MustBeIn, Roles, Rules, Staleness, Stragglers};
use penstock_core::{Error, Members, Slicing};

const ADAM: Optimizer = Optimizer {
    lr: 0.1,
    weight_decay: 0.0,
    maximize: false,
    rule: Rule::Adam { betas: [0.9, 0.99], eps: 1e-8, amsgrad: false, decoupled: false },
};
const UPDATE: Update = Update { optimizer: ADAM, factor: 1.0 };

fn roles(rules: Rules) -> Roles {
    Roles { rules, ..Roles::alike(Members::all(2)) }
}

fn deal(roles: &Roles, dtype: Dtype, wire: Dtype) -> Result<Book, Error> {
    let tensor = |i: u32| Tensor::new(format!("t{i}"), i, dtype, 1024).with_wire(wire);
    let layers = (0..8).map(|i| format!("layer{i}")).collect();
    Book::deal("model", layers, (0..8).map(tensor).collect(), roles, Slicing::fixed(4096, 1))
}

/// A rank of two, with 8 slices of 4 KiB that are owned in turn; those owned here have a value.
fn updating(rank: u32, window_bytes: u64) -> Bench {
    let mut bench = Bench::new(rank, 2, window_bytes);
    let rules = Rules { fold: Fold::Updated, ..Rules::default() };
    let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    for tensor in 0..8 {
        bench.node.load(0, tensor, (Field::Value, 0), &user_memory(4096)).unwrap();
    }
    bench
}

impl Bench {
    fn proceed(&mut self, slice: u32, step: u32, update: Option<Update>) -> Result<(), Error> {
        self.node.step(Event::Proceed { book: 0, slice, step, update }, &mut self.actions)
    }

    fn kinds(&mut self, peer: u32) -> Vec<Kind> {
        self.frames(peer).into_iter().map(|frame| frame.header.kind).collect()
    }

    /// Slices whose sums wait for the program's word, since the last time.
    fn waits(&mut self) -> Vec<u32> {
        let waits = self.actions.drain(..).filter_map(|action| match action {
            Action::Waits { slice, .. } => Some(slice),
            _ => None,
        });
        waits.collect()
    }
}

#[test]
fn the_answer_waits_for_the_word_and_who_contributed_hears_that_it_is_in() {
    let mut bench = updating(0, 1 << 20);
    bench.submit(0, 1, Op::Average, false);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    assert_eq!(bench.kinds(1), [Kind::Summed]);
    assert_eq!((bench.completed(), bench.waits()), (0, vec![0]));
    // Four values; the contribution has gone, and the sum is in this rank's own memory.
    assert_eq!(bench.node.memory().scratch.get(), 4);
    bench.proceed(0, 1, Some(UPDATE)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 1));
    assert_eq!(bench.node.memory().scratch.get(), 4 + 2, "and two states");
    assert_eq!(bench.node.save(0, 0, Field::State(1), &user_memory(4096)).unwrap(), Some(1));
    assert_eq!(bench.node.save(0, 0, Field::State(2), &user_memory(4096)).unwrap(), None);
    assert_eq!(bench.node.save(0, 1, Field::Value, &user_memory(4096)).unwrap(), None, "rank 1 keeps it");
}

#[test]
fn a_value_that_is_lent_is_neither_copied_nor_written() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let rules = Rules { fold: Fold::Updated, ..Rules::default() };
    // Tensor 0 travels as it is; of tensor 2, which does not, the owner keeps a value that is not rounded.
    for (number, wire, copies) in [(0, Dtype::F32, 0), (1, Dtype::F16, 1)] {
        let book = deal(&roles(rules.clone()), Dtype::F32, wire).unwrap();
        bench.node.open_book(number, Arc::new(book), &mut bench.actions).unwrap();
        let (mine, before) = (user_memory(4096), bench.node.memory().scratch.get());
        bench.node.load(number, 0, (Field::Lent, 5), &mine).unwrap();
        assert_eq!(bench.node.memory().scratch.get() - before, copies);
        assert_eq!(bench.node.memory().is_shared(&mine), copies == 0);
        assert_eq!(bench.node.save(number, 0, Field::Value, &user_memory(4096)).unwrap(), Some(5));
    }
    let lent = user_memory(4096);
    bench.node.load(0, 0, (Field::Lent, 0), &lent).unwrap();
    let before = bench.node.memory().scratch.get();
    bench.submit(0, 1, Op::Average, false);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    bench.proceed(0, 1, Some(UPDATE)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Summed, Kind::Answer], 1));
    // The contribution has gone, and the result is in this rank's own memory of the gradient: there are two states.
    assert_eq!(bench.node.memory().scratch.get(), before + 2);
}

#[test]
fn a_word_that_comes_first_spares_the_other_frame() {
    let mut bench = updating(0, 1 << 20);
    bench.proceed(0, 1, Some(UPDATE)).unwrap();
    bench.submit(0, 1, Op::Average, false);
    assert_eq!(bench.completed(), 0);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 1));
    assert_eq!(bench.waits(), []);
}

#[test]
fn a_step_that_is_not_made_is_answered_without_a_value() {
    let mut bench = updating(0, 1 << 20);
    bench.submit(0, 1, Op::Sum, false);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Sum)).unwrap();
    bench.proceed(0, 1, None).unwrap();
    assert_eq!(bench.kinds(1), [Kind::Summed, Kind::AnswerAbsent]);
    let told: Vec<bool> = bench
        .actions
        .drain(..)
        .filter_map(|action| match action {
            Action::Complete { present, .. } => Some(present),
            _ => None,
        })
        .collect();
    assert_eq!(told, [false]);
    // Nobody contributes: no update either, and nothing is said before.
    bench.submit(0, 2, Op::Sum, true);
    bench.frame(1, exchange(Kind::PushAbsent, 0, 2, Op::Sum)).unwrap();
    assert_eq!((bench.kinds(1), bench.waits()), (vec![], vec![0]));
    bench.proceed(0, 2, Some(UPDATE)).unwrap();
    assert_eq!(bench.kinds(1), [Kind::AnswerAbsent]);
    assert_eq!(bench.node.save(0, 0, Field::Value, &user_memory(4096)).unwrap(), Some(0));
}

#[test]
fn a_contribution_that_is_in_the_sum_frees_its_window() {
    let mut bench = updating(0, 4096);
    for tensor in [7, 5, 3, 1] {
        bench.submit(tensor, 1, Op::Average, false);
    }
    let pushed = |bench: &mut Bench| bench.frames(1).iter().map(|f| f.header.slice).collect::<Vec<_>>();
    let mut all = pushed(&mut bench);
    assert!(all.len() < 4, "the window holds back {all:?}");
    while all.len() < 4 {
        let oldest = all[0];
        all.rotate_left(1);
        bench.frame(1, exchange(Kind::Summed, oldest, 1, Op::Average)).unwrap();
        all.extend(pushed(&mut bench));
    }
    assert_eq!(bench.completed(), 0, "there is no result yet");
    for slice in [1, 3, 5, 7] {
        bench.frame(1, exchange(Kind::Answer, slice, 1, Op::Average)).unwrap();
    }
    assert_eq!(bench.completed(), 4);
}

#[test]
fn squares_are_those_of_all_that_is_owned_or_none() {
    let mut bench = updating(1, 1 << 20);
    assert_eq!(bench.node.squares(0), None);
    for slice in [1, 3, 5, 7] {
        assert_eq!(bench.node.squares(0), None, "slice {slice} is missing");
        bench.submit(slice, 1, Op::Average, slice == 3);
        let kind = if slice == 3 { Kind::PushAbsent } else { Kind::Push };
        bench.frame(0, exchange(kind, slice, 1, Op::Average)).unwrap();
    }
    assert_eq!(bench.node.squares(0).unwrap(), [(1, 4096.0), (3, 0.0), (5, 4096.0), (7, 4096.0)]);
    bench.proceed(5, 1, Some(UPDATE)).unwrap();
    assert_eq!(bench.node.squares(0), None);
}

#[test]
fn words_that_do_not_fit_are_refused() {
    let summed = || {
        let mut bench = updating(0, 1 << 20);
        bench.submit(0, 3, Op::Average, false);
        bench.frame(1, exchange(Kind::Push, 0, 3, Op::Average)).unwrap();
        bench
    };
    let said = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert!(
        said(summed().proceed(0, 2, None))
            .contains("step 2: it is told to go on, but the contributions here are those to step 3")
    );
    assert!(said(summed().proceed(1, 3, None)).contains("slice 1 of book 0 is not kept here"));
    let mut bench = updating(0, 1 << 20);
    bench.proceed(2, 1, None).unwrap();
    assert!(said(bench.proceed(2, 2, None)).contains("waits for contributions to step 1 yet"));
    let mut bench = summed();
    bench.proceed(0, 3, Some(UPDATE)).unwrap();
    bench.submit(0, 4, Op::Average, false);
    bench.frame(1, exchange(Kind::Push, 0, 4, Op::Average)).unwrap();
    let rule = Rule::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false };
    let other = Update { optimizer: Optimizer { rule, ..ADAM }, factor: 1.0 };
    assert!(said(bench.proceed(0, 4, Some(other))).contains("after 1 updates 2 states are kept"));
    // A word for a later step than the contributions are of.
    let mut bench = updating(0, 1 << 20);
    bench.proceed(0, 2, None).unwrap();
    bench.submit(0, 1, Op::Average, true);
    assert!(said(bench.frame(1, exchange(Kind::PushAbsent, 0, 1, Op::Average))).contains("those to step 1"));
    // In a book of sums there is nothing to say.
    assert!(
        said(Bench::with_book(0, 2, 1 << 20).proceed(0, 1, None))
            .contains("told to update what it does not keep")
    );
}

#[test]
fn what_was_never_loaded_is_not_updated_and_states_follow_their_value() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let book =
        deal(&roles(Rules { fold: Fold::Updated, ..Rules::default() }), Dtype::F32, Dtype::F32).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    let memory = user_memory(4096);
    let error = bench.node.load(0, 0, (Field::State(0), 1), &memory).unwrap_err();
    assert!(error.to_string().contains("state 0 comes after a value and 0 states"), "{error}");
    bench.proceed(0, 1, Some(UPDATE)).unwrap();
    bench.submit(0, 1, Op::Average, false);
    let error = bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap_err();
    assert!(
        error.to_string().contains("layer layer0 of book 0, step 1: there is no value to update"),
        "{error}"
    );
}

#[test]
fn only_gradients_of_real_numbers_update_a_value() {
    let mut bench = updating(0, 1 << 20);
    let push = exchange(Kind::Push, 0, 1, Op::Max);
    assert!(bench.node.destination(Rank(1), &push).is_err());
    let memory = user_memory(4096);
    let gives = Gives::Whole(Op::Copy);
    let event = Event::Submit(Submission { book: 0, tensor: 0, seq: 1, step: 1, memory, gives });
    let error = bench.node.step(event, &mut bench.actions).unwrap_err().to_string();
    assert!(
        error.contains("Copy of layer layer0 of book 0: only a sum or an average is a gradient"),
        "{error}"
    );
    let updated = Rules { fold: Fold::Updated, ..Rules::default() };
    let said = |rules, dtype, wire| deal(&roles(rules), dtype, wire).unwrap_err().to_string();
    let error = said(updated.clone(), Dtype::Bf16, Dtype::Bf16);
    assert!(error.contains("\"t0\" is bf16; values of f32 and f64 can be updated"), "{error}");
    assert!(deal(&roles(updated.clone()), Dtype::F32, Dtype::Bf16).is_ok());
    let rules = Rules { answered: Answered::WhoAsks, ..updated.clone() };
    assert!(said(rules, Dtype::F32, Dtype::F32).contains("all must be answered"));
    let staleness = Some(Staleness { of: Members::all(2), most: 1 });
    let rules = Rules { staleness, ..updated.clone() };
    assert!(said(rules, Dtype::F32, Dtype::F32).contains("where each contribution is a round of its own"));
    let rules = Rules {
        must_be_in: MustBeIn::Nobody,
        fold: Fold::Kept,
        answered: Answered::Before,
        ..Rules::default()
    };
    assert!(said(rules, Dtype::F32, Dtype::F32).contains("each contribution is an update of its own"));
    let stragglers = Some(Stragglers { enough: 3, after_ns: 1 });
    let rules = Rules { stragglers, ..updated };
    assert!(said(rules, Dtype::F32, Dtype::F32).contains("3 of 2 that contribute are enough"));
    // What is in a sum elsewhere is nothing that a book of sums waits for.
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    bench.submit(1, 1, Op::Average, false);
    assert!(bench.frame(1, exchange(Kind::Summed, 1, 1, Op::Average)).is_err());
}

#[test]
fn a_standing_order_needs_no_word() {
    let mut bench = updating(0, 1 << 20);
    let order = |bench: &mut Bench, slice| {
        bench.node.step(Event::Order { book: 0, slice, update: UPDATE }, &mut bench.actions).unwrap();
    };
    order(&mut bench, 0);
    bench.submit(0, 1, Op::Average, false);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 1));
    assert_eq!(bench.node.save(0, 0, Field::Value, &user_memory(4096)).unwrap(), Some(1));
    // Nobody contributes: nothing is updated.
    bench.submit(0, 2, Op::Average, true);
    bench.frame(1, exchange(Kind::PushAbsent, 0, 2, Op::Average)).unwrap();
    assert_eq!(bench.kinds(1), [Kind::AnswerAbsent]);
    assert_eq!(bench.node.save(0, 0, Field::Value, &user_memory(4096)).unwrap(), Some(1));
    // A sum that waits for a word already is updated with at once.
    bench.submit(2, 1, Op::Average, false);
    bench.frame(1, exchange(Kind::Push, 2, 1, Op::Average)).unwrap();
    assert_eq!(bench.kinds(1), [Kind::Summed]);
    order(&mut bench, 2);
    assert_eq!(bench.kinds(1), [Kind::Answer]);
    // Who owns nothing of it has nothing to update.
    let event = Event::Order { book: 0, slice: 1, update: UPDATE };
    assert!(bench.node.step(event, &mut bench.actions).is_err());
}

#[test]
fn contributions_one_by_one_need_an_order_first() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let rules = Rules {
        must_be_in: MustBeIn::Nobody,
        fold: Fold::Updated,
        answered: Answered::WhoAsks,
        ..Rules::default()
    };
    let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    let error = bench.frame(1, exchange(Kind::Push, 0, 1, Op::Sum)).unwrap_err().to_string();
    assert!(error.contains("rank 0 was not told how to update layer layer0 of book 0"), "{error}");
}

#[test]
fn who_contributes_too_far_ahead_hears_that_it_is_in_and_is_answered_when_the_slowest_has_come_after() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let staleness = Some(Staleness { of: Members::all(2), most: 0 });
    let rules = Rules { must_be_in: MustBeIn::Nobody, fold: Fold::Updated, staleness, ..Rules::default() };
    let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    bench.node.load(0, 0, (Field::Value, 0), &user_memory(4096)).unwrap();
    bench.node.step(Event::Order { book: 0, slice: 0, update: UPDATE }, &mut bench.actions).unwrap();
    let updates = |bench: &mut Bench| bench.node.save(0, 0, Field::Value, &user_memory(4096)).unwrap();
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    assert_eq!((bench.kinds(1), updates(&mut bench)), (vec![Kind::Summed], Some(1)));
    assert_eq!(bench.node.missing(0, 0), [Rank(0)]);
    bench.submit(0, 1, Op::Average, false);
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 1));
    // The owner itself is ahead.
    bench.submit(0, 2, Op::Average, false);
    assert_eq!((bench.completed(), updates(&mut bench)), (1, Some(3)), "no more than before");
    bench.frame(1, exchange(Kind::Push, 0, 2, Op::Average)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 2));
}

#[test]
fn who_has_nothing_for_a_step_has_come_to_it_and_a_question_of_the_last_step_is_no_new_one() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let staleness = Some(Staleness { of: Members::all(2), most: 0 });
    let rules = Rules { must_be_in: MustBeIn::Nobody, fold: Fold::Updated, staleness, ..Rules::default() };
    let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
    bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
    bench.node.load(0, 0, (Field::Value, 0), &user_memory(4096)).unwrap();
    bench.node.step(Event::Order { book: 0, slice: 0, update: UPDATE }, &mut bench.actions).unwrap();
    let question = |seq, step| Header { step, ..exchange(Kind::PushAbsent, 0, seq, Op::Average) };
    // Of no step, before the first, which is 1 here.
    bench.frame(1, question(1, u32::MAX)).unwrap();
    assert_eq!(bench.kinds(1), [Kind::Answer]);
    bench.submit(0, 1, Op::Average, false);
    assert_eq!((bench.completed(), bench.node.missing(0, 0)), (0, vec![Rank(1)]));
    bench.frame(1, question(2, 0)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 0));
    bench.frame(1, question(3, 1)).unwrap();
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 1));
    // And it does not run ahead with nothing.
    bench.frame(1, question(4, 2)).unwrap();
    assert_eq!((bench.kinds(1), bench.node.missing(0, 0)), (vec![], vec![Rank(0)]));
    bench.submit(0, 2, Op::Average, false);
    assert_eq!((bench.kinds(1), bench.completed()), (vec![Kind::Answer], 2));
    // Who has left is not waited for.
    bench.submit(0, 3, Op::Average, false);
    assert_eq!((bench.completed(), bench.node.missing(0, 0)), (2, vec![Rank(1)]));
    bench.frame(1, Header::control(Kind::Leave)).unwrap();
    assert_eq!(bench.completed(), 3);
}

#[test]
fn who_waits_for_an_answer_and_says_more_is_at_fault() {
    let (all, who_asks) = (Answered::All, Answered::WhoAsks);
    for (kind, answered) in [(Kind::PushAbsent, all), (Kind::Push, all), (Kind::PushAbsent, who_asks)] {
        let mut bench = Bench::new(0, 2, 1 << 20);
        let staleness = Some(Staleness { of: Members::all(2), most: 0 });
        let rules = Rules {
            must_be_in: MustBeIn::Nobody,
            fold: Fold::Updated,
            answered,
            staleness,
            ..Rules::default()
        };
        let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
        bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
        bench.node.load(0, 0, (Field::Value, 0), &user_memory(4096)).unwrap();
        bench.node.step(Event::Order { book: 0, slice: 0, update: UPDATE }, &mut bench.actions).unwrap();
        // It is ahead of rank 0, and has to wait; where only who asks is answered it asks for it.
        bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
        let mut seq = 1;
        if answered == Answered::WhoAsks {
            seq += 1;
            bench.frame(1, exchange(Kind::PushAbsent, 0, seq, Op::Average)).unwrap();
        }
        let told = bench.kinds(1);
        assert!(!told.contains(&Kind::Answer), "{told:?}");
        let error = bench.frame(1, exchange(kind, 0, seq + 1, Op::Average)).unwrap_err().to_string();
        assert!(error.contains("from rank 1: its last one is not answered"), "{error}");
    }
}

#[derive(Debug, Clone)]
enum Draw {
    Submit { tensor: u32, absent: bool },
    Push { slice: u32, absent: bool, seq: u32 },
    Answer { kind: Kind, slice: u32, seq: u32 },
    Proceed { slice: u32, step: u32, update: bool },
    Load { tensor: u32, state: Option<u8> },
    Send,
}

fn draw() -> impl Strategy<Value = Draw> {
    let (slice, seq, update) = (0u32..4, 1u32..4, any::<bool>());
    let kinds = prop::sample::select(vec![Kind::Summed, Kind::Answer, Kind::AnswerAbsent]);
    prop_oneof![
        4 => (slice.clone(), any::<bool>()).prop_map(|(tensor, absent)| Draw::Submit { tensor, absent }),
        4 => (slice.clone(), any::<bool>(), seq.clone()).prop_map(|(slice, absent, seq)| Draw::Push { slice, absent, seq }),
        4 => (kinds, slice.clone(), seq.clone()).prop_map(|(kind, slice, seq)| Draw::Answer { kind, slice, seq }),
        4 => (slice.clone(), seq, update).prop_map(|(slice, step, update)| Draw::Proceed { slice, step, update }),
        1 => (slice, prop::option::of(0u8..3)).prop_map(|(tensor, state)| Draw::Load { tensor, state }),
        4 => Just(Draw::Send),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(2000)))]

    /// Whatever comes, in whatever order: an error or not, never a panic, and what is not kept comes back.
    #[test]
    fn any_words_and_frames_are_taken_or_refused(draws in prop::collection::vec(draw(), 1..60)) {
        let mut bench = updating(0, 5000);
        let scratch = bench.node.memory().scratch.clone();
        let mut seqs = [0; 4];
        for draw in draws {
            let result = match draw {
                Draw::Submit { tensor, absent } => {
                    seqs[tensor as usize] += 1;
                    let (seq, memory, gives) = (seqs[tensor as usize], user_memory(4096), Gives::unless_absent(Op::Sum, absent));
                    let event = Event::Submit(Submission { book: 0, tensor, seq, step: seq, memory, gives });
                    bench.node.step(event, &mut bench.actions)
                }
                Draw::Push { slice, absent, seq } => {
                    let kind = if absent { Kind::PushAbsent } else { Kind::Push };
                    bench.frame(1, exchange(kind, slice, seq, Op::Sum))
                }
                Draw::Answer { kind, slice, seq } => bench.frame(1, exchange(kind, slice, seq, Op::Sum)),
                Draw::Proceed { slice, step, update } => bench.proceed(slice, step, update.then_some(UPDATE)),
                Draw::Load { tensor, state } => {
                    let field = state.map_or(Field::Value, Field::State);
                    bench.node.load(0, tensor, (field, 0), &user_memory(4096))
                }
                Draw::Send => {
                    bench.frames(1);
                    Ok(())
                }
            };
            if result.is_err() {
                break;
            }
        }
        drop(bench);
        prop_assert_eq!(scratch.get(), 0);
    }
}

#[test]
fn what_nobody_who_is_left_gave_is_zero_in_a_sum_and_stays_in_a_copy() {
    for (op, recoverable, cleared) in [(Op::Average, true, 1), (Op::Copy, true, 0), (Op::Average, false, 0)] {
        let mut bench = Bench::new(1, 2, 1 << 20);
        let rules = Rules { recoverable, ..Rules::default() };
        let book = deal(&roles(rules), Dtype::F32, Dtype::F32).unwrap();
        bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
        bench.submit(0, 1, op, true);
        bench.frame(0, exchange(Kind::AnswerAbsent, 0, 1, op)).unwrap();
        let found = bench.node.memory().cleared.get();
        assert_eq!((bench.completed(), found), (1, cleared), "{op:?}, recoverable: {recoverable}");
    }
}
