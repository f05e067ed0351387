"""One word, one thing: no two types of the code have one name, but for those that are one thing in several places."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"

DEFINED = re.compile(r"^(?:pub(?:\([^)]*\))? )?(?:struct|enum|union|trait|type) (\w+)", re.MULTILINE)

SAME = {
    # the core's, and what stands for it in Python
    "Call": "a message or collective under way; the binding's is held by Python",
    "Engine": "what the binding wraps",
    "Gather": "the exchange that brings every rank's bytes to all; in Python with what is in the bytes",
    "Group": "ranks that make calls together; the core's, and what programs hold",
    "Layer": "a module with parameters: of a model, of its description, of a simulated chain",
    "Tensor": "a parameter's numbers: in a book, in a description, at a simulated worker",
    "Rates": "of wire and processors",
    "Cluster": "what a job runs on: facts in core, in Python, or emulated in the lab",
    "StepTimes": "predicted seconds per step",
    "Terms": "what is settled of a layer's scheme before training",
    "Contribution": "what one rank adds: to a slice; to a gather, as Python reads it",
    "Buffer": "memory that a call reads or writes",
    "Report": "counts of a run",
    "Record": "an observation with its time: the engine's, and as a trace is read",
    "Groups": "which workers sum among themselves",
    "LayerKind": "which ways a layer can go by what it is",
    "Fold": "what becomes of a round's contributions; in Python as a message to servers spells it",
    "Answered": "whom an owner answers; in Python as a message to servers spells it",
    # both drivers carry out what core decides
    "Effect": "what a state machine asks of whoever runs it",
    "Omission": "a rule that a simulation leaves out, to see that it is missed",
    "Chunk": "a view of memory",
    "RealMemory": "memory whose bytes are really summed",
    "Connection": "frames in and out",
    "Fate": "a rank's life, with what only its driver knows",
    "Peer": "another rank, as it is seen from here",
    "Submission": "handing in a tensor; the simulator's is an instruction to do so",
    # the simulator's jobs, each with its own
    "Fault": "what befalls a rank",
    "Happening": "what is on the agenda",
    "Link": "one direction between two ranks",
    "World": "everything of one run",
    "Writing": "a frame that is being written",
}
"""Names of several types that are one thing, and which."""


def rust_types(text):
    text = re.sub(r"//.*", "", text)
    return DEFINED.findall(text.split("#[cfg(test)]\nmod tests {")[0])


def python_types(text):
    """Classes, without the underscore of what is private, and what is declared to be another name of a type."""
    tree = ast.parse(text)
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Subscript):
            target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            names += [target] if target.lstrip("_").isidentifier() and target != target.upper() else []
    return [name.lstrip("_") for name in names]


def types():
    """By name of a type: the files that define one."""
    found = {}
    for path in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        if path.stem != "tests":
            for name in rust_types(path.read_text(encoding="utf-8")):
                found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    for path in sorted(ROOT.glob("python/penstock/**/*.py")):
        for name in python_types(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return found


def test_no_type_has_the_name_of_another():
    double = {name: paths for name, paths in types().items() if len(paths) > 1}
    unexplained = {name: paths for name, paths in double.items() if name not in SAME}
    assert not unexplained, "rename one, by the field's word for it"
    stale = SAME.keys() - double.keys()
    assert not stale, f"no longer defined twice: take {sorted(stale)} off the list"


def test_types_are_found():
    rust = "pub(crate) struct One<C> {\n}\n// struct Two\nenum Three {\n    type Four;\n"
    assert rust_types(f"{rust}#[cfg(test)]\nmod tests {{\nstruct Five;\n") == ["One", "Three"]
    assert python_types("class One:\n    class _Two:\n        pass\n") == ["One", "Two"]
    others = "_One = dict[str, int]\nTwo: TypeAlias = Literal['a']\nTHREE: Final = list[int]\n"
    assert python_types(others) == ["One", "Two"]


def words():
    rows = re.findall(r"^\| (.+?) \| ", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [word for row in rows[1:] for word in row.split(", ")]


def test_the_glossary_says_each_word_once():
    assert len(words()) > 50
    assert sorted(words()) == sorted(set(words()))


@pytest.mark.parametrize("word", ["anybodys", "go_on"])
def test_names_that_said_nothing_are_gone(word):
    sources = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("python/**/*.py")]
    assert not [path for path in sources if re.search(rf"\b_?{word}\b", path.read_text(encoding="utf-8"))]
