//! A rank's program: what the front end and the user's loop do between two calls of the node.

use super::{Happening, World};
use crate::check::ledger::Completion;
use crate::check::{Checker, Violation, check};
use crate::memory::{Chunk, SimMemory};
use crate::program::{Instruction, Sabotage, Setup, Submission};
use crate::random::Random;
use penstock_core::Members;
use penstock_core::all_gather::AllGather;
use penstock_core::exchange::Field;
use penstock_core::life::WaitKind;
use penstock_core::node::Event;
use penstock_core::optimizer::Update;
use penstock_core::types::{BookId, Dtype, Rank, Seq, SliceId, TensorId};
use penstock_core::wire::{Header, Kind};
use penstock_core::{Gives, Route};
use std::collections::BTreeSet;

/// Where a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    Running,
    /// It has left and waits until all have.
    Left {
        agree: bool,
    },
    /// It waits for the others' sequence numbers.
    Agreeing,
    /// It is through and waits for the others' goodbyes.
    Finishing,
    Done,
    /// It ended with an error.
    Failed,
    /// Its process was killed.
    Dead,
}

/// One tensor on one rank.
#[derive(Debug)]
pub(super) struct Tensor {
    memory: Chunk,
    pub(super) seq: Seq,
    /// Slices whose result is not there yet.
    pub(super) remaining: u32,
    /// And those whose result is there.
    pub(super) complete: BTreeSet<SliceId>,
    /// What the slices said about whether anybody contributed.
    present: Option<bool>,
    /// Of a tensor that is gathered: what came, by rank, until the next submission.
    parts: Vec<Option<Vec<Chunk>>>,
    /// Memory of earlier contributions to it that may still be on its way.
    lent: Vec<Chunk>,
    /// Of a parameter whose owners may read its value here: what was put there last.
    value: Option<(Chunk, Option<Box<[u8]>>)>,
}

impl Tensor {
    fn is_released(&mut self) -> bool {
        self.lent.retain(Chunk::is_shared);
        self.lent.is_empty() && !self.memory.is_shared()
    }

    /// All of a result is in memory: an updated value is put where its owners read it.
    fn land(&mut self) -> bool {
        let Some((value, last)) = &mut self.value else { return true };
        let untouched = value.to_bytes() == *last;
        if self.present == Some(true) {
            *last = self.memory.to_bytes();
            value.write(|bytes| bytes.copy_from_slice(last.as_deref().unwrap_or_default()));
        }
        untouched
    }

    /// The bytes that came, by rank; the inner `None` for virtual memory.
    fn bytes_by_rank(&self) -> Vec<Option<Option<Vec<u8>>>> {
        let joined = |chunks: &Vec<Chunk>| {
            let all: Option<Vec<_>> = chunks.iter().map(Chunk::to_bytes).collect();
            all.map(|all| all.concat())
        };
        self.parts.iter().map(|part| part.as_ref().map(joined)).collect()
    }
}

/// One rank's program under way.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) instruction: usize,
    pub(super) computing: bool,
    pub(super) phase: WorkerPhase,
    /// Its program hangs.
    pub(super) hangs: bool,
    /// Its process ends.
    pub(super) exits: bool,
    /// By book, once open.
    pub(super) tensors: Vec<Option<Vec<Tensor>>>,
    /// Lanes on which all ranks have left.
    pub(super) lanes_left: u32,
    /// On sequence numbers.
    pub(super) all_gather: AllGather,
    pub(super) marks_ns: Vec<u64>,
}

impl Worker {
    pub(super) fn new(rank: Rank, setup: &Setup) -> Self {
        Self {
            instruction: 0,
            computing: true,
            phase: WorkerPhase::Running,
            hangs: false,
            exits: false,
            tensors: setup.books.iter().map(|_| None).collect(),
            lanes_left: 0,
            all_gather: AllGather::new(rank, Members::all(setup.workers)),
            marks_ns: Vec::new(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, WorkerPhase::Done | WorkerPhase::Failed | WorkerPhase::Dead)
    }

    pub(super) fn has_shared_memory(&self) -> bool {
        let shared = |tensor: &Tensor| tensor.memory.is_shared() || tensor.lent.iter().any(Chunk::is_shared);
        self.tensors.iter().flatten().flatten().any(shared)
    }

    fn all_released(&mut self) -> bool {
        self.tensors.iter_mut().flatten().flatten().all(Tensor::is_released)
    }

    fn tensor(&mut self, book: BookId, tensor: TensorId) -> Option<&mut Tensor> {
        self.tensors[usize::from(book)].as_mut()?.get_mut(tensor as usize)
    }

    fn all_complete(&self) -> bool {
        self.tensors.iter().flatten().flatten().all(|tensor| tensor.remaining == 0)
    }
}

impl<M: SimMemory> World<M> {
    /// Goes on with a rank's program as far as it can.
    pub(super) fn advance(&mut self, rank: Rank) -> Result<(), Violation> {
        let setup = self.setup.clone();
        loop {
            let worker = &self.workers[rank.index()];
            let fate = &self.fates[rank.index()];
            if worker.computing || worker.hangs || worker.is_over() || fate.fails() {
                return Ok(());
            }
            let went_on = match worker.phase {
                WorkerPhase::Running => match setup.programs[rank.index()].get(worker.instruction) {
                    Some(instruction) => self.execute(rank, instruction)?,
                    None => self.finish(rank)?,
                },
                WorkerPhase::Left { agree } => self.all_left(rank, agree)?,
                WorkerPhase::Agreeing => self.agreed(rank),
                WorkerPhase::Finishing => {
                    let parted = self.farewell(rank);
                    if parted {
                        self.done(rank);
                    }
                    parted
                }
                WorkerPhase::Done | WorkerPhase::Failed | WorkerPhase::Dead => false,
            };
            if !went_on {
                self.waits(rank, self.awaits(rank));
                return Ok(());
            }
            self.waits(rank, None);
        }
    }

    /// What its program waits for, if it is in a wait that has an end.
    fn awaits(&self, rank: Rank) -> Option<WaitKind> {
        let worker = &self.workers[rank.index()];
        match worker.phase {
            WorkerPhase::Left { .. } => Some(WaitKind::Leavers),
            WorkerPhase::Finishing => Some(WaitKind::Goodbyes),
            _ => {
                let instruction = self.setup.programs[rank.index()].get(worker.instruction);
                // A server waits for as long as there are workers.
                let serves = matches!(instruction, Some(Instruction::Serve | Instruction::Heed { .. }));
                (!serves).then_some(WaitKind::Result)
            }
        }
    }

    /// Executes an instruction; false if it must wait.
    fn execute(&mut self, rank: Rank, instruction: &Instruction) -> Result<bool, Violation> {
        match instruction {
            Instruction::Compute(ns) => {
                self.workers[rank.index()].computing = true;
                self.agenda.after(*ns, Happening::Resume(rank));
            }
            Instruction::Open(book) => self.open(rank, *book)?,
            Instruction::Submit(submission) => {
                let tensor = self.workers[rank.index()].tensor(submission.book, submission.tensor);
                let gathered = submission.gather_bytes.is_some();
                if tensor.is_none_or(|t| t.remaining > 0 || (t.memory.is_shared() && !gathered)) {
                    return Ok(false);
                }
                match submission.gather_bytes {
                    Some(len_bytes) => self.gather(rank, submission, len_bytes)?,
                    None => self.submit(rank, submission)?,
                }
            }
            Instruction::Wait { book, tensors } => {
                let worker = &mut self.workers[rank.index()];
                if tensors.iter().any(|t| worker.tensor(*book, *t).is_some_and(|t| t.remaining > 0)) {
                    return Ok(false);
                }
                self.read(rank, *book, tensors)?;
            }
            Instruction::Load(book) => self.load(rank, *book)?,
            Instruction::Proceed { book, update } => {
                self.proceed(rank, *book, None, *update)?;
                if rank == Rank(0) {
                    let delay_ns = self.setup.links.delay_ns;
                    let servers = (self.setup.workers..self.setup.ranks).map(Rank);
                    servers.for_each(|server| self.agenda.after(delay_ns, Happening::Told(server)));
                }
            }
            Instruction::Heed { book, seq, update } => {
                if !self.ledger.has_told(Rank(0), *book, *seq) {
                    return Ok(false);
                }
                self.proceed(rank, *book, Some(*seq), *update)?;
            }
            Instruction::Leave { agree } => {
                let worker = &mut self.workers[rank.index()];
                if !worker.all_complete() || !worker.all_released() {
                    return Ok(false);
                }
                self.workers[rank.index()].phase = WorkerPhase::Left { agree: *agree };
                self.trace(|| format!("rank {rank} leaves"));
                for lane in 0..self.setup.lanes {
                    if let Some(model) = self.model(rank, lane) {
                        model.leave_myself();
                    }
                    self.step(rank, lane, Event::Leave)?;
                }
            }
            Instruction::Serve => {
                if !self.workers_have_parted(rank) {
                    return Ok(false);
                }
            }
            Instruction::Mark => {
                let now_ns = self.agenda.now_ns();
                self.workers[rank.index()].marks_ns.push(now_ns);
            }
        }
        self.workers[rank.index()].instruction += 1;
        Ok(true)
    }

    fn open(&mut self, rank: Rank, book: BookId) -> Result<(), Violation> {
        let setup = self.setup.clone();
        let (layout, places) = (&setup.books[usize::from(book)], &setup.places[usize::from(book)]);
        let tensor = |tensor: &penstock_core::layout::Tensor| Tensor {
            memory: M::tensor(tensor.len_bytes() as usize),
            seq: 0,
            remaining: 0,
            complete: BTreeSet::new(),
            present: None,
            parts: Vec::new(),
            lent: Vec::new(),
            value: None,
        };
        self.workers[rank.index()].tensors[usize::from(book)] =
            Some(layout.tensors.iter().map(tensor).collect());
        self.trace(|| format!("rank {rank} opens book {book}"));
        for lane in 0..setup.lanes {
            let at = self.at(rank, lane);
            if let Some(model) = self.model(rank, lane) {
                model.open_book(book, layout.clone());
            }
            let opened = self.nodes[at].open_book(book, layout.clone(), &mut self.actions);
            opened.map_err(|error| Violation::new(Checker::Protocol, format!("rank {rank}: {error}")))?;
            self.watch(rank, lane)?;
            if let Some(places) = places {
                if let Some(model) = self.model(rank, lane) {
                    model.set_priorities(book, places);
                }
                self.nodes[at].set_priorities(book, places);
            }
            self.act(rank, lane)?;
        }
        Ok(())
    }

    /// The values that owners begin with, the same on all ranks.
    fn load(&mut self, rank: Rank, book: BookId) -> Result<(), Violation> {
        let setup = self.setup.clone();
        for (id, layout) in setup.books[usize::from(book)].tensors.iter().enumerate() {
            let memory = M::tensor(layout.len_bytes() as usize);
            let name = [setup.seed, u64::from(book), id as u64];
            let mut random =
                Random::new(name.iter().fold(0, |mix, part| Random::new(mix ^ (part + 1)).bits()));
            memory.write(|bytes| fill(layout.dtype, &mut random, bytes));
            let field = if random.bits() >> (rank.0 % 64) & 1 == 1 { Field::Lent } else { Field::Value };
            let lent_by = (field == Field::Lent).then_some(rank);
            self.ledger.load(book, id as TensorId, memory.to_bytes(), lent_by);
            if let Some(tensor) = self.workers[rank.index()].tensor(book, id as TensorId) {
                tensor.value = (field == Field::Lent).then(|| (memory.clone(), memory.to_bytes()));
            }
            for lane in 0..setup.lanes {
                let at = self.at(rank, lane);
                let loaded = self.nodes[at].load(book, id as TensorId, (field, 0), &memory);
                loaded.map_err(|error| Violation::new(Checker::Protocol, format!("rank {rank}: {error}")))?;
            }
        }
        Ok(())
    }

    /// The program has come to the end of a step: that of its last submissions, or of these that worker 0 has made.
    fn proceed(
        &mut self,
        rank: Rank,
        book: BookId,
        of_worker_0: Option<Seq>,
        update: Option<Update>,
    ) -> Result<(), Violation> {
        let setup = self.setup.clone();
        let layout = &setup.books[usize::from(book)];
        for tensor in 0..layout.tensors.len() as TensorId {
            let last = self.workers[rank.index()].tensor(book, tensor).map(|tensor| tensor.seq);
            let Some(seq) = of_worker_0.or(last) else { continue };
            self.ledger.proceed(rank, (book, tensor, seq), update)?;
        }
        for (slice, at) in layout.slices.iter().enumerate().filter(|(_, at)| at.owner == rank) {
            let last = self.workers[rank.index()].tensor(book, at.tensor).map(|tensor| tensor.seq);
            let Some(seq) = of_worker_0.or(last) else { continue };
            let slice = slice as SliceId;
            if let Some(model) = self.model(rank, at.lane) {
                model.proceed(book, slice);
            }
            let other = update.is_some() && self.sabotage(Sabotage::OtherUpdate);
            let update = update.map(|mut update| {
                update.optimizer.lr *= if other { 2.0 } else { 1.0 };
                update
            });
            self.step(rank, at.lane, Event::Proceed { book, slice, step: seq, update })?;
        }
        Ok(())
    }

    fn submit(&mut self, rank: Rank, submission: &Submission) -> Result<(), Violation> {
        let Submission { book, tensor, op, absent, .. } = *submission;
        let setup = self.setup.clone();
        let layout = &setup.books[usize::from(book)].tensors[tensor as usize];
        let Some(mine) = self.workers[rank.index()].tensor(book, tensor) else { return Ok(()) };
        mine.seq += 1;
        (mine.remaining, mine.present) = (layout.slice_count, None);
        mine.complete.clear();
        self.fates[rank.index()].moved_ns = self.agenda.now_ns();
        let (seq, memory) = (mine.seq, mine.memory.clone());
        let mut random = numbers_of(setup.seed, rank, submission, seq);
        memory.write(|bytes| fill(layout.dtype, &mut random, bytes));
        self.ledger.submit(rank, submission, seq, memory.to_bytes())?;
        let other = layout.slice_count > 0 && self.sabotage(Sabotage::OtherStep);
        let step = seq + u32::from(other);
        for lane in 0..setup.lanes {
            let memory = memory.clone();
            let gives = Gives::unless_absent(op, absent);
            let part = penstock_core::Submission { book, tensor, seq, step, memory, gives };
            self.step(rank, lane, Event::Submit(part))?;
        }
        let slices = setup.books[usize::from(book)].slices_of(tensor);
        if self.workers[rank.index()].tensor(book, tensor).is_some_and(|tensor| tensor.remaining > 0)
            && self.sabotage(Sabotage::ForgetRank)
        {
            self.completed(rank, book, slices.start, seq, true)?;
        }
        Ok(())
    }

    /// A rank contributes to a gather, as the front end does: from new memory, if the last is still on its way.
    fn gather(&mut self, rank: Rank, submission: &Submission, len_bytes: u32) -> Result<(), Violation> {
        let Submission { book, tensor, .. } = *submission;
        let setup = self.setup.clone();
        let layout = &setup.books[usize::from(book)].tensors[tensor as usize];
        let Some(mine) = self.workers[rank.index()].tensor(book, tensor) else { return Ok(()) };
        mine.seq += 1;
        (mine.remaining, mine.present) = (layout.slice_count, None);
        mine.complete.clear();
        self.fates[rank.index()].moved_ns = self.agenda.now_ns();
        mine.parts.clear();
        if mine.memory.is_shared() {
            let memory = M::tensor(layout.len_bytes() as usize);
            mine.lent.push(std::mem::replace(&mut mine.memory, memory));
        }
        let (seq, memory) = (mine.seq, mine.memory.part(0, len_bytes as usize));
        let mut random = numbers_of(setup.seed, rank, submission, seq);
        memory.write(|bytes| fill(layout.dtype, &mut random, bytes));
        self.ledger.submit(rank, submission, seq, memory.to_bytes())?;
        let lane = setup.books[usize::from(book)].slices[layout.first_slice as usize].lane;
        let gives = Gives::Gathered(len_bytes);
        let part = penstock_core::Submission { book, tensor, seq, step: seq, memory, gives };
        self.step(rank, lane, Event::Submit(part))
    }

    /// All contributions to a gather are here. They stay until the next submission.
    pub(super) fn gathered(
        &mut self,
        rank: Rank,
        book: BookId,
        slice: SliceId,
        parts: Vec<Option<Vec<Chunk>>>,
    ) -> Result<(), Violation> {
        let id = self.setup.books[usize::from(book)].slices[slice as usize].tensor;
        let Some(tensor) = self.workers[rank.index()].tensor(book, id) else { return Ok(()) };
        tensor.parts = parts;
        let (seq, bytes) = (tensor.seq, tensor.bytes_by_rank());
        self.ledger.gathered(rank, (book, id, seq), &bytes, Checker::Exact)
    }

    /// A slice of a submission is complete.
    pub(super) fn completed(
        &mut self,
        rank: Rank,
        book: BookId,
        slice: SliceId,
        seq: Seq,
        present: bool,
    ) -> Result<(), Violation> {
        let setup = self.setup.clone();
        let layout = &setup.books[usize::from(book)].slices[slice as usize];
        assert!(!self.sabotage(Sabotage::Panic), "a panic on purpose");
        let present = present != self.sabotage(Sabotage::FlipPresent);
        let touch = !present && self.sabotage(Sabotage::TouchAbsent);
        let Some(tensor) = self.workers[rank.index()].tensor(book, layout.tensor) else { return Ok(()) };
        tensor.remaining = tensor.remaining.saturating_sub(1);
        tensor.complete.insert(slice);
        if setup.books[usize::from(book)].tensors[layout.tensor as usize].route == Route::Gather {
            tensor.present = Some(present);
            return self.ledger.complete(&Completion { rank, book, slice, seq, present, bytes: None });
        }
        let memory = tensor.memory.part(layout.offset_bytes as usize, layout.len_bytes as usize);
        let agrees = *tensor.present.get_or_insert(present) == present;
        if touch {
            memory.write(|bytes| bytes[0] ^= 1);
        }
        let untouched = tensor.remaining > 0 || tensor.land();
        let completion = Completion { rank, book, slice, seq, present, bytes: None };
        check(untouched, Checker::ResultStays, || {
            format!("the value that was lent has changed: {completion:?}")
        })?;
        let exact =
            memory.read(|bytes| self.ledger.complete(&Completion { bytes: Some(bytes), ..completion }));
        exact.unwrap_or_else(|| self.ledger.complete(&completion))?;
        check(agrees, Checker::AbsentUntouched, || {
            format!(
                "rank {rank}: slices of one tensor disagree on whether anybody contributed: {completion:?}"
            )
        })
    }

    /// The program reads results it has waited for.
    fn read(&mut self, rank: Rank, book: BookId, tensors: &[TensorId]) -> Result<(), Violation> {
        let setup = self.setup.clone();
        let layout = &setup.books[usize::from(book)];
        let touch = setup.sabotaged(Sabotage::TouchResult);
        let mut read = Vec::new();
        for &id in tensors {
            let ledger = &self.ledger;
            let Some(tensor) = self.workers[rank.index()].tensor(book, id) else { continue };
            if layout.tensors[id as usize].route == Route::Gather {
                if tensor.present.is_some() {
                    let key = (book, id, tensor.seq);
                    ledger.gathered(rank, key, &tensor.bytes_by_rank(), Checker::ResultStays)?;
                }
                continue;
            }
            for slice in layout.slices_of(id).filter(|_| tensor.present.is_some()) {
                let at = &layout.slices[slice as usize];
                let memory = tensor.memory.part(at.offset_bytes as usize, at.len_bytes as usize);
                if touch && tensor.present == Some(true) {
                    memory.write(|bytes| bytes[0] ^= 1);
                }
                let present = tensor.present == Some(true);
                let completion = Completion { rank, book, slice, seq: tensor.seq, present, bytes: None };
                let exact =
                    memory.read(|bytes| ledger.read(&Completion { bytes: Some(bytes), ..completion }));
                exact.unwrap_or(Ok(()))?;
                read.push((book, slice, tensor.seq));
            }
        }
        read.into_iter().try_for_each(|name| self.applied(rank, name))
    }

    /// Waits until all ranks have left on all lanes, and then tells the others this rank's sequence numbers.
    fn all_left(&mut self, rank: Rank, agree: bool) -> Result<bool, Violation> {
        let worker = &mut self.workers[rank.index()];
        if worker.lanes_left < self.setup.lanes {
            return Ok(false);
        }
        worker.lanes_left = 0;
        if !agree {
            worker.phase = WorkerPhase::Running;
            return Ok(true);
        }
        let blob: Vec<u8> =
            worker.tensors.iter().flatten().flatten().flat_map(|t| t.seq.to_le_bytes()).collect();
        let gather = worker.all_gather.give(blob.clone());
        worker.phase = WorkerPhase::Agreeing;
        let chunk = M::tensor(blob.len());
        chunk.write(|bytes| bytes.copy_from_slice(&blob));
        let header = Header { seq: gather, payload_bytes: blob.len() as u32, ..Header::control(Kind::Blob) };
        let payload = (!blob.is_empty()).then_some(chunk);
        self.control(rank, 0, header, payload)?;
        Ok(true)
    }

    /// Takes the largest sequence numbers of all ranks, once they are here.
    fn agreed(&mut self, rank: Rank) -> bool {
        let worker = &mut self.workers[rank.index()];
        let Some(blobs) = worker.all_gather.take() else { return false };
        for blob in blobs {
            let tensors = worker.tensors.iter_mut().flatten().flatten();
            for (tensor, seq) in tensors.zip(blob.chunks_exact(4)) {
                tensor.seq = tensor.seq.max(Seq::from_le_bytes([seq[0], seq[1], seq[2], seq[3]]));
            }
        }
        worker.phase = WorkerPhase::Running;
        true
    }

    /// The program is through: waits for what is under way and says goodbye.
    fn finish(&mut self, rank: Rank) -> Result<bool, Violation> {
        if !self.workers[rank.index()].all_complete() {
            return Ok(false);
        }
        self.workers[rank.index()].tensors.iter_mut().flatten().flatten().for_each(|t| t.parts.clear());
        if self.sabotage(Sabotage::KeepTensor) {
            let kept = self.workers[rank.index()].tensors.iter().flatten().flatten().next();
            self.hoard.extend(kept.map(|tensor| tensor.memory.clone()));
        }
        self.workers[rank.index()].phase = WorkerPhase::Finishing;
        self.trace(|| format!("rank {rank} is through"));
        Ok(true)
    }
}

/// For the numbers of one submission, so that what is sent does not depend on the order of events.
fn numbers_of(seed: u64, rank: Rank, submission: &Submission, seq: Seq) -> Random {
    let name = [rank.0, u32::from(submission.book), submission.tensor, seq].map(u64::from);
    Random::new(name.iter().fold(seed, |mix, part| Random::new(mix ^ (part + 1)).bits()))
}

/// Finite numbers over a few orders of magnitude and of both signs, so that the order of a sum shows in its bits.
fn fill(dtype: Dtype, random: &mut Random, bytes: &mut [u8]) {
    let mut float = || {
        // 24 random bits of mantissa at one of 16 scales.
        let bits = random.bits();
        let mantissa = (bits >> 40) as f64 / f64::from(1 << 23) - 1.0;
        mantissa * f64::from(1 << (bits & 15)) / 256.0
    };
    match dtype {
        Dtype::F32 => {
            bytes.chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&(float() as f32).to_le_bytes()));
        }
        Dtype::F64 => bytes.chunks_exact_mut(8).for_each(|x| x.copy_from_slice(&float().to_le_bytes())),
        Dtype::F16 => bytes
            .chunks_exact_mut(2)
            .for_each(|x| x.copy_from_slice(&half::f16::from_f64(float()).to_le_bytes())),
        Dtype::Bf16 => bytes
            .chunks_exact_mut(2)
            .for_each(|x| x.copy_from_slice(&half::bf16::from_f64(float()).to_le_bytes())),
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U8 | Dtype::Bytes => {
            bytes.iter_mut().for_each(|x| *x = random.bits() as u8);
        }
    }
}
