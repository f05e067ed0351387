//! What the engine tells a lane. Waking a lane costs a system call and a change of threads, so it is done only if the lane
//! sleeps, and for submissions that are followed by more only once some have come together.

use crate::call::Handle;
use crate::memory::Chunk;
use crate::observed::{LaneCounts, Rings};
use crate::shared::OpenBook;
use crate::transport::Transport;
use mio::Waker;
use parking_lot::{Mutex, MutexGuard, RwLock};
use penstock_core::calls::Call;
use penstock_core::exchange::{Field, SliceEntry};
use penstock_core::life::Question;
use penstock_core::optimizer::Update;
use penstock_core::recovery::GivenToOthers;
use penstock_core::types::GroupId;
use penstock_core::{BookId, Error, Header, Rank, SliceId, Step, Submission, TensorId};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// One thing for a lane to do.
pub(crate) enum Command {
    /// A book is open from now on.
    Open(Arc<OpenBook>),
    /// Each layer's place in the forward pass.
    Places { book: BookId, places: Arc<[u32]> },
    /// This rank's part in the next round of a tensor, and when the program said so.
    Submit { submission: Submission<Chunk>, at_ns: u64 },
    /// A control frame to all other ranks, or a blob to all other workers.
    Control { header: Header, payload: Option<Chunk> },
    /// This rank contributes no more until all have left.
    Leave,
    /// A connection has come about.
    Connected { peer: Rank, transport: Transport },
    /// The line rate is known, or it is another one: bind the connections to it.
    LineRate,
    /// Say goodbye to each peer once it has everything.
    Goodbye,
    /// Ask all other ranks, and say what this lane has to say itself.
    Ask(Question),
    /// The job has failed: tell the peers, and do nothing else any more. Again, if there is a better verdict.
    Failed { header: Header, reason: Chunk },
    /// The program has come to the end of a step of a book whose owners update it.
    Proceed(Arc<Word>),
    /// And from now on it need not say so: complete rounds are updated with at once.
    Order { word: Arc<Word>, reply: Sender<()> },
    /// Of what is kept of a tensor, take this.
    Load {
        book: BookId,
        tensor: TensorId,
        field: Field,
        updates: u64,
        whole: Chunk,
        reply: Sender<Result<(), Error>>,
    },
    /// Copy what is kept of a tensor, and say how often it was updated.
    Save {
        book: BookId,
        tensor: TensorId,
        field: Field,
        whole: Chunk,
        reply: Sender<Result<Option<u64>, Error>>,
    },
    /// By slice, the sum of the squares of what waits to be updated with.
    Squares { book: BookId, reply: Sender<Option<Vec<(SliceId, f64)>>> },
    /// What was counted?
    Count { reply: Sender<LaneCounts> },
    /// From now on keep what is observed in these rings, or not at all. How many slices have landed by now?
    Observe { rings: Option<Arc<Rings>>, reply: Sender<u64> },
    /// A group for calls.
    Group { id: GroupId, members: Vec<Rank> },
    /// This rank's part in a call.
    Call { call: Box<Call<Chunk>>, handle: Arc<Handle> },
    /// A new epoch has begun: what goes on of the last one.
    Recover(Box<Recovering>),
    /// End at once.
    Halt,
    /// Flush for a bounded time and end.
    Stop,
}

/// What goes on of the last epoch's rounds, as far as one lane goes.
#[derive(Default)]
pub(crate) struct Recovering {
    /// Results that this rank has and others lack, if anybody contributed, and their steps.
    pub(crate) gives: Vec<(GivenToOthers, Step, Option<Chunk>)>,
    /// Results that this rank lacks, and by what it has taken part.
    pub(crate) lacks: Vec<(GivenToOthers, Submission<Chunk>)>,
    /// Contributions that are made anew, for these slices.
    pub(crate) again: Vec<(Submission<Chunk>, Arc<[SliceId]>)>,
    /// What this rank kept.
    pub(crate) entries: Vec<(BookId, SliceId, SliceEntry<Chunk>)>,
    /// States that this rank has and others lack, or the other way round.
    pub(crate) states: Vec<GivenToOthers>,
    /// What the program has said, and for which slices.
    pub(crate) words: Vec<(Arc<Word>, VecDeque<SliceId>)>,
}

/// What the program says at the end of a step to those who update what they keep.
pub(crate) struct Word {
    pub(crate) book: BookId,
    pub(crate) step: Step,
    /// By tensor; nothing if the step is not made.
    pub(crate) updates: Option<Box<[Update]>>,
}

/// Submissions that more will follow are held until the line would take this long for them. By so much it may fall behind,
/// while it has nothing to send and the program computes what follows.
const HOLD_S: f64 = 0.0005;
/// The least that is held: as much as the lane writes at once, and [`HOLD_S`] at 1 Gbit/s.
const HOLD_BYTES_MIN: usize = 64 << 10;
/// The most: what waking the lane costs is little beside sending and summing so much.
const HOLD_BYTES_MAX: usize = 512 << 10;

struct Contents {
    commands: Vec<Command>,
    /// Bytes of submissions that the lane has not been woken for.
    held_bytes: usize,
    /// With so many it is woken.
    hold_bytes: usize,
    asleep: bool,
    closed: bool,
}

/// The commands that a lane has not taken yet.
pub(crate) struct Mailbox {
    contents: Mutex<Contents>,
    /// Until the lane has ended: whoever keeps the mailbox keeps no descriptor.
    waker: RwLock<Option<Waker>>,
}

impl Mailbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            contents: Mutex::new(Contents {
                commands: Vec::new(),
                held_bytes: 0,
                hold_bytes: HOLD_BYTES_MIN,
                asleep: false,
                closed: false,
            }),
            waker: RwLock::new(Some(waker)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock()
    }

    /// The lane has so much of the line, in bytes per second.
    pub(crate) fn set_rate(&self, bytes_per_s: f64) {
        self.lock().hold_bytes = ((bytes_per_s * HOLD_S) as usize).clamp(HOLD_BYTES_MIN, HOLD_BYTES_MAX);
    }

    /// Leaves a command. Once the lane has ended, nothing happens.
    pub(crate) fn send(&self, command: Command) {
        self.leave([command], HOLD_BYTES_MAX);
    }

    /// As `send`, but a sleeping lane need not see the command before [`Mailbox::flush`], unless it and those held before
    /// are many bytes. A lane that is awake takes it with everything else.
    pub(crate) fn send_held(&self, command: Command, bytes: usize) {
        self.leave([command], bytes);
    }

    /// As `send_held`, for several with so many bytes in all.
    pub(crate) fn send_all_held(&self, commands: Vec<Command>, bytes: usize) {
        self.leave(commands, bytes);
    }

    fn leave(&self, commands: impl IntoIterator<Item = Command>, bytes: usize) {
        let mut contents = self.lock();
        if contents.closed {
            return;
        }
        contents.commands.extend(commands);
        contents.held_bytes = contents.held_bytes.saturating_add(bytes);
        if contents.held_bytes >= contents.hold_bytes {
            self.rouse(contents);
        }
    }

    /// Nothing is held back any more.
    pub(crate) fn flush(&self) {
        let contents = self.lock();
        if !contents.commands.is_empty() {
            self.rouse(contents);
        }
    }

    fn rouse(&self, mut contents: MutexGuard<'_, Contents>) {
        contents.held_bytes = 0;
        let asleep = std::mem::replace(&mut contents.asleep, false);
        drop(contents);
        if asleep {
            // Fails only if the event counter cannot be written; then the lane finds the command at its next tick.
            let _ = self.waker.read().as_ref().map(Waker::wake);
        }
    }

    /// The lane takes all commands, in exchange for an empty vector.
    pub(crate) fn take(&self, into: &mut Vec<Command>) {
        let mut contents = self.lock();
        contents.asleep = false;
        contents.held_bytes = 0;
        std::mem::swap(&mut contents.commands, into);
    }

    /// Whether the lane may sleep: then the next command wakes it.
    pub(crate) fn try_sleep(&self) -> bool {
        let mut contents = self.lock();
        contents.asleep = contents.commands.is_empty();
        contents.asleep
    }

    /// The lane has ended: commands are dropped from now on.
    pub(crate) fn close(&self) {
        let mut contents = self.lock();
        contents.closed = true;
        let commands = std::mem::take(&mut contents.commands);
        drop(contents);
        drop(commands);
        drop(self.waker.write().take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use crate::memory::Pool;
    use crate::shared::Shared;
    use mio::{Events, Poll, Token};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    /// A mailbox of a lane that sleeps, and the poll it sleeps in.
    fn asleep() -> (Mailbox, Poll) {
        let poll = Poll::new().unwrap();
        let mailbox = Mailbox::new(Waker::new(poll.registry(), Token(0)).unwrap());
        assert!(mailbox.try_sleep());
        (mailbox, poll)
    }

    fn woken(poll: &mut Poll) -> bool {
        let mut events = Events::with_capacity(1);
        poll.poll(&mut events, Some(Duration::ZERO)).unwrap();
        !events.is_empty()
    }

    #[test]
    fn a_command_wakes_the_lane_once() {
        let (mailbox, mut poll) = asleep();
        mailbox.send(Command::Leave);
        assert!(woken(&mut poll));
        mailbox.send(Command::Leave);
        assert!(!woken(&mut poll), "the lane is awake already");
    }

    #[test]
    fn what_is_held_wakes_the_lane_when_flushed() {
        let (mailbox, mut poll) = asleep();
        mailbox.flush();
        mailbox.send_held(Command::Leave, 100);
        assert!(!woken(&mut poll));
        mailbox.flush();
        assert!(woken(&mut poll));
        let mut taken = Vec::new();
        mailbox.take(&mut taken);
        assert_eq!(taken.len(), 1);
    }

    #[test]
    fn what_is_held_wakes_the_lane_when_the_line_would_take_long_for_it() {
        let gbit = 1e9 / 8.0;
        for (bytes_per_s, much) in [(0.1 * gbit, 64 << 10), (2.0 * gbit, 125_000), (400.0 * gbit, 512 << 10)]
        {
            let (mailbox, mut poll) = asleep();
            mailbox.set_rate(bytes_per_s);
            for _ in 0..4 {
                assert!(!woken(&mut poll));
                mailbox.send_held(Command::Leave, much / 4);
            }
            assert!(woken(&mut poll), "{bytes_per_s} bytes/s: {much} bytes were held");
        }
    }

    #[test]
    fn a_lane_does_not_fall_asleep_over_what_is_held() {
        let (mailbox, mut poll) = asleep();
        mailbox.take(&mut Vec::new());
        mailbox.send_held(Command::Leave, 1);
        assert!(!mailbox.try_sleep());
        assert!(!woken(&mut poll));
    }

    /// Who sees it may drop its engine, which stops the lanes: the peers would hear of no reason.
    #[test]
    fn nobody_sees_a_failure_before_it_is_in_the_mailboxes() {
        const PATIENCE: Duration = Duration::from_secs(30);
        let (mailbox, _poll) = asleep();
        let mailbox = Arc::new(mailbox);
        let shared = Arc::new(Shared::new(Rank(0), 2, 2, 1, Pool::new(0)));
        shared.start(&[Arc::clone(&mailbox)], vec!["a:1".into(), "b:2".into()]);
        // Whoever fails the job gets no further than to this mailbox.
        let held = mailbox.lock();
        let failing = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.fail(Failure::config("broken"))
        });
        let end = Instant::now() + PATIENCE;
        while !shared.is_failing() {
            assert!(Instant::now() < end, "the job never fails");
            std::thread::yield_now();
        }
        let (see, seen) = mpsc::channel();
        std::thread::spawn(move || see.send(shared.check()));
        let early = seen.recv_timeout(Duration::from_millis(200));
        assert!(early.is_err(), "seen while no lane knows of it: {early:?}");
        drop(held);
        assert!(seen.recv_timeout(PATIENCE).unwrap().is_err());
        assert!(matches!(mailbox.lock().commands[..], [Command::Failed { .. }]));
        failing.join().unwrap();
    }
}
