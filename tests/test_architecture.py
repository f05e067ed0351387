"""The invariants of absence in ARCHITECTURE.md, checked: who may depend on whom, and what each part never touches."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CRATES = ROOT / "crates"
PACKAGE = ROOT / "python" / "penstock"
SUBPACKAGES = sorted(path.parent for path in PACKAGE.glob("*/**/__init__.py"))
"""ARCHITECTURE has the map of the package itself, whose docstring is for users."""

CRATE_EDGES = {
    "core": set(),
    "net": {"core"},
    "sim": {"core"},
    "python": {"core", "net", "sim"},
}

CORE_NEVER = {
    "a clock": r"\b(Instant|SystemTime)\b",
    "a socket": r"\bstd::net\b|\b(mio|socket2|tokio|rustix|libc)::",
    "a thread": r"\bstd::thread\b|\bthread::(spawn|sleep)\b",
    "a file": r"\bstd::(fs|io)\b",
    "the environment": r"\bstd::env\b",
    "Python": r"\bpyo3\b",
}
CORE_DEPENDENCIES = {"bytemuck", "half", "thiserror"}
"""Plain computation only. A new one is a rare decision: write it into docs/decisions/."""

FLOORS = (
    {"types", "limits", "bits", "parts"},
    {"error", "members", "way", "optimizer", "reduce", "slicing", "queue"},
    {"wire", "memory", "steps", "cost", "all_gather", "recovery"},
    {"roles", "observe", "submission"},
    {"layout", "life"},
    {"scheme", "exchange", "agreement", "membership"},
    {"calls"},
    {"node"},
)
"""Of the core: each stands on those before it."""

# What decides who is at fault, and when, and makes the errors that say so; patterns that take these apart do neither.
# Drivers report what has happened; the simulator's files that judge the outcome know it, too.
VERDICTS = (
    r"\bEvidence::|\bVerdict::new\b|\bSUSPICION_NS\b|\bDEPARTURE_GRACE_NS\b|\bSETTLE_NS\b"
    r"|\bFault \{ culprit:|\bPeerLost \{(?![^}]*\.\.)|(?<!\| )\bError::Timeout\((?!_)|\bis_timeout\("
    r"|\.suspect\(|\bleaves_out\("
)
# The last shows what becomes of suspicions, whatever they rest on.
JUDGES = {"sim/src/life/check.rs", "sim/src/world/faults.rs", "sim/src/agreement.rs"}

PICKLES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
"""Modules that run what they read."""

CIRCLE_MAX = 3
"""Files that import each other in a circle, counting what is imported for types only."""

# Which file writes the parts of a parameter's slot. Flights and pending updates write themselves: others call methods.
WRITERS = {"flight": "model/flight.py", "pending": "model/layers.py", "reads": "reads/safety.py"}
SLOT_WRITERS = {"gradients/hooks.py": {"gather"}, "reads/safety.py": {"distributed"}}

# How long a step takes is what a call by one of two algorithms takes more than by the other.
WITH_TWO_ALGORITHMS = "measure/quick.py"

# What takes the device and the number type that the program has set as defaults.
MODULES_WITH_TENSORS = {"Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "BatchNorm1d", "BatchNorm2d", "LayerNorm"}
PROGRAM_OF_ITS_OWN = "demo/recipe.py"
"""It sets no defaults, and nobody else's code is in its process."""

# Everything else imports torch inside the functions that need it.
MODULES_ON_TORCH = ("torch/", "integrations/", "demo/recipe.py", "demo/worker.py")


def manifest(crate):
    return tomllib.loads((CRATES / crate / "Cargo.toml").read_text(encoding="utf-8"))


def dependencies(crate, *kinds):
    found = set()
    for table in [manifest(crate), *manifest(crate).get("target", {}).values()]:
        for kind in kinds:
            found |= set(table.get(kind, {}))
    return found


def without_comments(source):
    return re.sub(r"//.*", "", source)


@functools.cache
def nodes(source):
    """All of a Python source, its module first, as `ast.walk` gives them; once for all tests that ask."""
    return tuple(ast.walk(ast.parse(source)))


def python_modules():
    return sorted(PACKAGE.rglob("*.py"))


def tracked_files():
    """Files that git knows or would add; outside a git checkout all that are no build product."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    folders = ("crates", "python", "tests", "examples", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def test_every_crate_is_in_the_picture():
    assert {path.parent.name for path in CRATES.glob("*/Cargo.toml")} == set(CRATE_EDGES)


@pytest.mark.parametrize("crate", CRATE_EDGES)
def test_crates_depend_one_way(crate):
    ours = {f"penstock-{other}" for other in CRATE_EDGES}
    used = dependencies(crate, "dependencies", "dev-dependencies", "build-dependencies") & ours
    assert used <= {f"penstock-{other}" for other in CRATE_EDGES[crate]}


def test_core_depends_on_plain_computation_only():
    assert dependencies("core", "dependencies", "build-dependencies") <= CORE_DEPENDENCIES


@pytest.mark.parametrize("what", CORE_NEVER)
def test_core_never_touches(what):
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((CRATES / "core" / "src").rglob("*.rs"))
        for number, line in enumerate(without_comments(path.read_text(encoding="utf-8")).splitlines(), 1)
        if re.search(CORE_NEVER[what], line)
    ]
    assert not hits, f"penstock-core uses {what}:\n" + "\n".join(hits)


def test_only_the_binding_knows_python():
    for crate in CRATE_EDGES:
        if crate != "python":
            assert "pyo3" not in dependencies(crate, "dependencies", "dev-dependencies", "build-dependencies")


class Crate:
    """Which file of a crate uses which, read off its `use` lines and the paths in its code; tests count for nothing.

    The rule for parents. `mod child;` and `pub use child::Name;` make no edge: a parent gives its children a place, and
    their names to others. Whoever takes a name from a parent uses the file where that name is written. So a parent may
    stand on its children, or children on their parent, but never both. Methods are not followed: a file that goes on
    with an `impl` of its parent stands on it.
    """

    TOP = "lib"

    def __init__(self, root):
        self.files = {}
        for path in sorted(root.rglob("*.rs")):
            parts = path.relative_to(root).with_suffix("").parts
            name = "::".join(parts[:-1] if parts[-1] == "mod" else parts)
            text = without_comments(path.read_text(encoding="utf-8"))
            self.files[name] = re.split(r"#\[cfg\(test\)\]", text)[0]
        tests = {f"{name}::tests" for name in self.files}
        self.files = {name: text for name, text in self.files.items() if name not in tests}
        self.renamed = {name: dict(self._re_exports(name)) for name in self.files}

    def _re_exports(self, name):
        for tree in re.findall(r"\bpub use ([^;]+);", self.files[name]):
            for path in flattened(tree):
                yield path[-1], self._absolute(name, path)

    def _absolute(self, name, path):
        """A path as written in a file, from the crate's root; `None` for what is of another crate or no module."""
        here = [] if name == self.TOP else name.split("::")
        if path[0] == "crate":
            return path[1:]
        if path[0] in {"self", "super"}:
            while path and path[0] in {"self", "super"}:
                here = here[:-1] if path[0] == "super" else here
                path = path[1:]
            return [*here, *path]
        child = "::".join([*here, path[0]])
        return [*here, *path] if child in self.files else None

    def written(self, path):
        """The file where the name at an absolute path is written."""
        for length in range(len(path), -1, -1):
            name = "::".join(path[:length]) or self.TOP
            if name in self.files:
                onward = self.renamed[name].get(path[length]) if length < len(path) else None
                return self.written(onward + path[length + 1 :]) if onward else name
        raise AssertionError(path)

    def used(self, name):
        text = self.files[name]
        paths = [path for tree in re.findall(r"(?<!pub )\buse ([^;]+);", text) for path in flattened(tree)]
        code = re.sub(r"\b(pub )?(use|mod) [^;{]+(\{[^;]*\})?;", "", text)
        paths += [path.split("::") for path in re.findall(r"(?<![\w:])[a-z_]\w*(?:::\w+)+", code)]
        # What it gives to others it may use itself.
        given = [path for as_, path in self.renamed[name].items() if path and re.search(rf"(?<![\w:.]){as_}\b", code)]
        absolute = [*given, *(self._absolute(name, path) for path in paths)]
        return {self.written(path) for path in absolute if path is not None} - {name}

    def cycle(self):
        """Files that use each other in a circle, if any."""
        done, below = set(), []

        def visit(name):
            if name in below:
                return [*below[below.index(name) :], name]
            if name in done:
                return None
            below.append(name)
            circle = next((found for other in sorted(self.used(name)) if (found := visit(other))), None)
            below.pop()
            done.add(name)
            return circle

        return next((found for name in sorted(self.files) if (found := visit(name))), None)


def flattened(tree):
    """The paths of a `use` line's tree, without what they are renamed to."""
    tree = re.sub(r"\s+", " ", tree.strip())
    head, brace, rest = tree.partition("{")
    if not brace:
        return [re.sub(r" as \w+$", "", tree).split("::")]
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if (sign == "," and depth == 0) or depth < 0:
            parts.append(rest[start:at].strip())
            start = at + 1
    prefix = head.rstrip(":").split("::")
    paths = [path for part in parts if part for path in flattened(part)]
    return [prefix if path == ["self"] else [*prefix, *path] for path in paths]


def test_no_files_of_core_use_each_other_in_a_circle():
    circle = Crate(CRATES / "core" / "src").cycle()
    assert circle is None, " uses ".join(circle)


def test_each_part_of_core_stands_on_the_floors_below_it():
    core = Crate(CRATES / "core" / "src")
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    used = {(name.split("::")[0], other.split("::")[0]) for name in core.files for other in core.used(name)}
    assert set(floor) == {name.split("::")[0] for name in core.files} - {Crate.TOP}
    wrong = [f"{name} uses {other}" for name, other in sorted(used) if name != other and floor[name] <= floor[other]]
    assert not wrong, wrong
    assert core.used("steps::ring") == {"steps::step"}


def test_drivers_decide_nothing_about_life():
    sources = [path for crate in ("net", "sim") for path in (CRATES / crate / "src").rglob("*.rs")]
    texts = {
        str(path.relative_to(CRATES)): re.split(r"#\[cfg\(test\)\]", path.read_text(encoding="utf-8"))[0]
        for path in sources
        if path.name != "tests.rs"
    }
    assert set(texts) >= JUDGES
    wrong = [
        f"{name}: {line.strip()}"
        for name, text in texts.items()
        if name not in JUDGES
        for line in without_comments(text).splitlines()
        if re.search(VERDICTS, line) and "Omission::" not in line
    ]
    assert not wrong, "\n".join(wrong)


def test_a_verdict_of_a_driver_is_found():
    for line in (
        "let lost = Error::PeerLost { rank, reason };",
        "self.fail(key, Fault { culprit: key.1, error });",
        "self.end_with(Error::Timeout(what).into())",
        "let error = if evidence.is_timeout() { a } else { b };",
        "self.succession.suspect(now_ns, peer);",
    ):
        assert re.search(VERDICTS, line), line
    for line in (
        "Error::PeerLost { rank, .. } | Error::Protocol { peer: rank, .. } => Some(*rank),",
        "| Error::Timeout(text)",
        "Error::Config(_) | Error::Timeout(_) => None,",
        "fn from(Fault { culprit, error }: Fault) -> Self {",
    ):
        assert not re.search(VERDICTS, line), line


def test_circles_of_files_are_found(tmp_path):
    files = {
        "lib.rs": "mod a;\nmod b;\npub use b::Two;\n",
        "a.rs": "use crate::{b::{self, Two as Second}, limits::MAX};\nfn f() {}\n",
        "b/mod.rs": "mod c;\npub use c::Three;\npub struct Two;\n",
        "b/c.rs": "// use crate::a;\npub struct Three;\n#[cfg(test)]\nmod tests { use crate::a; }\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert Crate(tmp_path).cycle() is None
    for more in ("use super::Two;", "use crate::Two;", "fn f() -> super::super::b::Two;", "use crate::a::f;"):
        extra = "use c::Three as Third;" if "Two" in more else "use crate::Three;"
        (tmp_path / "b/c.rs").write_text(f"{more}\n{files['b/c.rs']}", encoding="utf-8")
        (tmp_path / "b/mod.rs").write_text(f"{extra}\n{files['b/mod.rs']}", encoding="utf-8")
        if "Two" in more:
            assert sorted({*Crate(tmp_path).cycle()}) == ["b", "b::c"], more
    (tmp_path / "b/mod.rs").write_text(files["b/mod.rs"], encoding="utf-8")
    (tmp_path / "a.rs").write_text("fn f() { crate::b::Three::new(); }\n", encoding="utf-8")
    assert sorted({*Crate(tmp_path).cycle()}) == ["a", "b::c"]


def test_importing_the_package_imports_no_framework():
    check = (
        "import sys, threading, penstock\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'pyarrow', 'tqdm', 'lightning', 'ray', 'penstock.integrations',\n"
        "         'penstock._native'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_helps_without_a_framework():
    check = "import sys\nfrom penstock import cli\ncli.parser().format_help()\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_training_does_without_numpy():
    """Torch does not bring it along, and a tensor's own ``numpy()`` fails without it."""
    names = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in python_modules()}
    asking = {
        name for name, source in names.items() if re.search(r"\.numpy\(|^(import|from) numpy", source, re.MULTILINE)
    }
    assert {name for name in asking if not name.startswith("demo/")} == set()


def test_torch_is_imported_at_the_top_only_where_it_is_the_subject():
    for path in python_modules():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(MODULES_ON_TORCH):
            continue
        for node in nodes(path.read_text(encoding="utf-8"))[0].body:
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            assert not [module for module in modules if module.split(".")[0] == "torch"], name


def imported(path):
    """The top-level modules that a file imports, wherever in it."""
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def modules_by_name():
    """Every module of the package, by its dotted name."""
    found = {}
    for path in python_modules():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_for_types_only(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"


def imports_of(path, modules, *, types):
    """The modules of the package that a file imports, wherever in it; with or without those for types only."""
    found, left = set(), [nodes(path.read_text(encoding="utf-8"))[0]]
    while left:
        node = left.pop()
        if is_for_types_only(node) and not types:
            left += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner & modules.keys() else {node.module}
        left += ast.iter_child_nodes(node)
    return found & modules.keys()


def circles(graph):
    """The sets of modules that reach each other, but for those of one."""
    reached = {name: set() for name in graph}
    for name in graph:
        left = [name]
        while left:
            new = graph[left.pop()] - reached[name]
            reached[name] |= new
            left += new
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [sorted(circle) for circle in found if len(circle) > 1]


def packages_of(name):
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def graph_of(modules, *, types):
    """By module what it imports. That runs the packages around it, but for those that the importer itself is in."""
    graph = {}
    for name, path in modules.items():
        run = imports_of(path, modules, types=False)
        run = run.union(*map(packages_of, run)) - packages_of(name)
        graph[name] = (run | imports_of(path, modules, types=types)) - {name}
    return graph


@functools.cache
def package_circles(*, types):
    return circles(graph_of(modules_by_name(), types=types))


def test_a_circle_of_imports_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_a_circle_through_a_package_is_found(tmp_path):
    texts = {"a": "", "a.b": "import a.c.d", "a.c": "import a.e", "a.c.d": "", "a.e": "def f():\n    import a.b"}
    modules = {name: tmp_path / f"{name}.py" for name in texts}
    for name, path in modules.items():
        path.write_text(texts[name], encoding="utf-8")
    assert circles(graph_of(modules, types=False)) == [["a.b", "a.c", "a.e"]]


def test_the_front_end_imports_in_one_direction():
    for circle in package_circles(types=False):
        assert not any(name.startswith("penstock.torch") for name in circle), circle


def test_no_circle_of_imports_has_more_than_three_files_even_for_types():
    for circle in package_circles(types=True):
        assert len(circle) <= CIRCLE_MAX, circle


def test_no_two_modules_have_one_name():
    by_name = {}
    for name in modules_by_name():
        by_name.setdefault(name.rpartition(".")[2], []).append(name)
    double = [names for names in by_name.values() if len(names) > 1]
    assert not double, double


def mapped(package):
    """What the code map of a package names: lines of its docstring that begin with a name and at least two spaces."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    return sorted(re.findall(r"^(\w+)  +\S", text, re.MULTILINE))


@pytest.mark.parametrize("package", SUBPACKAGES, ids=lambda package: package.relative_to(PACKAGE).as_posix())
def test_the_map_of_a_package_names_its_modules(package):
    inside = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert mapped(package) == sorted(inside - {"__init__"})


def tables_of(words, source):
    """The lines of a Python source in which two or more of these words stand together, and what they are."""
    for node in nodes(source):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            entries = node.elts
        elif isinstance(node, ast.Dict):
            entries = node.keys
        elif isinstance(node, ast.BoolOp):
            compared = [test for test in ast.walk(node) if isinstance(test, ast.Compare)]
            entries = [side for test in compared for side in (test.left, *test.comparators)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            entries = [ast.Constant(word) for word in str(getattr(node.func.value, "value", "")).split()]
        else:
            continue
        found = {entry.value for entry in entries if isinstance(entry, ast.Constant)} & words
        if len(found) > 1:
            yield node.lineno, sorted(found)


def test_a_table_of_words_is_found():
    words = {"store", "ring", "1bit"}
    for table in (
        "('store', 'ring')",
        "{'ring': 1, 'store': 2}",
        "{'1bit', 'ring'}",
        "x == 'store' or x == 'ring'",
        "x == 'store' or ('ring' == x and y == 1)",
        "x == 'store' or not (y or x != 'ring')",
        "'store 1bit'.split()",
        "f({'a': ['ring', 'store']})",
    ):
        assert list(tables_of(words, table)), table
    for other in ("('store', 'bf16')", "'store ring'", "{'store': 'ring'}", "x == 'store'"):
        assert not list(tables_of(words, other)), other


def test_python_has_no_second_table_of_schemes():
    """Names, and what they stand for, are the core's: `penstock._native.WAYS`, `ALGORITHMS`."""
    from penstock._native import WAYS

    for path in python_modules():
        name = path.relative_to(PACKAGE).as_posix()
        tables = list(tables_of(set(WAYS), path.read_text(encoding="utf-8")))
        allowed = [["ring", "store"]] if name == WITH_TWO_ALGORITHMS else []
        assert [words for _, words in tables] == allowed, f"{name}: {tables}"


def test_types_spell_out_what_the_core_lists():
    """A `Literal` needs the words themselves."""
    from penstock._native import ALGORITHMS, LAYER_KINDS, WAYS
    from penstock.description import LayerKind

    stubs = (PACKAGE / "_native.pyi").read_text(encoding="utf-8")
    literals = dict(re.findall(r"^(\w+) = Literal\[(.+)\]$", stubs, re.MULTILINE))
    assert ast.literal_eval(literals["_Algorithm"]) == ALGORITHMS
    routes = dict.fromkeys(way.route for way in WAYS.values() if way.route != "owner")  # which no tensor of a book has
    assert ast.literal_eval(literals["_Route"]) == tuple(routes)
    assert get_args(LayerKind) == LAYER_KINDS
    halves = [name for name, way in WAYS.items() if way.wire is not None]
    for line, words in tables_of(set(WAYS), stubs):
        assert words in (sorted(ALGORITHMS), sorted(halves)), f"_native.pyi:{line}"


def test_what_implements_a_scheme_is_called_as_the_core_calls_it():
    from penstock._native import WAYS
    from penstock.lossy import DGC, OneBit
    from penstock.torch.schemes.making import OF_ROWS
    from penstock.torch.schemes.survey import PLAIN

    assert set(OF_ROWS) == {name for name, way in WAYS.items() if way.sends_rows}
    assert set(PLAIN) == {way.kind for way in WAYS.values()} - {None}
    assert {OneBit.name, DGC.name} == {name for name, way in WAYS.items() if way.shortens}


def test_no_two_files_of_tests_have_one_name():
    """Pytest collects them as modules of one level: of two with one name the second is an error, and nothing runs."""
    names = [path.name for path in tracked_files() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"]
    assert not {name for name in names if names.count(name) > 1} - {"conftest.py", "__init__.py"}


def written_attributes(path):
    """What a file assigns to, as (holder, attribute): `slot.flight.token = 1` is (flight, token)."""
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            holder = node.value
            yield getattr(holder, "attr", getattr(holder, "id", "")), node.attr


@pytest.mark.parametrize("part", WRITERS)
def test_each_part_of_a_slot_is_written_by_one_file(part):
    writers = {
        path.relative_to(PACKAGE / "torch").as_posix()
        for path in (PACKAGE / "torch").rglob("*.py")
        if any(holder == part for holder, _ in written_attributes(path))
    }
    assert writers <= {WRITERS[part]}


def test_a_slots_identity_is_written_where_it_is_made():
    for path in (PACKAGE / "torch").rglob("*.py"):
        written = {attribute for holder, attribute in written_attributes(path) if holder == "slot"}
        assert written <= SLOT_WRITERS.get(path.relative_to(PACKAGE / "torch").as_posix(), set()), path


def test_the_package_knows_nothing_of_those_who_measure_it():
    for path in python_modules():
        assert not {name.split(".")[0] for name in imported(path)} & {"lab", "benchmarks", "tests", "examples"}, path


def test_the_labs_pure_parts_import_nothing_else():
    """Workers in the peers' environments read traces, without torch and in old Pythons."""
    lab = ROOT / "lab"
    for path in [lab / "__init__.py", lab / "trace.py", *lab.glob("networks/*.py")]:
        foreign = {name for name in imported(path) if not name.startswith("lab.")}
        assert foreign <= {"__future__", "collections.abc", "dataclasses", "functools", "math", "typing"}, path
        ours = {name for name in imported(path) if name.startswith("lab.")}
        assert all(name.startswith(("lab.trace", "lab.networks")) for name in ours), path


def test_only_the_ledger_of_lent_memory_is_told_what_is_released():
    """Each token is told once: whoever else asked what has landed would keep its memory alive for ever."""
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in python_modules()
        for node in nodes(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.Attribute) and node.attr == "landed" and ast.unparse(node.value).endswith("engine")
    }
    assert callers == {"lending.py"}


def pickles_in(source):
    """What a Python source may read a pickle by: modules, and loads that do not say that they read none."""
    told = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    safe = set()
    for node in nodes(source):  # a call comes before what is called
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name.split(".")[0] in PICKLES or name == "torch.load")
        elif isinstance(node, ast.Call) and (option := told.get(ast.unparse(node.func))):
            given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            if given.get(option[0]) is option[1]:
                safe.add(node.func)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in told and node not in safe:
            yield ast.unparse(node)


def test_what_reads_a_pickle_is_found():
    for source in (
        "import json, pickle as p",
        "def f():\n    from marshal import loads",
        "import joblib.memory",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=wanted)",
        "read(with_=torch.load)",
        "np.load(path, allow_pickle=True)",
    ):
        assert list(pickles_in(source)), source
    for source in ("import json", "torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)"):
        assert not list(pickles_in(source)), source


def test_nothing_reads_a_pickle():
    for path in python_modules():
        found = list(pickles_in(path.read_text(encoding="utf-8")))
        assert not found, f"{path.relative_to(PACKAGE)}: {found}"


def tensor_makers():
    """The functions of `torch` that take the device that the program has set as default, as torch lists them."""
    from torch.utils._device import _device_constructors

    return {function.__name__.removeprefix("fft_") for function in _device_constructors()}


def made_by_default(source):
    """Calls of a Python source that make tensors as a program's defaults say: of its device, or of its number type.

    Those of ``like.new_empty(...)`` and ``torch.empty_like(...)`` take both from a tensor; `torch.from_numpy` and
    `torch.frombuffer` take memory that is there.
    """
    makers = dict.fromkeys(("torch", "fft", "nested"), tensor_makers()) | {"nn": MODULES_WITH_TENSORS}
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = makers.get((node.module or "").rpartition(".")[2], set())
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holder = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            told = {"device", "dtype"} <= {word.arg for word in node.keywords}
            if node.func.attr in makers.get(holder, set()) and not told:
                yield ast.unparse(node)


def test_what_makes_a_tensor_by_default_is_found():
    for source in (
        "torch.empty(3)",
        "torch.zeros(3, device='cpu')",
        "x = torch.tensor([1], dtype=torch.int64).view(-1)",
        "self._torch.full(shape, 0, dtype=dtype)",
        "torch.sparse_coo_tensor(indices, values, shape)",
        "torch.fft.fftfreq(4)",
        "nn.Linear(3, 4)",
        "torch.nn.Linear(3, 4, dtype=torch.float32)",
        "from torch import empty, nn",
        "def f():\n    from torch.nn import Embedding",
    ):
        assert list(made_by_default(source)), source
    for source in (
        "torch.empty(3, dtype=torch.uint8, device='cpu')",
        "torch.empty_like(x)",
        "x.new_empty(3)",
        "torch.frombuffer(memory, dtype=torch.uint8)",
        "numpy.empty(3, dtype)",
        "slot.empty()",
        "nn.Parameter(x)",
        "from torch import Tensor, nn",
    ):
        assert not list(made_by_default(source)), source


def test_every_tensor_says_where_it_is_and_of_what_type():
    """Programs set other defaults: `torch.set_default_device("cuda")`, ``with torch.device``, `set_default_dtype`."""
    for path in python_modules():
        if path.relative_to(PACKAGE).as_posix() != PROGRAM_OF_ITS_OWN:
            found = list(made_by_default(path.read_text(encoding="utf-8")))
            assert not found, f"{path.relative_to(PACKAGE)}: {found}"


def test_only_config_reads_the_environment():
    readers = set()
    for path in python_modules():
        for node in nodes(path.read_text(encoding="utf-8")):
            attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
            name = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name in {"environ", "getenv"}
            )
            if attribute or name:
                readers.add(path.relative_to(PACKAGE).as_posix())
    assert readers <= {"config.py"}


def test_rust_reads_no_environment():
    for path in CRATES.glob("*/src/**/*.rs"):
        assert not re.search(r"\benv::var", without_comments(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "README.md", "CONTRIBUTING.md"])
def test_files_that_documents_name_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    named = set(re.findall(r"`((?:crates|python|tests|examples|docs|requirements|lab|fuzz)/[\w./-]*)`", text))
    named |= set(re.findall(r"\]\(([^)#:\s]+)\)", text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"{document} names what does not exist: {missing}"


def journeys():
    """The rows of ARCHITECTURE's journeys: files, and the functions that are named beside them."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    journey = text.partition("## Three journeys")[2].partition("\n## ")[0]
    for files, functions in re.findall(r"^\| (`[^|]+`) \| (`[^|]+`) \|", journey, re.MULTILINE):
        yield re.findall(r"`([^`]+)`", files), re.findall(r"`([^`]+)`", functions)


def test_the_journeys_lead_through_functions_that_exist():
    rows = list(journeys())
    assert len(rows) > 25
    for files, functions in rows:
        texts = [(ROOT / name).read_text(encoding="utf-8") for name in files]
        for function in functions:
            assert any(re.search(rf"\b(?:fn|def) {function}\b", text) for text in texts), (files, function)


def test_every_folder_of_code_has_a_row():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sources = [path for path in tracked_files() if path.suffix in {".py", ".rs", ".toml"}]
    folders = {path.parent.relative_to(ROOT).as_posix() + "/" for path in sources if path.parent != ROOT}
    inside = ("tests/", "crates/python/src/")
    inside += tuple(f"crates/{crate}/{beside}/" for crate in CRATE_EDGES for beside in ("tests", "examples"))
    missing = sorted(name for name in folders if not name.startswith(inside) and f"`{name}`" not in text)
    assert not missing, missing


@pytest.mark.parametrize("listed", sorted((ROOT / "requirements").glob("*.in")), ids=lambda path: path.stem)
def test_requirements_are_pinned_and_name_no_index(listed):
    lock = listed.with_suffix(".lock")
    assert lock.exists(), f"run `make lock LOCKS={listed.stem}`"
    for line in lock.read_text(encoding="utf-8").splitlines():
        requirement = line.split(";")[0].strip()
        assert re.fullmatch(r"[A-Za-z0-9._-]+(\[[\w,-]+\])?==[\w.!+-]+", requirement), line


def test_dependencies_of_crates_come_from_the_registry():
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    assert {package["source"].split("+")[0] for package in packages if "source" in package} <= {"registry"}
