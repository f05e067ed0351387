"""What `import torch` does where Penstock is installed: next to nothing, unless `penstock run` has asked for more."""

import importlib.metadata
import os
import subprocess

import programs
import pytest
import torch  # noqa: F401 - which has called it once

from penstock import autoload, config
from penstock.errors import ConfigError

LIMIT_S = 60
ALWAYS = ["autoload", "config", "errors", "grouping", "torch", "torch.registration"]
SAYS = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel as other
print(DistributedDataParallel is other, DistributedDataParallel.__base__.__name__)
print(*sorted(name.removeprefix("penstock.") for name in sys.modules if name.startswith("penstock.")))
"""


def start(program, **variables):
    """Python alone imports torch with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = programs.start_afresh("-c", program, env={**environment, **variables}, **pipes)
    said, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return said.splitlines(), errors


def test_torch_finds_the_entry_point():
    (found,) = [one for one in importlib.metadata.entry_points(group="torch.backends") if one.name == "penstock"]
    assert found.load() is autoload.register


@pytest.mark.slow
def test_without_the_variable_nothing_is_imported_but_what_registers_the_backend():
    said, errors = start(SAYS)
    assert (said[0], said[1].split()) == ("True Module", ALWAYS)
    assert errors == ""


@pytest.mark.long
@pytest.mark.parametrize("value", ["0", "1", "nonsense"])
def test_each_value_lets_torch_be_imported(value):
    said, errors = start(SAYS, PENSTOCK_REPLACE_DDP=value)
    replaced = value == "1"
    assert said[0] == f"True {'DistributedDataParallel' if replaced else 'Module'}"
    ours = ["torch.ddp", "torch.ddp.replacing", "torch.ddp.wrapper"] if replaced else []
    assert said[1].split() == sorted([*ALWAYS, *ours])
    assert ("accepted: true or false" in errors) == (value == "nonsense"), errors


@pytest.mark.long
def test_the_backend_needs_no_import():
    program = """
import torch
import torch.distributed as dist
dist.init_process_group("penstock", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
print(dist.get_backend(), x.tolist())
dist.destroy_process_group()
"""
    said, _ = start(program)
    assert said == ["penstock [1.0, 1.0, 1.0]"]


def test_whatever_goes_wrong_the_import_goes_on(monkeypatch, capsys):
    def fail(environ):
        raise RuntimeError("not today")

    monkeypatch.setattr(config, "replaces_ddp", fail)
    autoload.register()
    assert capsys.readouterr().err == "penstock: torch is left as it is: not today\n"


def test_the_variable_is_a_switch_and_no_option_of_a_job():
    assert config.replaces_ddp({"PENSTOCK_REPLACE_DDP": "yes"})
    assert not config.replaces_ddp({"PENSTOCK_REPLACE_DDP": "off"}) and not config.replaces_ddp({})
    with pytest.raises(ConfigError, match=r"'2' from environment variable PENSTOCK_REPLACE_DDP; accepted"):
        config.replaces_ddp({"PENSTOCK_REPLACE_DDP": "2"})
    assert config.given({"PENSTOCK_REPLACE_DDP": "2", "PENSTOCK_LAUNCHER_PIPE": "3:4"}, {}) == ({}, {})
