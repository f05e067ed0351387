//! Who does what in a book, for those who open one.

use crate::errors::bad_argument;
use penstock_core::roles::{Answered, Fold, Groups, MustBeIn, Rules, Staleness, Stragglers};
use penstock_core::{Members, Rank, Roles};
use pyo3::prelude::*;
use std::time::Duration;

/// Roles; see `_native.pyi`.
#[pyclass(frozen, name = "Roles", module = "penstock._native")]
pub(crate) struct BookRoles(pub(crate) Roles);

fn members(ranks: Vec<u32>) -> Members {
    ranks.into_iter().map(Rank).collect()
}

#[pymethods]
impl BookRoles {
    #[new]
    #[pyo3(signature = (members, owners, must_be_in=None, fold="fresh", answered="all", staleness=None, stragglers=None, groups=vec![]))]
    fn new(
        members: Vec<u32>,
        owners: Vec<u32>,
        must_be_in: Option<Vec<u32>>,
        fold: &str,
        answered: &str,
        staleness: Option<(Vec<u32>, u32)>,
        stragglers: Option<(u32, f64)>,
        groups: Vec<Vec<u32>>,
    ) -> PyResult<Self> {
        let must_be_in = match must_be_in {
            None => MustBeIn::Everybody,
            Some(nobody) if nobody.is_empty() => MustBeIn::Nobody,
            Some(these) => MustBeIn::These(self::members(these)),
        };
        let fold = match fold {
            "fresh" => Fold::Fresh,
            "kept" => Fold::Kept,
            "updated" => Fold::Updated,
            _ => return Err(bad_argument(format!("unknown fold {fold:?}: expected fresh, kept or updated"))),
        };
        let answered = match answered {
            "all" => Answered::All,
            "before" => Answered::Before,
            "who-asks" => Answered::WhoAsks,
            _ => {
                let expected = "all, before or who-asks";
                return Err(bad_argument(format!("unknown answered {answered:?}: expected {expected}")));
            }
        };
        let staleness = staleness.map(|(of, most)| Staleness { of: self::members(of), most });
        let after_ns = |after_s: f64| {
            let after =
                Duration::try_from_secs_f64(after_s).map_err(|error| bad_argument(error.to_string()))?;
            u64::try_from(after.as_nanos()).map_err(|error| bad_argument(error.to_string()))
        };
        let stragglers = stragglers
            .map(|(enough, after_s)| PyResult::Ok(Stragglers { enough, after_ns: after_ns(after_s)? }))
            .transpose()?;
        let rules = Rules { must_be_in, fold, answered, staleness, stragglers, recoverable: false };
        let (members, owners) = (self::members(members), self::members(owners));
        let groups = Groups::of_members(groups.into_iter().map(self::members));
        let roles = Roles { members, owners, rules, groups };
        match roles.wrong() {
            Some(why) => Err(bad_argument(why)),
            None => Ok(Self(roles)),
        }
    }
}
