//! Jobs drawn from a seed in which ranks hang, die, stop, leave and fail, over links that are slow, cut or reset.

use crate::random::Random;
use penstock_core::life::REACH_NS;

pub(super) const MS: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1000 * MS;
/// Silence after which a peer counts as lost.
pub(super) const PEER_TIMEOUT_NS: u64 = 5 * SECOND;
/// Longest waits: longer than a rank may compute, and be stopped besides; and, where ranks compute for less, shorter than that
/// silence.
const OPERATION_TIMEOUTS_NS: [u64; 2] = [14 * SECOND, SECOND];
/// By how much ranks begin apart at most, where waits are long and where they are short.
const APART_NS: [u64; 2] = [REACH_NS - 100 * MS, 200 * MS];

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// This rank's process ends without a word.
    Kill(u32, u64),
    /// This rank's program raises, and says so.
    Raise(u32, u64),
    /// This rank's process is stopped at a time, for so long.
    Stop(u32, u64, u64),
    /// All processes are stopped at a time, for so long: their machine sleeps.
    Sleep(u64, u64),
    /// This rank's program hangs before its round of this number; its lanes live.
    Hang(u32, u32),
    /// This rank's program leaves this round out.
    Skip(u32, u32),
    /// This rank's program ends in order before this round.
    Depart(u32, u32),
    /// From a time on nothing gets through between these two ranks.
    Cut(u32, u32, u64),
    /// The connections between these two ranks end.
    Reset(u32, u32, u64),
    /// This rank sends the other an abort that makes no sense.
    Garble(u32, u32, u64),
}

/// A rule of life that is left out on purpose, so that tests can show that the checkers find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Omission {
    /// The first verdict that a rank holds is raised, without waiting for the others'.
    SettleAtOnce,
    /// A rank that holds a verdict takes up no better one.
    KeepTheFirst,
    /// Verdicts of others are not passed on.
    PassNothingOn,
    /// The answers of others are ignored: whoever is waited for is blamed.
    AskNobody,
    /// What answers show is not held back.
    DoubtNothing,
    /// What comes while everybody is asked who is late does not end the question.
    NeverWithdraw,
    /// An owner does not say whose contributions it lacks.
    OwnersSayNothing,
    /// Whoever takes part in anything is said to stand in a call.
    AllAreBlocked,
    /// The end of a connection means nothing.
    DeafToEnds,
    /// So does a goodbye.
    DeafToGoodbyes,
    /// There are no heartbeats.
    NoHeartbeats,
    /// Silence counts though this process itself was stopped.
    NeverAway,
    /// A process that was stopped for too long blames those whom it finds gone.
    NeverItself,
    /// A rank that has left is blamed though nobody needs it.
    NeedEverybody,
    /// Those who have left do not hear of the progress of others.
    DeafToProgress,
    /// Whatever a heartbeat says counts as progress.
    AnythingIsProgress,
    /// Heartbeats are as rare where waits are short as elsewhere.
    SlowHeartbeats,
    /// The end of a connection is not held back.
    BlameAtOnce,
    /// A verdict settles only when all have told it, however long that takes.
    WaitForEverybody,
    /// A rank's own failure settles as any other.
    AskWhetherItFailed,
    /// An abort that makes no sense is nobody's fault.
    DeafToNonsense,
    /// The first lane that answers a question speaks for its rank.
    OneLaneAnswers,
    /// Goodbyes do not wait for what is owed.
    HastyGoodbye,
    /// Who takes up its first verdict does not connect to those with whom it has no connection.
    DialNobody,
    /// A process that ends takes connections and tells nothing.
    DeafFlush,
    /// It does not wait for connections that are being made.
    ReachNobody,
    /// Silence means nothing.
    DeafToSilence,
    /// Nor does that a peer cannot be connected to.
    DeafToTheUnreachable,
    /// That a call takes the part of a rank that has said goodbye is not looked for.
    NeedNobody,
    /// A rank that has said goodbye is not missed where nothing moves any more.
    MissNobody,
    /// A verdict settles without waiting for what those may tell others to whom this rank has no connection.
    SettleWithoutStrangers,
    /// A rank that waits too long for the others' goodbyes asks who is late.
    AskForGoodbyes,
    /// Time in which a process was stopped counts for its waits.
    CountStops,
    /// The head of a group that lacks its members does not say who owes it an answer.
    HeadsSayNothing,
}

/// How the ranks wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Everybody sends to everybody.
    Direct,
    /// Everybody sends to an owner, another one in each round, who answers when all have come.
    Owners,
    /// As `Owners`, but one rank owns everything, and nobody else has a connection.
    Hub,
    /// As `Owners`, but in two groups, the second of which begins with this rank: everybody sends to the first of its group, its
    /// head, and heads, who own rounds in turn, send to each other when their groups have come.
    Groups(u32),
    /// Ranks go on alone, with different numbers of rounds, and wait at the end until all have left.
    Join,
}

/// A whole job.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) ranks: u32,
    pub(super) lanes: u32,
    pub(super) style: Style,
    /// Connections exist when the ranks begin; or else they are made when they are needed.
    pub(super) meshed: bool,
    /// By rank, when its lanes begin.
    pub(super) begin_ns: Vec<u64>,
    /// Longest wait.
    pub(super) operation_ns: u64,
    /// By rank, how long it computes before each round.
    pub(super) compute_ns: Vec<Vec<u64>>,
    /// By rank, in which order its program begins the rounds.
    pub(super) order: Vec<Vec<u32>>,
    /// By rank, with how many of them begun and not complete it waits: with 1 every round is a call that blocks.
    pub(super) window: Vec<usize>,
    /// By sender and receiver.
    pub(super) delay_ns: Vec<Vec<u64>>,
    pub(super) jitter_ns: u64,
    /// Frames that fit into a link until they are read.
    pub(super) room: usize,
    /// How long a frame of an exchange may wait to be written.
    pub(super) owed_ns: u64,
    /// How long a process takes to end after its error.
    pub(super) exit_ns: u64,
    pub(super) fault: Fault,
}

/// Draws a job.
pub(super) fn draw(seed: u64) -> Scenario {
    let mut random = Random::new(seed);
    let random = &mut random;
    let ranks = random.between(2, 6) as u32;
    let style =
        random.pick(&[Style::Direct, Style::Direct, Style::Owners, Style::Owners, Style::Hub, Style::Join]);
    let ahead = style != Style::Join && random.chance(300);
    let rounds = random.between(2, if ahead { 8 } else { 5 });
    // Who begins the second of two rounds first waits while others compute before both, and may be stopped or begin late besides.
    let longest_ns = random.pick(&[20 * MS, 300 * MS, if ahead { 2 } else { 6 } * SECOND]);
    let compute_ns: Vec<Vec<u64>> = (0..ranks)
        .map(|_| {
            let rounds = if style == Style::Join { random.between(1, 4 * rounds) } else { rounds };
            (0..rounds).map(|_| random.magnitude(1000, longest_ns)).collect()
        })
        .collect();
    let (order, window) =
        compute_ns.iter().map(|rounds| draw_order(random, rounds.len() as u32, ahead)).unzip();
    let most_ns = random.magnitude(10_000, 5 * MS);
    let mut delay_ns: Vec<Vec<u64>> =
        (0..ranks).map(|_| (0..ranks).map(|_| random.magnitude(1000, most_ns)).collect()).collect();
    let (one, other) = two(random, ranks);
    if random.chance(400) {
        delay_ns[one as usize][other as usize] = 50 * MS;
        delay_ns[other as usize][one as usize] = 50 * MS;
    }
    let meshed = random.chance(500);
    let short = !ahead && longest_ns <= OPERATION_TIMEOUTS_NS[1] / 3 && random.chance(400);
    let apart_ns = APART_NS[usize::from(short)];
    let begin_ns: Vec<u64> =
        (0..ranks).map(|_| if meshed { 0 } else { random.magnitude(1000, apart_ns) }).collect();
    let fault = draw_fault(random, ranks, (style, ahead, meshed), &compute_ns, &begin_ns);
    let scenario = Scenario {
        meshed,
        begin_ns,
        operation_ns: OPERATION_TIMEOUTS_NS[usize::from(short)],
        room: random.pick(&[usize::MAX, usize::MAX, 1, 2, 5]),
        ranks,
        lanes: random.pick(&[1, 1, 2]),
        style,
        compute_ns,
        order,
        window,
        delay_ns,
        jitter_ns: random.magnitude(1000, 10 * MS),
        owed_ns: random.magnitude(1000, 100 * MS),
        exit_ns: random.magnitude(1000, SECOND),
        fault,
    };
    // A head goes ahead of its group only where all may.
    if style == Style::Owners && ahead && random.chance(500) {
        let second = random.between(1, u64::from(ranks) - 1) as u32;
        return Scenario { style: Style::Groups(second), ..scenario };
    }
    scenario
}

/// One after the other; or, where ranks go ahead, most rounds without waiting, or two of them in the other order: those who begin
/// these in order must not wait between them.
fn draw_order(random: &mut Random, rounds: u32, ahead: bool) -> (Vec<u32>, usize) {
    let mut order: Vec<u32> = (0..rounds).collect();
    if !ahead {
        return (order, 1);
    }
    if random.chance(500) {
        return (order, random.between(2, 8) as usize);
    }
    order.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
    (order, 1)
}

fn two(random: &mut Random, ranks: u32) -> (u32, u32) {
    let one = random.below(u64::from(ranks)) as u32;
    let other = (one + 1 + random.below(u64::from(ranks) - 1) as u32) % ranks;
    (one, other)
}

fn draw_fault(
    random: &mut Random,
    ranks: u32,
    (style, ahead, meshed): (Style, bool, bool),
    compute_ns: &[Vec<u64>],
    begin_ns: &[u64],
) -> Fault {
    let (rank, other) = two(random, ranks);
    let rounds = compute_ns[rank as usize].len() as u64;
    let round = random.below(rounds) as u32;
    let at_ns = random.magnitude(1000, compute_ns[rank as usize].iter().sum::<u64>() + 1001);
    let at_ns = begin_ns[rank as usize] + at_ns;
    // Around the limit, and well below.
    let stop_ns = match random.below(3) {
        0 => random.magnitude(MS, PEER_TIMEOUT_NS / 2),
        _ => random.between(PEER_TIMEOUT_NS * 7 / 10, PEER_TIMEOUT_NS * 14 / 10),
    };
    // Between two ranks alone nobody can say which of them is at fault, and a hub's silence is not told from its spokes'.
    let pairs = ranks > 2 && matches!(style, Style::Direct | Style::Owners);
    // And ranks that make calls in different orders wait for each other in a circle as soon as one makes another call less.
    let kinds = match style {
        Style::Join => 6,
        _ if ahead => 6,
        _ if pairs => 10,
        _ => 8,
    };
    match random.below(kinds) {
        // A connection that is being made while they sleep has taken too long.
        0 if meshed && random.chance(500) => Fault::Sleep(at_ns, random.between(2 * SECOND, 30 * SECOND)),
        0 => Fault::None,
        1 => Fault::Kill(rank, at_ns),
        2 => Fault::Raise(rank, at_ns),
        3 => Fault::Stop(rank, at_ns, stop_ns),
        4 => Fault::Hang(rank, round),
        5 => Fault::Garble(rank, other, at_ns),
        6 => Fault::Skip(rank, round),
        7 => Fault::Depart(rank, round),
        8 => Fault::Cut(rank, other, at_ns),
        _ => Fault::Reset(rank, other, at_ns),
    }
}
