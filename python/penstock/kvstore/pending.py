"""The future of a call on a store."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kvstore.stored_keys import KeyCall

__all__ = ["Pending"]


class Pending:
    """A call on a store that is under way: a future. What was given must be left alone until it is done."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Sequence[KeyCall]) -> None:
        self._calls = calls

    def wait(self) -> None:
        """Wait until results are in memory and what was given may be changed.

        It takes at most ``operation_timeout_s`` for each key.

        Raises:
            PeerLost: A rank was lost.
            Timeout: It took too long; the message names the ranks that are waited for. The job ends.
        """
        for call in self._calls:
            call.key.wait_for(call.number)

    def done(self) -> bool:
        """Whether that is so; does not wait.

        Raises:
            PenstockError: The job has failed, and this will never be done.
        """
        return all(call.key.is_done(call.number) for call in self._calls)

    @property
    def versions(self) -> list[int | None]:
        """By key the version of its value that the call makes or gets.

        In a synchronous store it is 1 as initialised, and one more with each push. In an asynchronous one it counts all
        ranks' pushes, or groups', that are in the value, and is None until an answer has told it. Slices of a large
        value are changed one by one: then it says how many are in all of it.
        """
        return [call.version for call in self._calls]
