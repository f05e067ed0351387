//! The book: which layers, tensors and slices there are, and who owns each slice. The same on every rank. (The coordinator's
//! information book is another one, of what choices are made from.)

use crate::error::Error;
use crate::limits;
use crate::members::Members;
use crate::roles::{Answered, Fold, Roles, Rules};
use crate::slicing::Slicing;
use crate::types::{Dtype, LayerId, Rank, SliceId, TensorId};
use crate::way::{Algorithm, Route};

/// One parameter's gradient or value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the model.
    pub name: String,
    /// The layer whose place in the forward pass is its priority.
    pub layer: LayerId,
    /// Element type.
    pub dtype: Dtype,
    /// Its wire type, that is, as what its elements travel: `dtype`, or for fp32 in the store a half type to which contributions
    /// and results are rounded ([`crate::reduce::round`]).
    pub wire: Dtype,
    /// Number of elements.
    pub elems: u64,
    /// How its slices are synchronised.
    pub route: Route,
    /// Of the store: the rank that owns all of its slices; none: they are dealt. Of a gather: the only rank that gets the
    /// contributions; none: all do.
    pub owner: Option<Rank>,
    /// The slices of this tensor are `first_slice..first_slice + slice_count`. Filled in by [`Book::new`].
    pub first_slice: SliceId,
    /// See `first_slice`; 0 for an empty tensor.
    pub slice_count: u32,
}

impl Tensor {
    /// A tensor before slicing, synchronised by the store.
    #[must_use]
    pub fn new(name: impl Into<String>, layer: LayerId, dtype: Dtype, elems: u64) -> Self {
        let route = Route::STORE;
        let (owner, wire) = (None, dtype);
        Self { name: name.into(), layer, dtype, wire, elems, route, owner, first_slice: 0, slice_count: 0 }
    }

    /// The same tensor by another route.
    #[must_use]
    pub fn with_route(self, route: Route) -> Self {
        Self { route, ..self }
    }

    /// The same tensor with another wire type.
    #[must_use]
    pub fn with_wire(self, wire: Dtype) -> Self {
        Self { wire, ..self }
    }

    /// The same tensor, all of which is this rank's.
    #[must_use]
    pub fn owned_by(self, owner: Rank) -> Self {
        Self { owner: Some(owner), ..self }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.elems * self.dtype.size_bytes() as u64
    }
}

/// A contiguous piece of a tensor: the unit of synchronisation (P3's slice, Poseidon's KV pair).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The tensor it is part of.
    pub tensor: TensorId,
    /// Where it starts in the tensor, in bytes.
    pub offset_bytes: u64,
    /// Its length in bytes, at least 1. Of a gathered tensor, which has one slice: the longest payload of a frame.
    pub len_bytes: u32,
    /// Its length in the tensor's wire type: the payload of a frame of the store that carries all of it.
    pub wire_bytes: u32,
    /// The rank whose shard sums it; of a collective the rank that counts as the first. A gathered tensor has no owner, and this
    /// says nothing.
    pub owner: Rank,
    /// Where the owner updates what it keeps and members may be lost: the member that keeps it, too, and answers; none in a book of one.
    pub replica: Option<Rank>,
    /// Its number among the store's slices of this owner, in book order; for other routes its number among all such slices.
    pub at_owner: u32,
    /// The lane that carries it.
    pub lane: u32,
}

impl Slice {
    /// Whether this rank keeps what is kept of it.
    #[must_use]
    pub fn is_kept_by(&self, rank: Rank) -> bool {
        self.owner == rank || self.replica == Some(rank)
    }

    /// Who keeps what is kept of it.
    pub fn keepers(&self) -> impl Iterator<Item = Rank> {
        [Some(self.owner), self.replica].into_iter().flatten()
    }

    /// The replica, if it gives this rank its result: the owner makes its own, and the replica waits for the owner.
    #[must_use]
    pub fn answers(&self, rank: Rank) -> Option<Rank> {
        self.replica.filter(|_| !self.is_kept_by(rank))
    }
}

/// A book.
#[derive(Debug, Clone)]
pub struct Book {
    /// What is synchronised, for messages and reports.
    pub name: String,
    /// By whom, and what they do. Owners follow from it.
    pub roles: Roles,
    /// Names of the layers in registration order.
    pub layers: Vec<String>,
    /// Tensors, in the order given.
    pub tensors: Vec<Tensor>,
    /// Slices, grouped by tensor.
    pub slices: Vec<Slice>,
    /// By rank, bytes of the store that it owns, as they travel.
    pub owned_bytes: Vec<u64>,
    /// By rank, slices of the store that it owns.
    pub owned_slices: Vec<u32>,
    /// Slices of other algorithms than the store.
    pub collective_slices: u32,
    /// How tensors were cut that are not gathered: slices of the store are at most `store_bytes` long in this book, those of
    /// collectives at most `collective_bytes`.
    pub slicing: Slicing,
}

/// Slices end on multiples of this many elements where possible, so that sums run on whole cache lines.
const ALIGN_ELEMS: u64 = 64;
/// A tensor is spread over all ranks only if its pieces have at least this many bytes.
const SPREAD_BYTES_MIN: u64 = 32 << 10;

impl Book {
    /// As [`Book::cut`], for a whole job of so many ranks and with slices of one size.
    ///
    /// # Errors
    /// As there.
    pub fn new(
        name: impl Into<String>,
        layers: Vec<String>,
        tensors: Vec<Tensor>,
        ranks: u32,
        slice_bytes: usize,
        lanes: u32,
    ) -> Result<Self, Error> {
        Self::cut(name, layers, tensors, &Members::all(ranks), Slicing::fixed(slice_bytes, lanes))
    }

    /// As [`Book::deal`], for members that are alike.
    ///
    /// # Errors
    /// As there.
    pub fn cut(
        name: impl Into<String>,
        layers: Vec<String>,
        tensors: Vec<Tensor>,
        members: &Members,
        slicing: Slicing,
    ) -> Result<Self, Error> {
        Self::deal(name, layers, tensors, &Roles::alike(members.clone()), slicing)
    }

    /// Cuts `tensors` into slices of about the size given and gives each to the owner that has least so far, so that the
    /// shards differ by at most one slice and each layer is spread over all owners; but a tensor's to its owner, if it has one.
    ///
    /// # Errors
    /// [`Error::Config`] if a bound of [`limits`] is exceeded, a tensor names a layer that does not exist, or roles are not what
    /// its members, or its tensors, can have.
    pub fn deal(
        name: impl Into<String>,
        layers: Vec<String>,
        mut tensors: Vec<Tensor>,
        roles: &Roles,
        slicing: Slicing,
    ) -> Result<Self, Error> {
        let name = name.into();
        check(&name, &layers, &tensors, roles, slicing)?;
        let (members, owners, contributors) = (&roles.members, &roles.owners, roles.contributors());
        let highest = members.iter().last().map_or(0, Rank::index);
        let (frame_bytes, lanes) = (slicing.store_bytes, slicing.lanes);
        // An owner does not round its own contribution, so with a wire type it shows in the bits where a slice lives, and
        // with that how all others before it were cut.
        let rounded = tensors.iter().any(|tensor| tensor.wire != tensor.dtype);
        let slicing =
            if rounded { Slicing { store_bytes: slicing.collective_bytes, ..slicing } } else { slicing };
        let mut book = Self {
            name,
            layers,
            roles: roles.clone(),
            tensors: Vec::new(),
            slices: Vec::new(),
            owned_bytes: vec![0; highest + 1],
            owned_slices: vec![0; highest + 1],
            collective_slices: 0,
            slicing,
        };
        let mut gathered = 0;
        for (id, tensor) in tensors.iter_mut().enumerate() {
            if tensor.route == Route::Gather {
                tensor.first_slice = book.slices.len() as u32;
                tensor.slice_count = 1;
                let (tensor, len_bytes, lane) = (id as u32, frame_bytes as u32, gathered % lanes);
                let (owner, at_owner, offset_bytes) = (contributors.at(0), 0, 0);
                let wire_bytes = len_bytes;
                book.slices.push(Slice {
                    tensor,
                    offset_bytes,
                    len_bytes,
                    wire_bytes,
                    owner,
                    replica: None,
                    at_owner,
                    lane,
                });
                gathered += 1;
                continue;
            }
            let (slice_bytes, ranks) = if tensor.route == Route::STORE {
                (slicing.store_bytes, owners.count())
            } else {
                (slicing.collective_bytes, contributors.count())
            };
            let elem_bytes = tensor.dtype.size_bytes() as u64;
            let pieces = pieces(tensor.len_bytes(), slice_bytes, ranks);
            if book.slices.len() as u64 + pieces > limits::SLICES_MAX {
                let (book, max) = (&book.name, limits::SLICES_MAX);
                return Err(Error::Config(format!(
                    "{book}: more than {max} slices; use a larger slice_bytes"
                )));
            }
            tensor.first_slice = book.slices.len() as u32;
            let piece_elems = piece_elems(tensor.elems, pieces, slice_bytes as u64 / elem_bytes);
            let mut start = 0;
            while start < tensor.elems {
                let elems = piece_elems.min(tensor.elems - start);
                book.push_slice(id as u32, tensor, start * elem_bytes, elems as u32, lanes, tensor.owner);
                start += elems;
            }
            tensor.slice_count = book.slices.len() as u32 - tensor.first_slice;
        }
        book.tensors = tensors;
        Ok(book)
    }

    fn push_slice(
        &mut self,
        tensor: TensorId,
        Tensor { dtype, wire, route, .. }: &Tensor,
        offset_bytes: u64,
        elems: u32,
        lanes: u32,
        owner: Option<Rank>,
    ) {
        let [len_bytes, wire_bytes] = [dtype, wire].map(|of| elems * of.size_bytes() as u32);
        let (owner, at_owner) = if *route == Route::STORE {
            let least = self.roles.owners.iter().min_by_key(|rank| self.owned_bytes[rank.index()]);
            let owner = owner.or(least).unwrap_or(Rank(0));
            self.owned_bytes[owner.index()] += u64::from(wire_bytes);
            self.owned_slices[owner.index()] += 1;
            (owner, self.owned_slices[owner.index()] - 1)
        } else {
            let number = self.collective_slices;
            self.collective_slices += 1;
            // All but the central server take turns, so that roots and folds load all who contribute alike.
            let turn = if *route == Route::Sum(Algorithm::Central) { 0 } else { number };
            (self.roles.contributors().at(turn), number)
        };
        // Dealt within each owner's slices, so that every lane talks to every owner.
        let lane = at_owner % lanes;
        let Roles { members, rules, .. } = &self.roles;
        let replicated = rules.recoverable && rules.fold == Fold::Updated;
        let replica = members.after(owner).next().filter(|_| replicated);
        self.slices.push(Slice {
            tensor,
            offset_bytes,
            len_bytes,
            wire_bytes,
            owner,
            replica,
            at_owner,
            lane,
        });
    }

    /// The same slices, dealt to other members: of the next epoch, in which rounds of these slices go on. Where owners keep
    /// something, as much as possible stays where it is.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn among(&self, members: &Members) -> Self {
        assert!(!members.is_empty(), "a book is dealt to somebody");
        let roles = Roles { rules: self.roles.rules.clone(), ..Roles::alike(members.clone()) };
        let (owned_bytes, owned_slices) = (vec![0; members.end()], vec![0; members.end()]);
        let mut book = Self { roles, slices: Vec::new(), owned_bytes, owned_slices, ..self.clone() };
        let staying = if self.roles.rules.fold == Fold::Fresh { Vec::new() } else { self.staying(members) };
        for (id, slice) in self.slices.iter().enumerate() {
            let tensor = &self.tensors[slice.tensor as usize];
            let elems = slice.len_bytes / tensor.dtype.size_bytes() as u32;
            let (offset_bytes, lanes) = (slice.offset_bytes, self.slicing.lanes);
            book.push_slice(slice.tensor, tensor, offset_bytes, elems, lanes, staying.get(id).copied());
        }
        book
    }

    /// By slice, who owns it next of these members: who does, else its replica, as far as these have no more than their part then; else
    /// who has least.
    fn staying(&self, members: &Members) -> Vec<Rank> {
        let bytes = |slice: &Slice| u64::from(slice.wire_bytes);
        let all: u64 = self.slices.iter().map(bytes).sum();
        let longest = self.slices.iter().map(bytes).max().unwrap_or(0);
        let part = all.div_ceil(u64::from(members.count())) + longest;
        let mut owned = vec![0; members.end()];
        let mut next: Vec<Option<Rank>> = vec![None; self.slices.len()];
        for who in [|slice: &Slice| Some(slice.owner), |slice: &Slice| slice.replica] {
            for (slice, next) in self.slices.iter().zip(&mut next).filter(|(_, next)| next.is_none()) {
                let fits =
                    |rank: &Rank| members.contains(*rank) && owned[rank.index()] + bytes(slice) <= part;
                *next = who(slice).filter(fits);
                next.iter().for_each(|rank| owned[rank.index()] += bytes(slice));
            }
        }
        let dealt = self.slices.iter().zip(next).map(|(slice, next)| {
            let least = || members.iter().min_by_key(|rank| owned[rank.index()]);
            let rank = next.or_else(least).unwrap_or(slice.owner);
            owned[rank.index()] += if next.is_none() { bytes(slice) } else { 0 };
            rank
        });
        dealt.collect()
    }

    /// The slices of a tensor.
    #[must_use]
    pub fn slices_of(&self, tensor: TensorId) -> std::ops::Range<u32> {
        let tensor = &self.tensors[tensor as usize];
        tensor.first_slice..tensor.first_slice + tensor.slice_count
    }

    /// Those who take part in a slice's rounds.
    #[must_use]
    pub fn members_of(&self, slice: SliceId) -> &Members {
        let in_store = self.tensor_of(slice).route == Route::STORE;
        if in_store { &self.roles.members } else { self.roles.contributors() }
    }

    /// Whether an owner may read a tensor's value in the memory in which it gets the answers: they are not rounded, and every member
    /// gets the result of each round when it ends, and at no other time.
    #[must_use]
    pub fn may_lend(&self, tensor: TensorId) -> bool {
        let Roles { members, rules, .. } = &self.roles;
        let at_once = rules.answered == Answered::All && rules.stragglers.is_none();
        let of = self.tensors.get(tensor as usize);
        let exact = of.is_some_and(|of| of.route == Route::STORE && of.wire == of.dtype);
        exact && at_once && members.iter().all(|rank| rules.needs(rank))
    }

    /// The number of a slice among those of which `peer` may have to keep payloads: with the store alone, and without groups,
    /// those that it owns, otherwise all. In both cases numbers grow with the slice's own, so they order slices alike on all ranks.
    #[must_use]
    pub fn number_at_peer(&self, slice: SliceId) -> u32 {
        if self.only_owners_keep() { self.slices[slice as usize].at_owner } else { slice }
    }

    fn only_owners_keep(&self) -> bool {
        self.collective_slices == 0 && self.roles.groups.is_empty()
    }

    /// How many such numbers there are.
    #[must_use]
    pub fn numbers_at_peer(&self, peer: Rank) -> u32 {
        if self.only_owners_keep() {
            self.owned_slices.get(peer.index()).copied().unwrap_or(0)
        } else {
            self.slices.len() as u32
        }
    }

    /// The tensor that a slice is part of.
    #[must_use]
    pub fn tensor_of(&self, slice: SliceId) -> &Tensor {
        &self.tensors[self.slices[slice as usize].tensor as usize]
    }

    /// Name of the layer that a tensor belongs to.
    #[must_use]
    pub fn layer_name(&self, tensor: TensorId) -> &str {
        &self.layers[self.tensors[tensor as usize].layer as usize]
    }
}

/// About how many slices a tensor of this length is cut into: none for an empty one.
///
/// At least one per rank where they stay worth a frame, and equally many for all ranks: every shard has the same part in
/// every large tensor, so that no host is busier than others while a layer travels.
#[must_use]
pub fn pieces(len_bytes: u64, slice_bytes: usize, ranks: u32) -> u64 {
    let ranks = u64::from(ranks);
    let least = len_bytes.div_ceil(slice_bytes.max(1) as u64).max(ranks.min(len_bytes / SPREAD_BYTES_MIN));
    if least < ranks { least } else { least.next_multiple_of(ranks) }
}

/// Elements of each of `pieces` near-equal pieces, rounded up to whole cache lines but never above `max_elems`.
fn piece_elems(elems: u64, pieces: u64, max_elems: u64) -> u64 {
    let even = elems.div_ceil(pieces.max(1));
    even.next_multiple_of(ALIGN_ELEMS).min(max_elems).max(1)
}

fn check(
    name: &str,
    layers: &[String],
    tensors: &[Tensor],
    roles: &Roles,
    Slicing { store_bytes, collective_bytes, lanes }: Slicing,
) -> Result<(), Error> {
    let fail = |what: String| Err(Error::Config(format!("{name}: {what}")));
    let members = &roles.members;
    let ranks = members.count();
    if ranks == 0 || members.iter().any(|rank| rank.0 >= limits::RANKS_MAX) {
        return fail(format!("{ranks} ranks; 1 to {} are possible", limits::RANKS_MAX));
    }
    if lanes == 0 || lanes > limits::LANES_MAX {
        return fail(format!("{lanes} lanes; 1 to {} are possible", limits::LANES_MAX));
    }
    let possible = limits::SLICE_BYTES_MIN..=limits::SLICE_BYTES_MAX;
    if let Some(slice_bytes) =
        [store_bytes, collective_bytes].into_iter().find(|size| !possible.contains(size))
    {
        let (min, max) = (possible.start(), possible.end());
        return fail(format!("slice_bytes is {slice_bytes}; {min} to {max} are possible"));
    }
    if layers.len() > limits::LAYERS_MAX || tensors.len() > limits::TENSORS_MAX {
        let (layers_max, tensors_max) = (limits::LAYERS_MAX, limits::TENSORS_MAX);
        return fail(format!("more than {layers_max} layers or {tensors_max} tensors"));
    }
    if let Some(why) = roles.wrong() {
        return fail(why);
    }
    if let Some(Tensor { name, .. }) = tensors.iter().find(|t| t.route == Route::Owner) {
        return fail(format!(
            "tensor {name:?} cannot travel by its owner: let one rank own it, and gather it"
        ));
    }
    let elsewhere = |t: &&Tensor| t.route != Route::STORE;
    if let Some(Tensor { name, route, .. }) =
        tensors.iter().find(elsewhere).filter(|_| roles.rules.recoverable)
    {
        let route = route.name();
        return fail(format!(
            "tensor {name:?} is synchronised by {route}; where members may be lost all is in the store"
        ));
    }
    let nobody = |t: &&Tensor| {
        let may = |rank| match t.route {
            Route::STORE => !roles.rules.recoverable && roles.owners.contains(rank),
            Route::Gather => roles.contributors().contains(rank),
            _ => false,
        };
        t.owner.is_some_and(|rank| !may(rank))
    };
    if let Some(Tensor { name, owner: Some(owner), .. }) = tensors.iter().find(nobody) {
        return fail(format!(
            "tensor {name:?} cannot be rank {owner}'s: of one in the store that rank must own slices, which nobody does for good \
             where members may be lost; of one that is gathered it must contribute"
        ));
    }
    let gathered = |t: &&Tensor| t.route == Route::Gather;
    let unfit = |t: &&Tensor| t.dtype != Dtype::Bytes || t.elems > limits::GATHER_BYTES_MAX;
    if let Some(tensor) = tensors.iter().filter(gathered).find(unfit) {
        let (name, max) = (&tensor.name, limits::GATHER_BYTES_MAX);
        return fail(format!("tensor {name:?} is gathered, so it must be of at most {max} bytes"));
    }
    let rounded = |t: &&Tensor| t.wire != t.dtype;
    let unfit = |t: &&Tensor| {
        t.dtype != Dtype::F32 || !matches!(t.wire, Dtype::F16 | Dtype::Bf16) || t.route != Route::STORE
    };
    if let Some(tensor) = tensors.iter().filter(rounded).find(unfit) {
        let Tensor { name, dtype, wire, route, .. } = tensor;
        let (dtype, wire, route) = (dtype.name(), wire.name(), route.name());
        return fail(format!(
            "tensor {name:?} is {dtype} synchronised by {route} and cannot travel as {wire}; f32 in the store can, as f16 or bf16"
        ));
    }
    let updated = |t: &&Tensor| t.route != Route::STORE || matches!(t.dtype, Dtype::F32 | Dtype::F64);
    if let Some(Tensor { name, dtype, .. }) =
        tensors.iter().find(|t| !updated(t)).filter(|_| roles.rules.fold == Fold::Updated)
    {
        let dtype = dtype.name();
        return fail(format!(
            "tensor {name:?} is {dtype}; values of f32 and f64 can be updated where they are kept"
        ));
    }
    let Rules { fold, recoverable, .. } = roles.rules;
    if let Some(Tensor { name, wire, .. }) =
        tensors.iter().find(rounded).filter(|_| recoverable && fold == Fold::Updated)
    {
        let wire = wire.name();
        return fail(format!(
            "tensor {name:?} travels as {wire}, and its owner updates it: what it keeps is in no answer, and not in replicas yet; \
             where members may be lost such tensors travel as they are"
        ));
    }
    match tensors.iter().find(|t| t.layer as usize >= layers.len()) {
        Some(tensor) => fail(format!(
            "tensor {:?} names layer {}, but there are {}",
            tensor.name,
            tensor.layer,
            layers.len()
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roles::{Groups, MustBeIn, Staleness};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_each_tensor_once_and_shards_are_balanced(
            sizes in proptest::collection::vec(0u64..200_000, 0..40),
            ranks in 1u32..18, lanes in 1u32..5, slice_bytes in 1024usize..70_000,
        ) {
            let types = [
                (Dtype::F32, Dtype::F32), (Dtype::F64, Dtype::F64), (Dtype::F32, Dtype::Bf16), (Dtype::F16, Dtype::F16),
                (Dtype::Bytes, Dtype::Bytes), (Dtype::F32, Dtype::F16),
            ];
            let tensor = |(i, &n): (usize, &u64)| {
                let (dtype, wire) = types[i % types.len()];
                Tensor::new(format!("t{i}"), 0, dtype, n).with_wire(wire)
            };
            let tensors: Vec<Tensor> = sizes.iter().enumerate().map(tensor).collect();
            let book = Book::new("test", vec!["layer".into()], tensors, ranks, slice_bytes, lanes).unwrap();
            for (id, tensor) in book.tensors.iter().enumerate() {
                let mut end = 0;
                for slice in &book.slices[book.slices_of(id as u32).start as usize..book.slices_of(id as u32).end as usize] {
                    prop_assert_eq!(slice.tensor, id as u32);
                    prop_assert_eq!(slice.offset_bytes, end);
                    prop_assert!(slice.len_bytes > 0 && slice.len_bytes as usize <= slice_bytes);
                    prop_assert_eq!(slice.len_bytes as usize % tensor.dtype.size_bytes(), 0);
                    prop_assert_eq!(
                        slice.wire_bytes as usize * tensor.dtype.size_bytes(),
                        slice.len_bytes as usize * tensor.wire.size_bytes()
                    );
                    prop_assert!(slice.lane < lanes);
                    end += u64::from(slice.len_bytes);
                }
                prop_assert_eq!(end, tensor.len_bytes());
            }
            let (max, min) = (book.owned_bytes.iter().max().unwrap(), book.owned_bytes.iter().min().unwrap());
            let largest = book.slices.iter().map(|s| u64::from(s.wire_bytes)).max().unwrap_or(0);
            prop_assert!(max - min <= largest, "owned {:?}, largest slice {}", book.owned_bytes, largest);
            let wire_bytes = |tensor: &Tensor| tensor.elems * tensor.wire.size_bytes() as u64;
            prop_assert_eq!(book.owned_bytes.iter().sum::<u64>(), book.tensors.iter().map(wire_bytes).sum::<u64>());
        }
    }

    proptest! {
        #[test]
        fn owners_follow_from_the_members_whoever_they_are(
            ranks in proptest::collection::btree_set(0u32..50, 1..12),
            sizes in proptest::collection::vec(1u64..100_000, 1..6),
            collective in 0usize..=Algorithm::COLLECTIVES.len(),
        ) {
            let routes = [Route::STORE, Algorithm::COLLECTIVES.get(collective).map_or(Route::Gather, |a| Route::Sum(*a))];
            let tensor = |(i, &elems): (usize, &u64)| {
                let route = routes[i % 2];
                let dtype = if route == Route::Gather { Dtype::Bytes } else { Dtype::F32 };
                Tensor::new(format!("t{i}"), 0, dtype, elems).with_route(route)
            };
            let tensors: Vec<Tensor> = sizes.iter().enumerate().map(tensor).collect();
            let members: Members = ranks.iter().copied().map(Rank).collect();
            let cut = |members| {
                Book::cut("test", vec!["layer".into()], tensors.clone(), members, Slicing::fixed(4096, 2)).unwrap()
            };
            // A job of as many ranks, each renumbered to the member that has its place.
            let (book, alike) = (cut(&members), cut(&Members::all(members.count())));
            prop_assert_eq!(book.slices.len(), alike.slices.len());
            for (slice, other) in book.slices.iter().zip(&alike.slices) {
                let owner = members.at(other.owner.0);
                prop_assert_eq!(slice, &Slice { owner, ..other.clone() });
            }
            for rank in (0..book.owned_bytes.len() as u32).map(Rank) {
                let of = members.index_of(rank).map_or((0, 0), |at| (alike.owned_bytes[at], alike.owned_slices[at]));
                prop_assert_eq!((book.owned_bytes[rank.index()], book.owned_slices[rank.index()]), of);
                prop_assert!(book.collective_slices > 0 || book.numbers_at_peer(rank) == of.1);
            }
        }
    }

    proptest! {
        #[test]
        fn any_members_may_be_the_owners(
            places in proptest::collection::btree_map(0u32..50, any::<bool>(), 1..12),
            sizes in proptest::collection::vec(1u64..100_000, 1..6),
        ) {
            let of = |owners: bool| places.iter().filter(move |(_, owns)| !owners || **owns).map(|(rank, _)| Rank(*rank));
            let (members, owners): (Members, Members) = (of(false).collect(), of(true).collect());
            let deal = |members: &Members, owners: &Members| {
                let tensor = |(i, &elems): (usize, &u64)| Tensor::new(format!("t{i}"), 0, Dtype::F32, elems);
                let tensors = sizes.iter().enumerate().map(tensor).collect();
                let roles = Roles { owners: owners.clone(), ..Roles::alike(members.clone()) };
                Book::deal("test", vec!["layer".into()], tensors, &roles, Slicing::fixed(4096, 2))
            };
            if owners.is_empty() {
                prop_assert!(deal(&members, &owners).unwrap_err().to_string().contains("own its slices"));
                return Ok(());
            }
            // As if there were nobody else.
            let (book, alone) = (deal(&members, &owners).unwrap(), deal(&owners, &owners).unwrap());
            prop_assert_eq!(&book.slices, &alone.slices);
            prop_assert!(book.slices.iter().all(|slice| owners.contains(slice.owner)));
            let owned: Vec<u64> = owners.iter().map(|rank| book.owned_bytes[rank.index()]).collect();
            let (most, least) = (owned.iter().max().unwrap(), owned.iter().min().unwrap());
            prop_assert!(most - least <= 4096, "{owned:?}");
            prop_assert_eq!(book.owned_bytes.iter().sum::<u64>(), owned.iter().sum::<u64>(), "nobody else owns any");
        }
    }

    #[test]
    fn roles_that_a_book_cannot_have_are_named() {
        let ranks = |ranks: &[u32]| -> Members { ranks.iter().copied().map(Rank).collect() };
        let alike = Roles::alike(ranks(&[0, 2, 5]));
        let these = |some: &[u32]| Rules { must_be_in: MustBeIn::These(ranks(some)), ..Rules::default() };
        let kept = Roles { rules: Rules { fold: Fold::Kept, ..Rules::default() }, ..alike.clone() };
        let grouped = |owners: &[u32], groups: &[&[u32]]| {
            let groups = Groups::of_members(groups.iter().map(|some| ranks(some)));
            Roles { owners: ranks(owners), groups, ..alike.clone() }
        };
        let one_by_one = |clocks: &[u32]| {
            let staleness = Some(Staleness { of: ranks(clocks), most: 1 });
            Rules { must_be_in: MustBeIn::Nobody, fold: Fold::Kept, staleness, ..Rules::default() }
        };
        let deal = |roles: &Roles, route, wire| {
            let tensor = Tensor::new("w", 0, Dtype::F32, 10).with_route(route).with_wire(wire);
            let slicing = Slicing::fixed(4096, 1);
            let book = Book::deal("model", vec!["fc".into()], vec![tensor], roles, slicing);
            book.map_or_else(|error| error.to_string(), |_| "fits".into())
        };
        let ring = Route::Sum(Algorithm::Ring);
        for (roles, route, wire, word) in [
            (alike.clone(), ring, Dtype::F32, "fits"),
            (
                Roles { owners: ranks(&[1]), ..alike.clone() },
                Route::STORE,
                Dtype::F32,
                "\"1\" own its slices",
            ),
            (
                Roles { rules: these(&[0, 3]), ..alike.clone() },
                Route::STORE,
                Dtype::F32,
                "\"0, 3\" must be in",
            ),
            (Roles { rules: these(&[0]), ..alike.clone() }, Route::STORE, Dtype::Bf16, "fits"),
            (Roles { rules: these(&[0]), ..alike.clone() }, ring, Dtype::F32, "fits"),
            (kept.clone(), Route::STORE, Dtype::F32, "fits"),
            (grouped(&[0, 5], &[&[0, 2], &[5]]), Route::STORE, Dtype::Bf16, "fits"),
            (
                grouped(&[0, 5], &[&[0], &[5]]),
                Route::STORE,
                Dtype::F32,
                "must have each rank that contributes once: 0, 2, 5",
            ),
            (
                grouped(&[0, 5], &[&[0, 2], &[2, 5]]),
                Route::STORE,
                Dtype::F32,
                "groups have the ranks 0, 2, 2, 5",
            ),
            (
                grouped(&[2], &[&[0, 2], &[5]]),
                Route::STORE,
                Dtype::F32,
                "rank 2 owns slices, but in its group",
            ),
            (
                Roles { rules: kept.rules.clone(), ..grouped(&[0], &[&[0, 2, 5]]) },
                Route::STORE,
                Dtype::F32,
                "the fresh result",
            ),
            (
                Roles { rules: one_by_one(&[0]), ..grouped(&[0, 5], &[&[0, 2]]) },
                Route::STORE,
                Dtype::F32,
                "fits",
            ),
            (
                Roles { rules: one_by_one(&[0, 2]), ..grouped(&[0, 5], &[&[0, 2]]) },
                Route::STORE,
                Dtype::F32,
                "rank 2 has no clock of its own",
            ),
            (kept, Route::STORE, Dtype::Bf16, "fits"),
        ] {
            let said = deal(&roles, route, wire);
            assert!(said.contains(word), "{roles:?}: {said}");
        }
    }

    #[test]
    fn a_tensor_smaller_than_a_slice_is_spread_over_all_shards() {
        let tensors = vec![Tensor::new("w", 0, Dtype::F32, 64 << 10), Tensor::new("b", 0, Dtype::F32, 100)];
        let book = Book::new("model", vec!["fc".into()], tensors, 4, 1 << 20, 1).unwrap();
        assert_eq!(book.owned_slices, [2, 1, 1, 1]);
        assert_eq!(book.owned_bytes, [65536 + 400, 65536, 65536, 65536]);
    }

    #[test]
    fn every_owner_has_equally_many_slices_of_a_large_tensor() {
        let elems = 18 * (128 << 10); // 18 slices of 512 KiB, were it not for the 8 ranks
        let tensors = vec![Tensor::new("w", 0, Dtype::F32, elems), Tensor::new("v", 0, Dtype::F32, elems)];
        let book = Book::new("model", vec!["fc".into()], tensors, 8, 512 << 10, 1).unwrap();
        for tensor in 0..2 {
            let slices =
                &book.slices[book.slices_of(tensor).start as usize..book.slices_of(tensor).end as usize];
            let of = |rank| slices.iter().filter(|slice| slice.owner == Rank(rank)).count();
            assert_eq!((0..8).map(of).collect::<Vec<_>>(), [3; 8]);
        }
    }

    #[test]
    fn a_tensor_may_have_an_owner_of_its_own() {
        let tensors = || {
            let tensor = |name: &str| Tensor::new(name, 0, Dtype::F32, 64 << 10);
            vec![tensor("w"), tensor("own").owned_by(Rank(1)), tensor("v")]
        };
        let deal = |tensors, roles: &Roles| {
            Book::deal("model", vec!["fc".into()], tensors, roles, Slicing::fixed(16 << 10, 1))
        };
        let alike = Roles::alike(Members::all(2));
        let book = deal(tensors(), &alike).unwrap();
        let owners = |tensor| book.slices_of(tensor).map(|at| book.slices[at as usize].owner.0);
        assert!(owners(1).all(|owner| owner == 1) && owners(1).count() == 16);
        assert_eq!(owners(0).filter(|owner| *owner == 1).count(), 8);
        assert_eq!(book.owned_bytes, [384 << 10; 2], "what is dealt makes up for it");
        let slices_of_1 = book.slices.iter().filter(|slice| slice.owner == Rank(1));
        assert!(slices_of_1.map(|slice| slice.at_owner).eq(0..book.owned_slices[1]));
        let ring = |tensor: Tensor| tensor.with_route(Route::Sum(Algorithm::Ring));
        let gathered =
            |rank| Tensor::new("own", 0, Dtype::Bytes, 9).with_route(Route::Gather).owned_by(Rank(rank));
        assert!(deal(vec![gathered(1)], &alike).is_ok());
        let lost = Rules { recoverable: true, ..Rules::default() };
        let first = Rules { must_be_in: MustBeIn::These(Members::all(1)), ..Rules::default() };
        for (tensors, roles) in [
            (tensors().into_iter().map(ring).collect(), alike.clone()),
            (vec![gathered(1)], Roles { rules: first, owners: Members::all(1), ..alike.clone() }),
            (tensors(), Roles { owners: Members::all(1), ..alike.clone() }),
            (tensors(), Roles { rules: lost, ..alike }),
        ] {
            let said = deal(tensors, &roles).unwrap_err().to_string();
            assert!(said.contains("tensor \"own\" cannot be rank 1's"), "{said}");
        }
    }

    /// A book whose owners update, of a job whose members may be lost.
    fn replicated(ranks: u32, sizes: &[u64]) -> Book {
        let rules = Rules { recoverable: true, fold: Fold::Updated, ..Rules::default() };
        let roles = Roles { rules, ..Roles::alike(Members::all(ranks)) };
        let tensors = (0..).zip(sizes).map(|(i, elems)| Tensor::new(format!("t{i}"), 0, Dtype::F32, *elems));
        Book::deal("model", vec!["fc".into()], tensors.collect(), &roles, Slicing::fixed(4096, 2)).unwrap()
    }

    proptest! {
        /// As often as members are lost, or come.
        #[test]
        fn what_owners_keep_stays_with_them_or_their_replicas_as_far_as_parts_are_equal(
            sizes in proptest::collection::vec(1u64..20_000, 1..12), ranks in 2u32..9,
            changes in proptest::collection::vec(proptest::collection::btree_set(0u32..12, 1..9), 1..5),
        ) {
            let mut book = replicated(ranks, &sizes);
            for ranks in changes {
                let members: Members = ranks.into_iter().map(Rank).collect();
                let next = book.among(&members);
                prop_assert_eq!(&next.among(&members).slices, &next.slices, "nothing moves where nobody goes");
                let longest = next.slices.iter().map(|slice| u64::from(slice.len_bytes)).max().unwrap_or(0);
                let all: u64 = next.owned_bytes.iter().sum();
                let part = all.div_ceil(u64::from(members.count())) + longest;
                for rank in members.iter() {
                    prop_assert!(next.owned_bytes[rank.index()] <= part);
                    let numbers = next.slices.iter().filter(|slice| slice.owner == rank).map(|slice| slice.at_owner);
                    prop_assert!(numbers.eq(0..next.owned_slices[rank.index()]));
                }
                for (slice, before) in next.slices.iter().zip(&book.slices) {
                    prop_assert_eq!(slice.replica, members.after(slice.owner).next());
                    prop_assert!(members.contains(slice.owner));
                    let moved = slice.owner != before.owner && members.contains(before.owner);
                    let full = next.owned_bytes[before.owner.index().min(next.owned_bytes.len() - 1)] + longest;
                    prop_assert!(!moved || full > part - longest, "it had its part");
                }
                book = next;
            }
        }
    }

    #[test]
    fn a_lost_member_leaves_what_it_kept_and_nothing_else_moves() {
        let book = replicated(4, &[64 << 10]);
        let next = book.among(&[0, 2, 3].map(Rank).into_iter().collect());
        let moved =
            book.slices.iter().zip(&next.slices).filter(|(before, after)| before.owner != after.owner);
        assert!(moved.clone().all(|(before, _)| before.owner == Rank(1)));
        assert_eq!(moved.clone().count(), book.owned_slices[1] as usize);
        assert!(moved.filter(|(_, after)| after.owner == Rank(2)).count() > 0, "whose replica it was");
        assert_eq!(book.among(&Members::all(1)).slices[0].replica, None);
        let plain =
            Book::new("model", vec!["fc".into()], vec![Tensor::new("w", 0, Dtype::F32, 10)], 2, 4096, 1);
        assert_eq!(plain.unwrap().slices[0].replica, None);
    }

    #[test]
    fn what_travels_rounded_is_in_no_replica() {
        let rules = Rules { recoverable: true, fold: Fold::Updated, ..Rules::default() };
        let roles = Roles { rules, ..Roles::alike(Members::all(2)) };
        let tensors = vec![Tensor::new("w", 0, Dtype::F32, 10).with_wire(Dtype::Bf16)];
        let book = Book::deal("model", vec!["fc".into()], tensors, &roles, Slicing::fixed(4096, 1));
        let said = book.unwrap_err().to_string();
        assert!(said.contains("\"w\" travels as bf16") && said.contains("replicas"), "{said}");
    }

    #[test]
    fn slices_whose_place_shows_in_the_bits_have_their_own_size() {
        let slicing = Slicing { store_bytes: 64 << 10, collective_bytes: 512 << 10, lanes: 1 };
        let tensor = |name: &str| Tensor::new(name, 0, Dtype::F32, 1 << 20);
        let longest = |tensors: Vec<Tensor>| {
            let count = tensors.len() as u32;
            let book = Book::cut("model", vec!["fc".into()], tensors, &Members::all(2), slicing).unwrap();
            let of = |tensor| {
                book.slices_of(tensor).map(|slice| book.slices[slice as usize].len_bytes >> 10).max()
            };
            let longest = (0..count).map(|tensor| of(tensor).unwrap()).collect::<Vec<_>>();
            (longest, [book.slicing.store_bytes, book.slicing.collective_bytes].map(|bytes| bytes >> 10))
        };
        let ring = tensor("ring").with_route(Route::Sum(Algorithm::Ring));
        assert_eq!(longest(vec![tensor("exact"), ring]), (vec![64, 512], [64, 512]));
        assert_eq!(
            longest(vec![tensor("exact"), tensor("half").with_wire(Dtype::Bf16)]),
            (vec![512, 512], [512, 512])
        );
    }

    #[test]
    fn only_fp32_in_the_store_travels_as_another_type() {
        let book = |dtype, wire, route| {
            let tensor = Tensor::new("w", 0, dtype, 10).with_wire(wire).with_route(route);
            Book::new("model", vec!["fc".into()], vec![tensor], 2, 4096, 1).map_err(|error| error.to_string())
        };
        assert!(book(Dtype::F32, Dtype::Bf16, Route::STORE).is_ok());
        assert!(book(Dtype::F32, Dtype::F16, Route::STORE).is_ok());
        for (dtype, wire, route) in [
            (Dtype::F64, Dtype::Bf16, Route::STORE),
            (Dtype::F32, Dtype::F64, Route::STORE),
            (Dtype::F32, Dtype::I16, Route::STORE),
            (Dtype::Bf16, Dtype::F16, Route::STORE),
            (Dtype::F32, Dtype::Bf16, Route::Sum(Algorithm::Ring)),
        ] {
            let message = book(dtype, wire, route).unwrap_err();
            for word in ["\"w\"", dtype.name(), wire.name(), route.name()] {
                assert!(message.contains(word), "{message}");
            }
        }
    }

    #[test]
    fn bad_input_is_named() {
        let book = |layer, ranks, slice_bytes| {
            Book::new(
                "model",
                vec!["fc".into()],
                vec![Tensor::new("w", layer, Dtype::F32, 10)],
                ranks,
                slice_bytes,
                1,
            )
        };
        assert!(book(0, 2, 4096).is_ok());
        for (result, word) in
            [(book(1, 2, 4096), "layer 1"), (book(0, 0, 4096), "ranks"), (book(0, 2, 10), "slice_bytes")]
        {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("model"), "{message}");
        }
    }
}
