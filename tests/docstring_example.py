"""Runs the example of a docstring as doctest does: ``docstring_example.py FILE``, with what test_docstrings.py writes.

The file is JSON: ``module``, in whose names the example runs; ``docstring``; ``statements``, which of the example's are
run; ``before`` and ``after``, programs around it; ``measured``, whether numbers are those of another machine.
"""

import doctest
import importlib
import json
import re
import sys
from pathlib import Path


class Checker(doctest.OutputChecker):
    """An example that shows no output says nothing about it."""

    def __init__(self, *, measured):
        self.measured = measured

    def check_output(self, want, got, optionflags):
        if not want:
            return True
        if self.measured:
            want, got = (re.sub(r"\d+(\.\d+)?", "0", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def main():
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    names = dict(vars(importlib.import_module(told["module"])))
    exec(compile(told["before"], "before the example", "exec"), names)
    examples = doctest.DocTestParser().get_examples(told["docstring"])
    chosen = [examples[number] for number in told["statements"]]
    test = doctest.DocTest(chosen, {}, told["module"], None, None, told["docstring"])
    test.globs = names  # not a copy: functions from before the example see what it has rebound
    runner = doctest.DocTestRunner(Checker(measured=told["measured"]), optionflags=doctest.NORMALIZE_WHITESPACE)
    if runner.run(test, out=sys.stderr.write, clear_globs=False).failed:
        sys.exit(1)
    exec(compile(told["after"], "after the example", "exec"), names)


if __name__ == "__main__":
    main()
