//! What the engine tells a lane. Waking a lane costs a system call, so it is done only if the lane sleeps.

use crate::memory::Chunk;
use crate::shared::OpenBook;
use mio::Waker;
use penstock_core::node::Counters;
use penstock_core::{BookId, Header, Op, Rank, Seq, Step, TensorId};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// One thing for a lane to do.
pub(crate) enum Command {
    /// A book is open from now on.
    Open(Arc<OpenBook>),
    /// Each layer's place in the forward pass.
    Places { book: BookId, places: Arc<[u32]> },
    /// This rank's part in the next exchange of a tensor.
    Submit { book: BookId, tensor: TensorId, seq: Seq, step: Step, op: Op, memory: Chunk, absent: bool },
    /// A control frame to all other ranks.
    Control { header: Header, payload: Option<Chunk> },
    /// This rank contributes no more until all have left.
    Leave,
    /// A connection has come about.
    Connected { peer: Rank, stream: std::net::TcpStream },
    /// Say goodbye to each peer once it has everything.
    Goodbye,
    /// The job has failed: tell the peers, and do nothing else any more.
    Failed { header: Header, reason: Chunk },
    /// Who has not contributed to the slices of a tensor that this rank owns?
    Missing { book: BookId, tensor: TensorId, reply: Sender<Vec<Rank>> },
    /// What was counted?
    Count { reply: Sender<Counters> },
    /// Flush for a bounded time and end.
    Stop,
}

struct Contents {
    commands: Vec<Command>,
    asleep: bool,
    closed: bool,
}

/// The commands that a lane has not taken yet.
pub(crate) struct Mailbox {
    contents: Mutex<Contents>,
    waker: Waker,
}

impl Mailbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self { contents: Mutex::new(Contents { commands: Vec::new(), asleep: false, closed: false }), waker }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a command. Once the lane has ended, nothing happens.
    pub(crate) fn send(&self, command: Command) {
        let mut contents = self.lock();
        if contents.closed {
            return;
        }
        contents.commands.push(command);
        let asleep = std::mem::replace(&mut contents.asleep, false);
        drop(contents);
        if asleep {
            // Fails only if the event counter cannot be written; then the lane finds the command at its next tick.
            let _ = self.waker.wake();
        }
    }

    /// The lane takes all commands, in exchange for an empty vector.
    pub(crate) fn take(&self, into: &mut Vec<Command>) {
        let mut contents = self.lock();
        contents.asleep = false;
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
    }
}
