"""What can go wrong in a demo, by what the user can do about it."""

from __future__ import annotations


class DataError(ValueError):
    """The data that the user named cannot be used; the message says what to change."""


class WorkerFailed(RuntimeError):
    """A process of the demo ended early; the message holds its own words."""

    def __init__(self, who: str, how: str, text: str) -> None:
        super().__init__(f"{who} {how}" + (f":\n{text}" if text else ""))
        self.who = who
        self.how = how
        self.text = text
