"""Command lines of torchrun, given to `penstock run`: what they come to, before anything starts."""

import argparse
import os

import pytest

from penstock import config
from penstock.errors import ConfigError
from penstock.launch import start, torchruns


def parsed(*words):
    parser = argparse.ArgumentParser()
    start.add_to(parser.add_subparsers())
    return parser.parse_args(["run", *words, "train.py", "--standalone"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rdzv-endpoint", "node1:29400", "--rdzv-backend", "c10d", "--rdzv-id", "7"], ("node1", 29400)),
        (["--rdzv_endpoint", "node1"], ("node1", None)),
        (["--rdzv-endpoint=node1:0"], ("node1", None)),
        (["--standalone", "--rdzv-endpoint=localhost:0", "--rdzv_backend=c10d"], (None, None)),
        (["--master_addr", "node1", "--master_port", "5"], ("node1", 5)),
    ],
)
def test_an_endpoint_says_where_ranks_meet(words, expected):
    options = parsed("--nproc_per_node=2", "--nnodes=1", *words)
    assert torchruns.take(options) is None
    assert (options.master_addr, options.master_port) == expected
    assert (options.nproc_per_node, options.arguments) == (2, ["--standalone"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rdzv-endpoint", "node1:x"], "--rdzv-endpoint node1:x: a host is expected, or host:port"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "b"], "give it or these"),
        (["--standalone", "--nnodes", "2"], "--standalone is for one host"),
        (["--standalone", "--hosts", "hosts"], "--standalone is for one host"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, said):
    with pytest.raises(ConfigError) as error:
        torchruns.take(parsed(*words))
    assert said in str(error.value)


def test_who_asks_for_restarts_is_told_that_there_are_none():
    assert "no worker is started again" in torchruns.take(parsed("--max-restarts", "3"))
    assert torchruns.take(parsed("--max-restarts", "3", "--min", "2", "--max", "3")) is None


def test_workers_of_a_host_may_be_as_many_as_its_processors(capsys):
    assert parsed("--nproc-per-node", "cpu").nproc_per_node == len(os.sched_getaffinity(0))
    with pytest.raises(SystemExit):
        parsed("--nproc-per-node", "many")
    assert "cpu, gpu and auto are accepted, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [([], None, "1"), (["--keep-ddp"], None, "0"), ([], "0", "0"), ([], "1", "1"), (["--keep-ddp"], "1", "0")],
)
def test_ddp_is_replaced_unless_it_is_to_be_kept(words, variable, expected):
    environment = {} if variable is None else {config.REPLACE_DDP: variable}
    assert start.replaces_ddp(parsed(*words), environment) == expected


def test_who_lets_torch_ask_nobody_is_told_what_that_means(capsys):
    assert start.replaces_ddp(parsed(), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == "1"
    assert "programs get torch's own DistributedDataParallel" in capsys.readouterr().err
