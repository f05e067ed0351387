"""What all commands of ``penstock`` have in common: how their options are read, and how they answer."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["Parser", "add_json", "fail", "list_of", "nbytes", "positive", "print_json", "whole_number"]

NBYTES_MAX = 1 << 30


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where help is; end with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_json(command: argparse.ArgumentParser) -> None:
    """Let a command print its result for programs."""
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an option that is several of a type, with commas between them."""
    return lambda text: [parse(item.strip()) for item in text.split(",")]


def nbytes(text: str) -> int:
    """The type of an option that is a size: a number of bytes, or with KB or MB (powers of 1000)."""
    match = re.fullmatch(r"(\d{1,10})\s*(K|M|)B?", text, re.ASCII | re.IGNORECASE)
    size = int(match[1]) * {"": 1, "K": 1_000, "M": 1_000_000}[match[2].upper()] if match else 0
    if not 1 <= size <= NBYTES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 byte to {NBYTES_MAX}, such as 4KB or 53MB")
    return size


def positive(text: str) -> float:
    """The type of an option that is a number above zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not above zero and below 1e12")
    return value


def fail(options: argparse.Namespace, who: str, error: Exception, status: int) -> int:
    """Say that a command has failed, for people and if asked for programs, too. Returns the exit status."""
    sys.stderr.write(f"{who}: {error}\n")
    if options.json:
        print_json({"ok": False, "error": {"kind": type(error).__name__, "message": str(error)}})
    return status


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line."""
    sys.stdout.write(json.dumps(value) + "\n")
