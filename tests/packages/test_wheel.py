"""What `make wheel` makes: what is in it, that a new user's machine needs no more, and that the sdist can be built.

The clean machine is a virtual environment that sees, of all packages installed here, those alone that the wheel's own
metadata ask for; nothing is downloaded. Rust is not on its path.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 1800
LIMIT_S = 300
GLIBC = (2, 28)
RUST = ("cargo", "rustc", "rustup", "maturin")
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]["version"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

built = pytest.mark.long  # by all that is built and installed here


def run(*command, limit_s=LIMIT_S, **options):
    """What it has printed, and then what it has written to standard error."""
    words = [str(word) for word in command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **pipes, **options) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            raise
    assert process.returncode == 0, f"{words}\n{out}{errors}"
    return out + errors


@pytest.fixture(scope="module")
def dist():
    """A folder with what `make wheel` has built now."""
    run("make", "--no-print-directory", "wheel", cwd=ROOT, limit_s=BUILD_LIMIT_S)
    return ROOT / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    """That for this machine."""
    (found,) = dist.glob(f"*_{platform.machine()}.whl")
    return found


def tracked(*folders):
    return set(run("git", "ls-files", *folders, cwd=ROOT).splitlines())


def of_wheel(wheel, name):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


@built
def test_a_wheel_has_the_package_and_its_types_and_nothing_else(dist):
    wheels = sorted(dist.glob("*.whl"))
    assert wheels
    for one in wheels:
        assert re.fullmatch(rf"penstock-{re.escape(VERSION)}-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", one.name)
        with zipfile.ZipFile(one) as archive:
            names = set(archive.namelist())
        infos = {name for name in names if name.startswith(f"penstock-{VERSION}.dist-info/")}
        sources = {name.removeprefix("python/") for name in tracked("python")}
        assert names - infos == sources | {"penstock/_native.abi3.so"}
        assert {"penstock/py.typed", "penstock/_native.pyi"} <= sources
        assert any(name.endswith("/LICENSE") for name in infos)


@built
def test_metadata_are_the_project_s_with_the_version_of_cargo(wheel):
    found = message_from_string(of_wheel(wheel, f"penstock-{VERSION}.dist-info/METADATA").decode())
    assert (found["Name"], found["Version"]) == ("penstock", VERSION)
    assert {*found.get_all("Provides-Extra")} == {*PYPROJECT["project"]["optional-dependencies"]}
    entry_points = of_wheel(wheel, f"penstock-{VERSION}.dist-info/entry_points.txt").decode()
    assert "penstock=penstock.cli:main" in entry_points.replace(" ", "")
    assert "[torch.backends]" in entry_points


@built
def test_the_native_module_needs_no_newer_glibc_than_its_tag_says(wheel):
    library = of_wheel(wheel, "penstock/_native.abi3.so")
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+(?:\.\d+)?)\0", library)}
    assert versions and max(versions)[:2] <= GLIBC


def requirements(wheel):
    found = message_from_string(of_wheel(wheel, f"penstock-{VERSION}.dist-info/METADATA").decode())
    return [Requirement(line) for line in found.get_all("Requires-Dist")]


def needed(asked, extras):
    """The installed distributions that these requirements come to, with what those require in turn."""
    found, left, seen = {}, [(requirement, frozenset(extras)) for requirement in asked], set()
    while left:
        requirement, of_whom = left.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in {"", *of_whom}):
            continue
        name, own = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, own) in seen:
            continue
        seen.add((name, own))
        found[name] = metadata.distribution(name)
        assert requirement.specifier.contains(found[name].version, prereleases=True), requirement
        left += [(Requirement(line), own) for line in found[name].requires or []]
    return found.values()


class CleanMachine:
    """A new virtual environment, and a path without Rust."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.bin = folder / "venv" / "bin"
        run(sys.executable, "-m", "venv", folder / "venv")
        # Until Python 3.11 there is one in it, which would hide the newer one that torch asks for.
        run(self.bin / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        (site,) = folder.glob("venv/lib/python*/site-packages")
        self._visible = folder / "visible"
        self._visible.mkdir()
        (site / "visible.pth").write_text(f"{self._visible}\n", encoding="utf-8")
        path = [
            one for one in os.environ["PATH"].split(os.pathsep) if not any((Path(one) / name).exists() for name in RUST)
        ]
        self.environ = {"PATH": os.pathsep.join([str(self.bin), *path]), "HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def let_see(self, distributions):
        """Links to what is installed here."""
        for distribution in distributions:
            place = Path(distribution.locate_file(""))
            tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
            assert tops, f"{distribution.name} does not say which files it has"
            for top in tops:
                link = self._visible / top
                if not link.is_symlink():
                    link.symlink_to(place / top)

    def run(self, command, *arguments):
        return run(self.bin / command, *arguments, env=self.environ, cwd=self.home)

    def install(self, wheel):
        """What it asks for must be there: no index is asked."""
        self.run("python", "-m", "pip", "install", "--no-index", "--disable-pip-version-check", wheel)


DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"weights come to {model.module.weight.sum().item():.6f}")
dist.destroy_process_group()
"""


@built
def test_a_new_user_needs_the_wheel_alone(wheel, tmp_path):
    machine = CleanMachine(tmp_path)
    assert not any(shutil.which(name, path=machine.environ["PATH"]) for name in RUST)
    asked = requirements(wheel)
    machine.let_see(needed(asked, []))
    began = time.monotonic()

    machine.install(wheel)
    assert f"penstock {VERSION}" in " ".join(machine.run("penstock", "info").split())
    shutil.copy(ROOT / "examples" / "minimal.py", machine.home / "train.py")
    assert "on 1 worker(s)" in machine.run("python", "train.py")
    said = machine.run("penstock", "run", "--nproc-per-node", "2", "train.py")
    assert "on 2 worker(s)" in said

    (machine.home / "train_ddp.py").write_text(DDP, encoding="utf-8")
    said = machine.run("penstock", "run", "--nproc-per-node", "2", "train_ddp.py")
    assert "DistributedDataParallel is Penstock's here" in said
    sums = re.findall(r"weights come to (\S+)", said)
    assert len(sums) == 2 and len(set(sums)) == 1

    machine.let_see(needed(asked, ["demo"]))
    machine.install(f"{wheel}[demo]")
    machine.run("penstock", "demo", "--workers", "2", "--epochs", "1")
    took_s = time.monotonic() - began
    print(f"installed, and all of it run, in {took_s:.0f} s")
    assert took_s < 180.0  # a third of it where nothing else runs; torch's download comes on top


TYPED = """
import penstock as ps

ps.init(lanes=2)
reveal_type(ps.rank())
ps.init(lane=2)
"""


@built
def test_a_type_checker_knows_the_installed_package(wheel, tmp_path):
    machine = CleanMachine(tmp_path)
    machine.let_see(needed(requirements(wheel), []))
    machine.install(wheel)
    (machine.home / "typed.py").write_text(TYPED, encoding="utf-8")
    checker = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        machine.bin / "python",
        "--follow-imports",
        "silent",
    ]
    with pytest.raises(AssertionError) as found:
        run(*checker, "typed.py", env=machine.environ, cwd=machine.home)
    said = str(found.value)
    assert re.search(r'typed.py:5: note: Revealed type is "(builtins\.)?int"', said)
    assert 'typed.py:6: error: Unexpected keyword argument "lane"' in said and "Found 1 error" in said


@built
def test_the_sdist_is_what_git_has_and_builds(dist, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Cargo.lock", "PKG-INFO"} | tracked("crates", "python") <= names
    assert not {name for name in names if name.endswith((".so", ".pyc"))}
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"),
        *("--disable-pip-version-check", "--wheel-dir", tmp_path, sdist),
        env={**environ, "CARGO_TARGET_DIR": str(ROOT / "target")},
        limit_s=BUILD_LIMIT_S,
    )
    (found,) = tmp_path.glob("*.whl")
    assert of_wheel(found, "penstock/_native.abi3.so")


def test_the_version_stands_in_one_place():
    """Whoever needs it reads metadata, which maturin makes of Cargo.toml."""
    assert "version" in PYPROJECT["project"]["dynamic"] and "version" not in PYPROJECT["project"]
    for manifest in ROOT.glob("crates/*/Cargo.toml"):
        package = tomllib.loads(manifest.read_text(encoding="utf-8"))["package"]
        assert package["version"] == {"workspace": True}, manifest
    assert re.search(
        rf"^## \[{re.escape(VERSION)}\]|^## \[Unreleased\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )


def test_every_extra_is_explained_where_a_user_looks():
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    extras = {*PYPROJECT["project"]["optional-dependencies"]} - {"dev"}  # which is for work on Penstock itself
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == extras


@pytest.mark.parametrize(
    ("extras", "names"),
    [([], {"a", "c"}), (["more"], {"a", "b", "c", "d"})],
)
def test_what_is_needed_follows_extras(extras, names, monkeypatch):
    requires = {"a": ["c"], "b": ["d; extra == 'x'"]}
    monkeypatch.setattr(
        metadata, "distribution", lambda name: SimpleNamespace(name=name, version="2.0", requires=requires.get(name))
    )
    lines = ("a>=1", "b[x]; extra == 'more'", "e; extra == 'other'", "f; python_version < '3'")
    found = needed([Requirement(line) for line in lines], extras)
    assert {distribution.name for distribution in found} == names
