"""Environments of peers: made once, and missing with a reason where they cannot be made."""

import dataclasses
import json
import re
import sys

import pytest

from lab import peers

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_peer(folder, name="peer", pins="", check="pass", **fields):
    lock = folder / f"{name}.lock"
    lock.write_text(f"# pinned\n{pins}\n")
    return peers.Peer(name, "A peer", lock, check, **{"pythons": (HERE,), **fields})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where this test's environments are; no index is asked for anything."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "home"


def test_a_peer_is_installed_once(home, tmp_path):
    peer, told = make_peer(tmp_path), []
    assert peers.state(peer, home).state == "absent"
    first = peers.install(peer, home, told.append)
    assert first.state == "installed", first.reason
    assert any("make the environment" in line for line in told)
    made = (home / "peer" / "installed").stat().st_mtime_ns
    told.clear()
    assert peers.install(peer, home, told.append) == first
    assert told == ["peer: installed already"]
    assert (home / "peer" / "installed").stat().st_mtime_ns == made
    changed = dataclasses.replace(peer, check="import sys")
    assert peers.state(changed, home) == peers.State(
        "absent", "its pinned requirements have changed: run `make lab-peers`"
    )


@pytest.mark.long  # it makes an environment
def test_the_command_reports_what_is_missing_and_goes_on(home, tmp_path, monkeypatch, capsys):
    found = {
        "gone": make_peer(tmp_path, "gone", pins="no-such-package-of-penstock==1.0"),
        "old": make_peer(tmp_path, "old", pythons=("2.4",)),
        "builder": make_peer(tmp_path, "builder", programs=(("no-such-compiler", "install one"),)),
        "good": make_peer(tmp_path, "good"),
        "broken": make_peer(tmp_path, "broken", check="assert False, 'built without gloo'"),
    }
    monkeypatch.setattr(peers, "PEERS", found)
    monkeypatch.setattr(peers, "HOME", home)
    monkeypatch.setattr(peers, "install", lambda peer, install=peers.install: install(peer, home))
    assert peers.main(["install"]) == 1
    said = capsys.readouterr().err
    assert "1 of 5 peers installed" in said and "missing: gone, old, builder, broken" in said
    reasons = {name: peers.state(peer, home).reason for name, peer in found.items()}
    assert "no-such-package-of-penstock" in reasons["gone"] and "install.log" in reasons["gone"]
    assert "needs Python 2.4" in reasons["old"]
    assert "'no-such-compiler' is missing: install one" in reasons["builder"]
    assert "built without gloo" in reasons["broken"]
    assert reasons["good"] == ""
    assert all(reason in said for reason in reasons.values())
    assert (home / "gone" / "missing.txt").read_text().strip() == reasons["gone"]

    assert peers.main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["gone"]["state"] == "missing" and rows["gone"]["reason"] == reasons["gone"]
    assert rows["good"]["state"] == "installed" and rows["good"]["python"]
    with pytest.raises(peers.Missing, match="A peer: could not install the pinned packages"):
        peers.python_of("gone", home)
    assert peers.python_of("good", home) == rows["good"]["python"]


@pytest.mark.parametrize("on_project", [True, False])
def test_a_peer_may_have_the_projects_packages_beside_its_own(on_project, home, tmp_path):
    peer = make_peer(tmp_path, check="import numpy", on_project=on_project)
    assert peers.install(peer, home, lambda said: None).state == ("installed" if on_project else "missing")


def test_the_project_itself_needs_no_environment(home):
    assert peers.python_of("project", home) == sys.executable


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.main(["install", "byteps"])
    assert "no peer 'byteps'; there are horovod, mxnet" in capsys.readouterr().err


@pytest.mark.parametrize("peer", peers.PEERS.values(), ids=lambda peer: peer.name)
def test_requirements_are_pinned_and_name_no_index(peer):
    pins = peer.requirements.read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[a-z0-9._-]+==[\w.!+-]+", pin) for pin in pins)
    assert set(peer.from_source) <= {pin.split("==")[0] for pin in pins}
