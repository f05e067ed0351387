"""What a job's processes say: whole lines, labelled, printed and kept in files."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

__all__ = ["Output"]


class Output:
    """Workers' and servers' lines.

    Args:
        log_dir: Where each one's lines are kept as files, too; or None.

    Attributes:
        last_line: The last line that each wrote to standard error, if it was not empty.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self.last_line: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._files: dict[int, str] = {}
        self._lock = threading.Lock()
        self._printing = threading.Lock()  # held for long if nobody reads
        self._log_dir = log_dir
        self._logs: dict[tuple[int, int], IO[str]] = {}

    def add(self, names: Mapping[int, str]) -> None:
        """Take lines of these, too, by their keys: ``rank 3``. Labels of one kind that come together have one width."""
        words = [name.split() for name in names.values()]
        widths = {kind: max(len(number) for of, number in words if of == kind) for kind, _ in words}
        for key, (kind, number) in zip(names, words, strict=True):
            self._labels[key] = f"[{kind} {number:>{widths[kind]}}]"
            self._files[key] = f"{kind}-{number}"
        for key, stream in itertools.product(names, (1, 2)) if self._log_dir is not None else ():
            with contextlib.suppress(OSError):  # whoever writes it says what stands in the way
                self._log_file(key, stream).unlink()  # of an earlier run

    def _log_file(self, key: int, stream: int) -> Path:
        assert self._log_dir is not None
        return self._log_dir / f"{self._files[key]}.{'out' if stream == 1 else 'err'}"

    def log(self, key: int, stream: int, text: str) -> None:
        """Keep a line, if lines are kept. Raises OSError if it cannot be."""
        with self._lock:
            if stream == 2 and text.strip():
                self.last_line[key] = text.strip()
            if self._log_dir is None:
                return
            if (key, stream) not in self._logs:
                self._logs[key, stream] = self._log_file(key, stream).open("w", encoding="utf-8", buffering=1)
            self._logs[key, stream].write(text + "\n")

    def show(self, key: int, stream: int, text: str) -> None:
        """Print a line. Raises OSError when nobody reads any more."""
        target = sys.stdout if stream == 1 else sys.stderr
        with self._printing:
            target.write(f"{self._labels[key]} {text}\n")
            target.flush()

    def close(self) -> None:
        """No more lines come."""
        with self._lock:
            for log in self._logs.values():
                with contextlib.suppress(OSError):
                    log.close()
