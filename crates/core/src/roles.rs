//! Who does what in a book, as values: whom it is for, who owns slices, and how a round of the store goes.
//!
//! A round has three rules, each replaceable by itself, which its owner follows (`exchange/store.rs`): who must be in, what
//! becomes of contributions, who is answered. [`Roles::alike`] is training on equal ranks. Examples of others:
//!
//! | | owners | must be in | fold | answered |
//! |---|---|---|---|---|
//! | servers apart from workers | the servers | the workers | fresh | all |
//! | groups that meet in a store ([`Groups`]) | their heads, or the servers | the workers | fresh | all |
//! | a value on servers, updated in rounds | the servers | the workers | kept | who asks |
//! | the same, updated by each contribution at once | the servers | nobody | kept, or updated by a standing order | who asks |
//! | the same, by each group's ([`Groups`]) | the servers, or heads | nobody; of a group all its members | the same | who asks |
//! | parameters, updated by each contribution at once | all, or the servers | nobody | updated by a standing order | all |
//! | a value that each contribution moves, and is moved by | all, or the servers | nobody | updated by a standing order | all, with the value before |
//! | parameters, updated by an optimizer when the program says so | all, or the servers | the workers | updated | all |
//!
//! What travels by other routes than the store is for those who contribute ([`Roles::contributors`]), all alike.

use crate::members::Members;
use crate::types::Rank;
use crate::wire::Op;

/// Whom a book is for, and what they do in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    /// Everybody who has to do with it.
    pub members: Members,
    /// Those of them to whom the store's slices are dealt.
    pub owners: Members,
    /// How the store's rounds go.
    pub rules: Rules,
    /// Who sums with whom before an owner hears of it; none where each contributes by itself.
    pub groups: Groups,
}

/// Contributors who sum among themselves in the store, and appear to owners as one client (MXNET-MPI, section 3). The first
/// of a group is its *head*: the others push to it, and are answered by it (`exchange/group.rs`). A head whose program has left
/// still relays for the others. Where each contribution is a round of its own, a group's is: its members make the same calls in the
/// same order, and all contribute or all ask.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Groups {
    groups: Vec<ClientGroup>,
    /// By rank: the index of its group.
    of_rank: Vec<Option<u32>>,
}

/// Of books without, and of the inside of one.
pub(crate) static NO_GROUPS: Groups = Groups { groups: Vec::new(), of_rank: Vec::new() };

/// Workers that are one client of the store; never none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientGroup {
    /// Its ranks.
    pub members: Members,
    /// How a round goes inside: all that have not left must be in.
    pub(crate) rules: Rules,
}

/// How a round goes at its owner.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// Whose contributions end it.
    pub must_be_in: MustBeIn,
    /// What becomes of them.
    pub fold: Fold,
    /// Who gets the result.
    pub answered: Answered,
    /// How far those who contribute may drift apart, where each contribution is a round of its own; without, as far as they like.
    pub staleness: Option<Staleness>,
    /// What becomes of a round that waits for a few; without, it waits.
    pub stragglers: Option<Stragglers>,
    /// Whether a member may be lost and the others go on ([`crate::recovery`]): a contribution stays as it is until the whole result is
    /// here, and results are kept.
    pub recoverable: bool,
}

/// Stale synchronous parallel, by slice: whoever is answered waits while it is too far ahead. A rank's clock is how often it has
/// contributed; where whoever contributes is answered ([`Answered::All`]) it is the number of steps that it has come to, as its submissions
/// say, those for which it had nothing included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Staleness {
    /// Whose clocks count.
    pub of: Members,
    /// By how much a rank that is answered may be ahead of the slowest of them that has not left.
    pub most: u32,
}

/// A round need not wait for the last. One that is late finds that its round has ended: what it brings is discarded, and it gets the
/// last result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stragglers {
    /// So many are enough, once they have waited for the others; over them an average is.
    pub enough: u32,
    /// How long they wait, in nanoseconds from when so many are in.
    pub after_ns: u64,
}

/// With whose contributions, or word that they have none, a round ends. Who need not be in cannot contribute: else the bits
/// would depend on who is fast. It can ask ([`crate::Gives::Nothing`]): it gets the result when the round ends, or if it has ended
/// that of the last one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MustBeIn {
    /// Of all members that have not left.
    #[default]
    Everybody,
    /// Of these, as far as they have not left.
    These(Members),
    /// Nobody's: each contribution is a round of its own, in the order in which they come. Ranks count theirs by themselves.
    Nobody,
}

/// What becomes of the contributions to a round, combined as their operation says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fold {
    /// They are the result.
    #[default]
    Fresh,
    /// They are combined with a value that the owner keeps, which is the result; a copy replaces it. An average is added to it,
    /// as a sum is.
    Kept,
    /// They are the gradient of a value that the owner keeps ([`crate::exchange::SliceEntry`]). A round is complete with the last of
    /// them, and ends when the owner is told to go on with its step ([`crate::node::Event::Proceed`]): to apply an optimizer,
    /// whose result is the value, or not to. With a standing order ([`crate::node::Event::Order`]) it ends at once, by that.
    Updated,
}

/// Who gets the result. Whoever takes part in a round hears that it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Answered {
    /// All who take part.
    #[default]
    All,
    /// The same, but those who contribute get the value as it was before: contributing and asking are one exchange, and nobody's
    /// contribution comes between. Where each contribution is an update of its own.
    Before,
    /// Those who ask; the memory of those who contribute stays as it is.
    WhoAsks,
}

impl Roles {
    /// All contribute, own slices and are answered.
    #[must_use]
    pub fn alike(members: Members) -> Self {
        Self { owners: members.clone(), members, rules: Rules::default(), groups: Groups::default() }
    }

    /// Those of the members whose contributions a round takes.
    #[must_use]
    pub fn contributors(&self) -> &Members {
        match &self.rules.must_be_in {
            MustBeIn::These(these) => these,
            MustBeIn::Everybody | MustBeIn::Nobody => &self.members,
        }
    }

    /// What is wrong with them, if anything.
    #[must_use]
    pub fn wrong(&self) -> Option<String> {
        let among = |some: &Members| !some.is_empty() && some.iter().all(|rank| self.members.contains(rank));
        let wrong = [("own its slices", &self.owners), ("must be in", self.contributors())];
        if let Some((what, who)) = wrong.into_iter().find(|(_, some)| !among(some)) {
            let ranks: Vec<String> = who.iter().map(|rank| rank.to_string()).collect();
            return Some(format!("ranks {:?} {what}, which must be some of its members", ranks.join(", ")));
        }
        if let Some(why) = self.wrong_groups() {
            return Some(why);
        }
        let fold = if self.rules.fold == Fold::Kept { Fold::Fresh } else { self.rules.fold };
        let plain = Rules { recoverable: true, fold, ..Rules::default() };
        if self.rules.recoverable
            && (self.rules != plain || !self.groups.is_empty() || self.owners != self.members)
        {
            return Some(
                "members may be lost where all own slices, all must be in, and all get the result, fresh or updated, without groups"
                    .into(),
            );
        }
        let Rules { must_be_in, fold, answered, staleness, stragglers, .. } = &self.rules;
        let one_by_one = *must_be_in == MustBeIn::Nobody;
        if *fold == Fold::Updated && !one_by_one && *answered != Answered::All {
            return Some(
                "who contributes to a round of values that are updated gets them: all must be answered"
                    .into(),
            );
        }
        if *answered == Answered::Before && !(one_by_one && *fold == Fold::Updated) {
            return Some(
                "the value before is answered where each contribution is an update of its own".into(),
            );
        }
        if let Some(Staleness { of, .. }) = staleness
            && (!one_by_one || !among(of))
        {
            return Some(
                "staleness is bounded where each contribution is a round of its own, and the clocks are members'".into(),
            );
        }
        let count = self.contributors().count();
        stragglers.filter(|rule| one_by_one || !(1..=count).contains(&rule.enough)).map(
            |Stragglers { enough, .. }| {
                format!(
                    "{enough} of {count} that contribute are enough for a round: it must be 1 to all of them"
                )
            },
        )
    }
}

impl Roles {
    fn wrong_groups(&self) -> Option<String> {
        if self.groups.is_empty() {
            return None;
        }
        let named = |ranks: &[Rank]| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ");
        let mut grouped: Vec<Rank> = self.groups.iter().flat_map(|group| group.members.iter()).collect();
        grouped.sort_unstable();
        let Rules { must_be_in, fold, answered, stragglers, .. } = &self.rules;
        let one_by_one = *must_be_in == MustBeIn::Nobody;
        let once = grouped.windows(2).all(|two| two[0] < two[1]);
        // Where nobody must be in all may contribute, servers among them, which are in no group.
        let each_once = if one_by_one {
            once && grouped.iter().all(|rank| self.members.contains(*rank))
        } else {
            self.contributors().iter().eq(grouped.iter().copied())
        };
        if !each_once {
            let contributors: Vec<Rank> = self.contributors().iter().collect();
            let (grouped, contributors) = (named(&grouped), named(&contributors));
            return Some(format!(
                "groups have the ranks {grouped}; they must have each rank that contributes once: {contributors}"
            ));
        }
        let no_head = |rank: &Rank| self.groups.of(*rank).is_some_and(|group| group.head() != *rank);
        if let Some(rank) = self.owners.iter().find(no_head) {
            return Some(format!("rank {rank} owns slices, but in its group another one is the head"));
        }
        if let Some(rank) = self.rules.staleness.as_ref().and_then(|rule| rule.of.iter().find(no_head)) {
            return Some(format!("rank {rank} has no clock of its own, but the head of its group has one"));
        }
        let fits = one_by_one || stragglers.is_none() && *fold != Fold::Kept && *answered == Answered::All;
        (!fits).then(|| {
            "groups take part in rounds that all must be in and all get the fresh result of, or each contributes by itself".into()
        })
    }
}

impl Groups {
    /// Of these ranks, in any order; groups come in the order of their heads.
    #[must_use]
    pub fn of_members(groups: impl IntoIterator<Item = Members>) -> Self {
        let group = |members: Members| {
            let rules = Rules { must_be_in: MustBeIn::These(members.clone()), ..Rules::default() };
            ClientGroup { members, rules }
        };
        let mut groups: Vec<ClientGroup> =
            groups.into_iter().filter(|members| !members.is_empty()).map(group).collect();
        groups.sort_by_key(ClientGroup::head);
        let highest = groups.iter().filter_map(|group| group.members.iter().last()).max();
        let mut of_rank = vec![None; highest.map_or(0, |rank| rank.index() + 1)];
        for (index, group) in (0..).zip(&groups) {
            group.members.iter().for_each(|rank| of_rank[rank.index()] = Some(index));
        }
        Self { groups, of_rank }
    }

    /// Whether everybody contributes by itself.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// In the order of their heads.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &ClientGroup> + Clone {
        self.groups.iter()
    }

    /// The group of a rank.
    #[must_use]
    pub fn of(&self, rank: Rank) -> Option<&ClientGroup> {
        let index = (*self.of_rank.get(rank.index())?)?;
        self.groups.get(index as usize)
    }

    /// The group that a rank is the head of.
    #[must_use]
    pub fn led_by(&self, rank: Rank) -> Option<&ClientGroup> {
        self.of(rank).filter(|group| group.head() == rank)
    }

    /// To whom this rank pushes slices of that owner, and who answers it. A head is answered by the owner, once its group is in.
    #[must_use]
    pub fn answered_by(&self, rank: Rank, owner: Rank) -> Rank {
        self.of(rank).map(ClientGroup::head).filter(|head| *head != rank).unwrap_or(owner)
    }

    /// Whether both are in one group.
    #[must_use]
    pub fn together(&self, one: Rank, other: Rank) -> bool {
        self.of(one).is_some_and(|group| group.members.contains(other))
    }
}

impl ClientGroup {
    /// Who sums.
    #[must_use]
    pub fn head(&self) -> Rank {
        self.members.at(0)
    }
}

impl Rules {
    /// Whether a round waits for this rank, as long as it has not left.
    #[must_use]
    pub fn needs(&self, rank: Rank) -> bool {
        match &self.must_be_in {
            MustBeIn::Everybody => true,
            MustBeIn::These(these) => these.contains(rank),
            MustBeIn::Nobody => false,
        }
    }

    /// Whether this rank may contribute.
    #[must_use]
    pub fn takes_from(&self, rank: Rank) -> bool {
        self.must_be_in == MustBeIn::Nobody || self.needs(rank)
    }

    /// What is wrong with this operation under these rules, if anything.
    #[must_use]
    pub fn refused(&self, op: Op) -> Option<&'static str> {
        let gradient = matches!(op, Op::Average | Op::Sum);
        (self.fold == Fold::Updated && !gradient)
            .then_some("only a sum or an average is a gradient to update with")
    }

    /// Whether the owner keeps results in memory of their own: where they are asked for after their round has ended, go into the
    /// next one, or are not for every contributor, the owner's memory among them. With the default ones it does not.
    #[must_use]
    pub fn keep_results(&self) -> bool {
        self.must_be_in != MustBeIn::Everybody
            || self.fold != Fold::Fresh
            || self.answered != Answered::All
            || self.stragglers.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(ranks: &[u32]) -> Members {
        ranks.iter().copied().map(Rank).collect()
    }

    #[test]
    fn groups_are_found_by_their_ranks() {
        let groups = Groups::of_members([some(&[4, 3]), some(&[]), some(&[5, 0])]);
        assert_eq!(groups.iter().map(ClientGroup::head).collect::<Vec<_>>(), [Rank(0), Rank(3)]);
        let heads = [0, 1, 3, 4, 5, 6].map(|rank| groups.of(Rank(rank)).map(|group| group.head().0));
        assert_eq!(heads, [Some(0), None, Some(3), Some(3), Some(0), None]);
        assert!(groups.together(Rank(5), Rank(0)) && groups.together(Rank(3), Rank(3)));
        assert!(!groups.together(Rank(5), Rank(3)) && !groups.together(Rank(1), Rank(1)));
        assert!(groups.led_by(Rank(3)).is_some() && groups.led_by(Rank(4)).is_none());
        let answered_by = [0, 1, 3, 4, 5].map(|rank| groups.answered_by(Rank(rank), Rank(3)).0);
        assert_eq!(answered_by, [3, 3, 3, 3, 0], "members by their heads, all others by the owner");
    }
}
