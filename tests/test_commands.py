"""Every `penstock` command in the README, docs and help texts is one that the command line takes, and short ones run.

Commands are collected from the texts: a new one is checked, too. One that cannot be run here is in `NOT_RUN` with why.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from penstock import cli

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(
    r"(?:^|\s|`|/)(?:python -m )?penstock((?: +(?:demo|explain|measure|info)\b)[^`\n#]*)", re.MULTILINE
)
NOT_RUN = {
    "measure": "takes ranks on several hosts, or seconds with files in the working directory",
    "explain vgg19": "needs torchvision",
    "explain mycode": "the user's module",
    "explain MODEL": "a placeholder",
    "demo": "trains for seconds to minutes",
}
PLACEHOLDERS = {"MODEL": "lab:vgg19", "DIR": "digits", "N": "4", "SCENARIO": "x"}


def texts():
    pages = [ROOT / "README.md", ROOT / "docs" / "measuring.md", ROOT / "docs" / "algorithms.md"]
    pages += [ROOT / "docs" / "collectives.md", ROOT / "docs" / "lossy.md", ROOT / "docs" / "errors.md"]
    for page in pages:
        # What is run stands in a code block or between backquotes; prose around it does not.
        body = page.read_text(encoding="utf-8")
        yield page.name, "\n".join(re.findall(r"^    .+$|^```sh\n(?:.*?)```|`[^`\n]+`", body, re.MULTILINE | re.DOTALL))
    for name, text in vars(cli).items():
        if name.endswith("_EXAMPLES"):
            yield name, text.partition("\n\n")[0]


def commands():
    for source, text in texts():
        for match in COMMAND.finditer(text):
            words = re.split(r" {2,}| > ", match[1].strip())[0]
            if words.strip() not in ("demo", "explain", "measure", "measure line-rate", "measure allreduce"):
                yield pytest.param(shlex.split(words), id=f"{source}: {words}")


def parsed(words):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return cli.parser().parse_args([PLACEHOLDERS.get(word, word) for word in words])
        except SystemExit as end:
            if end.code == 0:  # --help
                return None
            raise AssertionError(f"penstock {' '.join(words)}: {said.getvalue()}") from end


def test_the_texts_hold_commands():
    assert len(list(commands())) >= 15


@pytest.mark.parametrize("words", list(commands()))
def test_the_command_line_takes_it_and_it_runs(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = parsed(words)
    if options is None or any(" ".join(words).startswith(start) for start in NOT_RUN):
        return
    assert options.command(options) == 0
    assert capsys.readouterr().out


@pytest.mark.long
def test_the_shorter_demo_of_the_help_text_passes(capsys):
    assert "penstock demo --workers 2 --epochs 5 " in cli.DEMO_EXAMPLES
    assert cli.main(["demo", "--workers", "2", "--epochs", "5"]) == 0
