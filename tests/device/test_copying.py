"""What is known of copies after they are over."""

from __future__ import annotations

from penstock.torch.runtime.copying import Copies, Copying


class At:
    """An event, by the milliseconds at which the device was there."""

    def __init__(self, ms, passed=True):
        self.ms, self.passed = ms, passed

    def query(self):
        return self.passed

    def elapsed_time(self, end):
        return end.ms - self.ms


def test_counts_each_once_and_what_was_awaited():
    copies = Copies()
    assert copies.hidden_share == 1
    hidden, awaited = Copying(At(0), At(3), 100), Copying(At(4), At(5), 10)
    awaited.awaited = True
    for one in (hidden, awaited, hidden):
        assert one.query()
        copies.count(one)
    assert (copies.nbytes, copies.seconds, copies.awaited_s) == (110, 0.004, 0.001)
    assert copies.hidden_share == 0.75
    total = Copies.of_all([copies, copies])
    assert (total.nbytes, total.seconds, total.hidden_share) == (220, 0.008, 0.75)
    assert not Copying(At(0), At(1, passed=False), 1).query()
