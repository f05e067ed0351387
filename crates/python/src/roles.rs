//! Who does what in a book, for those who open one.

use crate::errors::bad_argument;
use penstock_core::roles::{Answered, Fold, MustBeIn, Rules};
use penstock_core::{Members, Rank, Roles};
use pyo3::prelude::*;

/// Roles; see `_native.pyi`.
#[pyclass(frozen, name = "Roles", module = "penstock._native")]
pub(crate) struct BookRoles(pub(crate) Roles);

fn members(ranks: Vec<u32>) -> Members {
    ranks.into_iter().map(Rank).collect()
}

#[pymethods]
impl BookRoles {
    #[new]
    #[pyo3(signature = (members, owners, must_be_in=None, fold="fresh", answered="all"))]
    fn new(
        members: Vec<u32>,
        owners: Vec<u32>,
        must_be_in: Option<Vec<u32>>,
        fold: &str,
        answered: &str,
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
            "who-asks" => Answered::WhoAsks,
            _ => {
                return Err(bad_argument(format!("unknown answered {answered:?}: expected all or who-asks")));
            }
        };
        let rules = Rules { must_be_in, fold, answered };
        let roles = Roles { members: self::members(members), owners: self::members(owners), rules };
        match roles.wrong() {
            Some(why) => Err(bad_argument(why)),
            None => Ok(Self(roles)),
        }
    }
}
