"""A run as a membership log has it, for tests of what is made of one."""

from penstock.membership_file import CallPlace, LoggedCall, LoggedEnd, LoggedEpoch, LoggedRun, RunHeader
from penstock.whole_files import CheckpointKey

HEADER = RunHeader(
    job="00" * 16,
    ranks=3,
    rank=0,
    command=("train.py", "--epochs", "3"),
    directory="/somewhere",
    options={"check_every": 500, "elastic": True, "groups": None},
    slicing=(65536, 524288, 1),
    lanes=1,
    threads=2,
    seed=7,
    versions={"penstock": "1.2.3", "python": "3.11.9"},
)
ALL, LEFT, WITH = (0, 1, 2), (0, 2), (0, 2, 3)


def epochs():
    """Rank 1 is lost in step 5, of which slices of book 2 are over, and rank 3 comes for step 9."""
    return (
        LoggedEpoch(ALL, 1, 0, ALL, []),
        LoggedEpoch(ALL, 1, 3, ALL, [(2, [(5, 3)])]),
        LoggedEpoch(LEFT, 6, 4, LEFT, [(2, [(2, 5), (3, 4)]), (4, [(1, 1)])]),
        LoggedEpoch(WITH, 9, 8, LEFT, [(2, [(5, 8)]), (4, [(1, 1)])]),
        LoggedEpoch(WITH, 9, 8, WITH, [(2, [(5, 8)]), (4, [(1, 1)])]),
    )


def run():
    calls = (
        LoggedCall(CallPlace(0, 4), 2, CallPlace(0, 3)),
        LoggedCall(CallPlace(1, 1), 4, CallPlace(0, 6)),
    )
    resumed = (CheckpointKey(10, 0, "5aff5d30.2"), None)
    return LoggedRun(HEADER, epochs(), calls, LoggedEnd(20, CallPlace(1, 9), (-5, 1 << 62)), resumed)
