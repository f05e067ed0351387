//! What was observed, with its times: a ring per lane and one of the program, each of fixed size.
//!
//! A lane never waits for a reader and allocates nothing: it overwrites the oldest. A reader takes no lock that a lane takes; it
//! copies, and then looks how far the writer has come meanwhile: what may have been overwritten under its eyes does not count.
//!
//! Beside them is what the program itself comes to ([`MomentBuffer`]), in an array that who reads it takes.

use crate::memory::{give_back, obtain};
use parking_lot::Mutex;
use penstock_core::node::Node;
use penstock_core::observe::{Counters, Observation, Observe, Point};
use penstock_core::types::{BookId, LayerId, Rank, Seq, SliceId};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A lane's node.
pub(crate) type LaneNode = Node<crate::memory::RealMemory, Recorder>;

/// A slice has come to a point of its journey, on this rank, at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// When, on the system's monotonic clock, which all processes of a machine share. Of [`Point::Submitted`] the time of the
    /// program's call, not that at which the lane has seen it; of [`Point::FirstByteOut`] that before the system call.
    pub time_ns: u64,
    /// Which submission of the tensor.
    pub seq: Seq,
    /// The slice's layer.
    pub layer: LayerId,
    /// The slice.
    pub slice: SliceId,
    /// Of a frame, the length of its payload.
    pub payload_bytes: u32,
    /// To or from whom, of a frame.
    pub peer: Option<Rank>,
    /// The book.
    pub book: BookId,
    /// Where on its journey the slice is.
    pub point: Point,
    /// What the frame is, or the one that led here, as on the wire; 0 for what the program has done.
    pub kind: u8,
}

impl Record {
    /// Bytes of an encoded one, and of one in a ring.
    pub const BYTES: usize = 32;
    /// The fields of an encoded one, with their types as NumPy writes them. A point is its place in [`Point::ALL`], nobody is -1.
    pub const FIELDS: [(&str, &str); 9] = [
        ("time_ns", "<u8"),
        ("seq", "<u4"),
        ("layer", "<u4"),
        ("slice", "<u4"),
        ("payload_bytes", "<u4"),
        ("peer", "<i4"),
        ("book", "<u2"),
        ("point", "u1"),
        ("kind", "u1"),
    ];
    /// What an encoded one says instead of a peer.
    const NO_PEER: u32 = u32::MAX;

    fn words(&self) -> [u64; 4] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let peer = self.peer.map_or(Self::NO_PEER, |rank| rank.0);
        let what = u32::from(self.book) | (self.point as u32) << 16 | u32::from(self.kind) << 24;
        [self.time_ns, pair(self.seq, self.layer), pair(self.slice, self.payload_bytes), pair(peer, what)]
    }

    fn of(words: [u64; 4]) -> Self {
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let [time_ns, first, second, third] = words;
        let ((seq, layer), (slice, payload_bytes), (peer, what)) =
            (halves(first), halves(second), halves(third));
        Self {
            time_ns,
            seq,
            layer,
            slice,
            payload_bytes,
            peer: (peer != Self::NO_PEER).then_some(Rank(peer)),
            book: what as u16,
            point: Point::ALL[(what >> 16 & 7) as usize],
            kind: (what >> 24) as u8,
        }
    }
}

/// A record as it is in a ring, and, word by word, encoded.
type RecordWords = [u64; 4];

/// Room for records, of zeros. Large ones are mapped and not the allocator's: so where the program's own memory lies, and when it goes
/// back to the system, does not depend on whether there are rings; and pages that no record comes to are never made.
struct RingMemory {
    start: NonNull<[AtomicU64; 4]>,
    len: usize,
    layout: Layout,
}

// SAFETY: atomics, at an address that does not change.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    fn new(len: usize) -> Self {
        let layout = Layout::array::<[AtomicU64; 4]>(len).expect("rings are far below the address space");
        let Some(start) = obtain(layout) else { handle_alloc_error(layout) };
        Self { start: start.cast(), len, layout }
    }
}

impl std::ops::Deref for RingMemory {
    type Target = [[AtomicU64; 4]];

    fn deref(&self) -> &Self::Target {
        // SAFETY: so many of them, aligned as the layout says; zeros are atomics.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: obtained with this layout, and its owner is gone.
        unsafe { give_back(self.start.cast(), self.layout) };
    }
}

/// The last records of one thread, or of threads that take turns.
pub(crate) struct Ring {
    /// A power of two of them.
    places: RingMemory,
    /// Records written since the beginning.
    written: AtomicU64,
}

impl Ring {
    /// For so many records, or somewhat more.
    fn new(records: usize) -> Self {
        Self { places: RingMemory::new(records.next_power_of_two().max(2)), written: AtomicU64::new(0) }
    }

    /// How many records there were after the first `from`, as far as they can still be there.
    fn len_after(&self, from: u64) -> usize {
        (self.written.load(Ordering::Acquire) - from).min(self.places.len() as u64) as usize
    }

    /// Only one thread at a time may do so.
    fn push(&self, record: &Record) {
        let at = self.written.load(Ordering::Relaxed);
        // Who reads any of these words sees the count that was stored before it: the one that says this place is being written.
        fence(Ordering::Release);
        let place = &self.places[at as usize & (self.places.len() - 1)];
        for (place, word) in place.iter().zip(record.words()) {
            place.store(word, Ordering::Relaxed);
        }
        // Release: who sees the count sees the record.
        self.written.store(at + 1, Ordering::Release);
    }

    /// Appends what was written after the first `from` records and is still there; returns how many were written, and how many of
    /// those after `from` are lost.
    fn read(&self, from: u64, into: &mut Vec<RecordWords>) -> (u64, u64) {
        let len = self.places.len() as u64;
        let end = self.written.load(Ordering::Acquire);
        let begin = from.max(end.saturating_sub(len));
        let first = into.len();
        for at in begin..end {
            let place = &self.places[at as usize & (self.places.len() - 1)];
            into.push([0, 1, 2, 3].map(|word| place[word].load(Ordering::Relaxed)));
        }
        fence(Ordering::Acquire);
        // The place of the next record may be half written.
        let whole = (self.written.load(Ordering::Relaxed) + 1).saturating_sub(len).clamp(begin, end);
        into.drain(first..first + (whole - begin) as usize);
        (end, whole - from)
    }
}

/// Watches a lane's node: counts, and keeps what it sees of slices.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) counters: Counters,
    ring: Option<Arc<Ring>>,
    /// When the program called for the submission that the node is about to take.
    pub(crate) submitted_ns: u64,
    /// When the clock was last looked at.
    at_ns: u64,
}

impl Recorder {
    /// A lane's, which keeps what it sees in its ring of these.
    pub(crate) fn of(rings: Option<&Rings>, lane: u32) -> Self {
        let mut recorder = Self::default();
        recorder.keep_in(rings, lane);
        recorder
    }

    /// From now on keeps what it sees in the lane's ring of these, or not at all.
    pub(crate) fn keep_in(&mut self, rings: Option<&Rings>, lane: u32) {
        self.ring = rings.map(|rings| Arc::clone(&rings.lanes[lane as usize]));
        self.mark();
    }

    /// Looks at the clock, for what the node will see now. A look takes longer than a record, so there is one only where time may have
    /// passed: before the lane carries out a command or writes, when a frame has arrived and after a sum. What follows from these
    /// at once has their time.
    #[inline]
    pub(crate) fn mark(&mut self) {
        if self.ring.is_some() {
            self.at_ns = now_ns();
        }
    }
}

impl Observe for Recorder {
    #[inline]
    fn observe(&mut self, seen: Observation<'_>) {
        self.counters.observe(seen);
        if let (Some(ring), Some(layer)) = (&self.ring, seen.layer) {
            let time_ns = match seen.point {
                // 0: the program has said so just before anything was kept.
                Point::Submitted if self.submitted_ns > 0 => self.submitted_ns,
                Point::Arrived | Point::Summed => {
                    self.at_ns = now_ns();
                    self.at_ns
                }
                _ => self.at_ns,
            };
            record(ring, time_ns, layer, seen);
        }
    }
}

/// What one lane has counted.
#[derive(Debug, Clone, Default)]
pub(crate) struct LaneCounts {
    /// What its node has let it see.
    pub(crate) seen: Counters,
    /// By rank of the peer, segments that TCP has sent again.
    pub(crate) retransmitted: Vec<u64>,
}

fn record(
    ring: &Ring,
    time_ns: u64,
    layer: LayerId,
    Observation { point, header, peer, .. }: Observation<'_>,
) {
    let payload_bytes = if peer.is_some() { header.payload_bytes } else { 0 };
    let (seq, slice, book, kind) = (header.seq, header.slice, header.book, header.kind as u8);
    ring.push(&Record { time_ns, seq, layer, slice, payload_bytes, peer, book, point, kind });
}

/// What was observed since the last call: of one lane after the other, and of the program.
#[derive(Debug, Clone, Default)]
pub struct Observations {
    /// The records.
    words: Vec<RecordWords>,
    /// How many more there were, which newer ones have overwritten.
    pub lost: u64,
}

impl Observations {
    /// Puts them in the order of time. It takes longer than all else that is done with them here; who writes them can do without.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        // Those of one time stay in the order in which they were written.
        self.words.sort_by_key(|words| words[0]);
        self
    }

    /// The records, as they lie.
    pub fn records(&self) -> impl Iterator<Item = Record> {
        self.words.iter().copied().map(Record::of)
    }

    /// Bytes of all records, encoded.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        self.words.len() * Record::BYTES
    }

    /// Encodes them as [`Record::FIELDS`] say, into so many bytes.
    pub fn encode(&self, into: &mut [u8]) {
        encode(self.words.as_flattened(), into);
    }
}

fn encode(words: &[u64], into: &mut [u8]) {
    for (bytes, word) in into.chunks_exact_mut(size_of::<u64>()).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// What the program comes to, each with its time, until somebody takes it. Threads take turns for an addition's time.
#[derive(Debug, Default)]
pub struct MomentBuffer {
    kept: Mutex<MomentsNoted>,
}

#[derive(Debug, Default)]
struct MomentsNoted {
    moments: Vec<[u64; 2]>,
    dropped: u64,
}

impl MomentBuffer {
    /// Bytes of an encoded one: its time, and what it is.
    pub const BYTES: usize = 16;
    /// Kept at a time; what comes beyond them is counted, and dropped.
    pub const KEPT_MAX: usize = 1 << 18;

    /// The program comes to this now.
    pub fn note(&self, what: u64) {
        let mut kept = self.kept.lock();
        if kept.moments.len() < Self::KEPT_MAX {
            kept.moments.push([now_ns(), what]);
        } else {
            kept.dropped += 1;
        }
    }

    /// What was noted since the last call, in the order of time, and how much was dropped.
    pub fn take(&self) -> (Vec<[u64; 2]>, u64) {
        let mut kept = self.kept.lock();
        // As much room as was needed: who notes the next ones need not grow it step by step.
        let room = kept.moments.len();
        let taken = std::mem::replace(&mut kept.moments, Vec::with_capacity(room));
        (taken, std::mem::take(&mut kept.dropped))
    }

    /// Encodes taken ones: in each place, two numbers of 64 bits, little end first.
    pub fn encode(taken: &[[u64; 2]], into: &mut [u8]) {
        encode(taken.as_flattened(), into);
    }
}

/// All rings of a process.
pub(crate) struct Rings {
    lanes: Vec<Arc<Ring>>,
    /// Held to write.
    program: Mutex<Ring>,
    /// Records that were taken, by lane, and of the program.
    taken: Mutex<Vec<u64>>,
}

impl Rings {
    /// For so many records each; `None` for none.
    pub(crate) fn new(lanes: u32, records: usize) -> Option<Self> {
        let ring = || Ring::new(records);
        (records > 0).then(|| Self {
            lanes: (0..lanes).map(|_| Arc::new(ring())).collect(),
            program: Mutex::new(ring()),
            taken: Mutex::new(vec![0; lanes as usize + 1]),
        })
    }

    /// The program has done something with slices.
    pub(crate) fn of_program(&self, records: impl Iterator<Item = Record>) {
        let ring = self.program.lock();
        records.for_each(|record| ring.push(&record));
    }

    pub(crate) fn take(&self) -> Observations {
        let mut all = Observations::default();
        let mut taken = self.taken.lock();
        let mut take = |ring: &Ring, taken: &mut u64| {
            all.words.reserve(ring.len_after(*taken));
            let (end, lost) = ring.read(*taken, &mut all.words);
            *taken = end;
            all.lost += lost;
        };
        if let Some((of_program, of_lanes)) = taken.split_last_mut() {
            self.lanes.iter().zip(of_lanes).for_each(|(ring, taken)| take(ring, taken));
            take(&self.program.lock(), of_program);
        }
        all
    }
}

/// The system's monotonic clock.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system writes one structure of ours. It cannot fail: the clock exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> Record {
        Record {
            time_ns: number,
            seq: number as u32,
            layer: !(number as u32),
            slice: number as u32 ^ 0x5555,
            payload_bytes: number as u32,
            peer: (!number.is_multiple_of(3)).then_some(Rank(number as u32 % 3)),
            book: number as u16,
            point: Point::ALL[number as usize % 8],
            kind: number as u8,
        }
    }

    #[test]
    fn a_record_survives_its_words() {
        for number in (0..64).map(|bit| 1 << bit).chain([0, u64::MAX]) {
            assert_eq!(Record::of(record(number).words()), record(number));
        }
    }

    fn read_of(ring: &Ring, from: u64, into: &mut Vec<Record>) -> (u64, u64) {
        let mut words = Vec::new();
        let found = ring.read(from, &mut words);
        into.extend(words.into_iter().map(Record::of));
        found
    }

    #[test]
    fn the_last_records_are_kept_and_the_others_counted() {
        let ring = Ring::new(8);
        let mut read = Vec::new();
        (0..5).for_each(|number| ring.push(&record(number)));
        assert_eq!(read_of(&ring, 0, &mut read), (5, 0));
        assert_eq!(read, [0, 1, 2, 3, 4].map(record));
        read.clear();
        (5..30).for_each(|number| ring.push(&record(number)));
        // The oldest of eight places counts as being written.
        assert_eq!(read_of(&ring, 5, &mut read), (30, 18));
        assert_eq!(read, [23, 24, 25, 26, 27, 28, 29].map(record));
        read.clear();
        assert_eq!((read_of(&ring, 30, &mut read), read.len()), ((30, 0), 0));
    }

    /// So whoever begins a trace does not pay for memory that is not used, and none of it is taken from the program's allocator.
    #[test]
    fn pages_of_a_ring_are_made_when_records_come_to_them() {
        let ring = Ring::new(1 << 17);
        let resident = || {
            let mut pages = vec![0u8; ring.places.layout.size() / 4096];
            // SAFETY: a whole mapping of this size, and as many bytes as it has pages, or more.
            let code = unsafe {
                libc::mincore(
                    ring.places.start.as_ptr().cast(),
                    ring.places.layout.size(),
                    pages.as_mut_ptr(),
                )
            };
            assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
            pages.iter().filter(|&&page| page & 1 == 1).count()
        };
        assert_eq!(resident(), 0);
        ring.push(&record(1));
        // One; or where the system makes large pages, one of those.
        assert!((1..=512).contains(&resident()), "{}", resident());
    }

    /// A writer that never waits, and a reader that looks as often as it can: each record is read once and whole, or counted.
    #[test]
    fn nothing_is_read_that_is_half_written() {
        const RECORDS: u64 = 400_000;
        let ring = Ring::new(64);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..RECORDS).for_each(|number| ring.push(&record(number))));
            let (mut next, mut seen, mut lost) = (0, 0, 0);
            let mut read = Vec::new();
            while next < RECORDS {
                let before = next;
                let missed;
                (next, missed) = read_of(&ring, before, &mut read);
                for (place, found) in read.drain(..).enumerate() {
                    assert_eq!(found, record(before + missed + place as u64));
                    seen += 1;
                }
                lost += missed;
            }
            assert_eq!(seen + lost, RECORDS);
        });
    }

    #[test]
    fn what_is_taken_lies_as_the_threads_wrote_it_until_it_is_put_in_order() {
        let rings = Rings::new(2, 8).unwrap();
        [5, 1].iter().for_each(|&number| rings.lanes[0].push(&record(number)));
        rings.lanes[1].push(&record(3));
        rings.of_program([record(4), record(2)].into_iter());
        let taken = rings.take();
        let times = |taken: &Observations| taken.records().map(|record| record.time_ns).collect::<Vec<_>>();
        assert_eq!(times(&taken), [5, 1, 3, 4, 2]);
        let mut bytes = vec![0; taken.encoded_bytes()];
        taken.encode(&mut bytes);
        assert_eq!(bytes.len(), 5 * Record::BYTES);
        assert_eq!(bytes[Record::BYTES..][..8], 1u64.to_le_bytes());
        let in_order = taken.in_order();
        assert_eq!(times(&in_order), [1, 2, 3, 4, 5]);
        assert_eq!(in_order.records().collect::<Vec<_>>(), [1, 2, 3, 4, 5].map(record));
        assert_eq!(times(&rings.take()), []);
    }

    #[test]
    fn moments_are_taken_once_in_the_order_of_time_and_no_more_are_kept_than_there_is_room_for() {
        let moments = MomentBuffer::default();
        (0..MomentBuffer::KEPT_MAX as u64 + 3).for_each(|what| moments.note(what));
        let (taken, dropped) = moments.take();
        assert_eq!((taken.len(), dropped), (MomentBuffer::KEPT_MAX, 3));
        assert!(taken.is_sorted_by_key(|moment| moment[0]) && taken[0][0] > 0);
        assert!(taken.iter().zip(0..).all(|(moment, what)| moment[1] == what));
        moments.note(7);
        let (taken, dropped) = moments.take();
        assert_eq!((taken.len(), taken[0][1], dropped), (1, 7, 0));
        let mut bytes = [0; MomentBuffer::BYTES];
        MomentBuffer::encode(&taken, &mut bytes);
        assert_eq!(bytes[8..], 7u64.to_le_bytes());
    }
}
