"""`discover` as a pure function: precedence, launchers, meeting points, and messages for what is not accepted."""

import dataclasses
import hashlib
import json
import pathlib
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import config, launchers
from penstock.launchers import discover

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SECRET = "correct horse battery staple"

# For each option: an accepted text, what it becomes, and a text that is refused.
SAMPLES = {
    "rank": ("0", 0, "-1"),
    "world_size": ("1", 1, "0"),
    "servers": ("0", 0, "-1"),
    "groups": ("host", "host", "[[0, 1], []]"),
    "role": ("worker", "worker", "both"),
    "rendezvous": ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000", "udp://10.0.0.1:5000"),
    "secret": (SECRET, hashlib.sha256(SECRET.encode()).digest(), "short"),
    "insecure": ("yes", True, "perhaps"),
    "interface": ("eth0,!10.0.0.0/8", "eth0,!10.0.0.0/8", "10.0.0.0/99"),
    "port": ("5000-5010", "5000-5010", "5010-5000"),
    "slice_bytes": ("65536", 65536, "1"),
    "lanes": ("2", 2, "0"),
    "window_bytes": ("auto", None, "0"),
    "congestion_control": ("reno", "reno", "two words"),
    "shared_memory": ("off", False, "maybe"),
    "encrypt": ("on", True, "maybe"),
    "priority": ("off", False, "2"),
    "operation_timeout_s": ("1.5", 1.5, "0"),
    "peer_timeout_s": ("2", 2.0, "-1"),
    "handshake_timeout_s": ("3", 3.0, "nan"),
    "rendezvous_timeout_s": ("4", 4.0, "inf"),
    "broadcast_buffers": ("true", True, ""),
    "line_rate_mbit": ("950", 950.0, "fast"),
    "check_every": ("off", 0, "-1"),
    "lateness": ("off", False, "maybe"),
    "policy": ("paper", "paper", "greedy"),
    "collective_schemes": ("yes", True, "ring"),
    "pinned_bytes": ("8388608", 8 << 20, "1000"),
    "whole_steps": ("on", True, "41"),
    "elastic": ("yes", True, "maybe"),
    "join": ("10.0.0.1:5000, [::1]:5001,10.0.0.1:5000", "10.0.0.1:5000,[::1]:5001", "10.0.0.1:5000,"),
    "ranks_min": ("2", 2, "0"),
    "ranks_max": ("5", 5, "0"),
    "membership_log": ("a/log.jsonl", "a/log.jsonl", " "),
    "observations": ("65536", 65536, "-1"),
    "trace": ("a/directory", "a/directory", " "),
    "trace_steps": ("100-109", "100-109", "9-3"),
    "metrics": ("9400", "127.0.0.1:9400", "9400x"),
    "status": ("a/directory", "a/directory", " "),
}


def test_every_option_has_a_parser_a_typed_argument_a_sample_and_documentation():
    names = {field.name for field in dataclasses.fields(ps.Options)}
    assert names == set(config._FIELDS) == set(SAMPLES)
    assert names == set(config.OptionArguments.__annotations__)
    for name in names:
        assert f"{name}:" in (ps.Options.__doc__ or "")
    assert typing.get_type_hints(ps.Options)  # annotations resolve


@pytest.mark.parametrize("name", SAMPLES)
def test_environment_and_arguments_are_parsed_alike_and_arguments_win(name):
    accepted, value, refused = SAMPLES[name]
    environ = {f"PENSTOCK_{name.upper()}": accepted}
    if name == "rank":
        environ["PENSTOCK_WORLD_SIZE"] = "1"
    launch = discover(environ)
    assert getattr(launch.options, name) == value
    assert launch.sources[name] == f"environment variable PENSTOCK_{name.upper()}"
    arguments = {name: accepted, **({"world_size": 1} if name == "rank" else {})}
    launch = discover({f"PENSTOCK_{name.upper()}": refused}, **arguments)
    assert getattr(launch.options, name) == value
    assert launch.sources[name] == f"argument {name}"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_refused_value_says_option_origin_value_and_what_is_accepted(name):
    refused = SAMPLES[name][2]
    for environ, arguments, origin in (
        ({f"PENSTOCK_{name.upper()}": refused}, {}, f"environment variable PENSTOCK_{name.upper()}"),
        ({}, {name: refused}, f"argument {name}"),
    ):
        with pytest.raises(ps.ConfigError) as caught:
            discover(environ, **arguments)
        text = str(caught.value)
        assert f"option {name}:" in text and origin in text and "accepted:" in text
        if name == "secret":
            assert refused not in text and "secrets.token_hex" in text
        else:
            assert repr(refused) in text


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    raw=st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.booleans(), st.lists(st.integers())),
)
def test_any_value_is_parsed_or_refused_with_config_error(name, raw):
    try:
        config.parse_option(name, raw, "test")
    except ps.ConfigError as error:
        assert f"option {name}" in str(error)


@settings(deadline=None)
@given(
    environ=st.dictionaries(
        st.sampled_from(
            [variable for _, rank, sizes in launchers._LAUNCHERS for variable in (rank, *sizes)]
            + ["MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_STEP_NODELIST", "MPI_LOCALNRANKS"]
            + ["PENSTOCK_RANK", "PENSTOCK_WORLD_SIZE", "PENSTOCK_SECRET", "PENSTOCK_INSECURE"]
        ),
        st.one_of(st.sampled_from(["0", "1", "2", "29500", "127.0.0.1", "node[1-2]", SECRET]), st.text(max_size=5)),
    )
)
def test_any_environment_gives_a_consistent_launch_or_config_error(environ):
    try:
        launch = discover(environ)
    except ps.ConfigError:
        return
    assert 0 <= launch.options.rank < launch.options.world_size
    assert (launch.meeting_point is None) == (launch.options.world_size == 1)


@settings(deadline=None)
@given(st.integers(0, 4095), st.integers(1, 4096))
def test_each_launcher_gives_its_rank_and_size(rank, size):
    for launcher, rank_variable, size_variables in launchers._LAUNCHERS:
        for size_variable in size_variables:
            environ = {rank_variable: str(rank), size_variable: str(size), "SLURM_STEP_ID": "0"}
            if rank >= size:
                with pytest.raises(ps.ConfigError, match="not below the number of processes"):
                    discover(environ, rendezvous="file:///tmp/meet")
                continue
            launch = discover(environ, rendezvous="file:///tmp/meet")
            assert (launch.options.rank, launch.options.world_size, launch.launcher) == (rank, size, launcher)
            assert rank_variable in launch.sources["rank"]


def test_what_a_launch_says_of_itself_is_what_was_set_and_no_secret():
    environ = {**TORCHRUN, "PENSTOCK_SECRET": SECRET, "PENSTOCK_LANES": "2"}
    said = discover(environ, slice_bytes=65536).facts()
    assert (said["launcher"], said["met_at"][0]) == ("torchrun", "tcp://127.0.0.1:29500")
    assert said["options"] == {
        "rank": ["1", "torchrun's RANK"],
        "world_size": ["4", "torchrun's WORLD_SIZE"],
        "secret": ["given", "environment variable PENSTOCK_SECRET"],
        "lanes": ["2", "environment variable PENSTOCK_LANES"],
        "slice_bytes": ["65536", "argument slice_bytes"],
    }
    text = json.dumps(said)
    assert SECRET not in text and hashlib.sha256(SECRET.encode()).hexdigest() not in text
    launch = discover({"PATH": "/bin"})
    assert launch.facts() == {"launcher": "none", "met_at": None, "options": {}}
    other = dataclasses.replace(launch, options=dataclasses.replace(launch.options, encrypt=True))
    assert other.facts()["options"] == {"encrypt": ["True", "the other ranks"]}


def test_nothing_at_all_is_a_single_process():
    launch = discover({"PATH": "/bin", "SLURM_NTASKS": "4"})  # an allocation's shell is not one of its tasks
    assert (launch.options.rank, launch.options.world_size, launch.meeting_point) == (0, 1, None)
    assert launch.options == ps.Options()


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ("RANK", "WORLD_SIZE"),
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("PENSTOCK_RANK", "world_size"),
    ],
)
def test_a_half_set_environment_names_what_is_missing(present, missing):
    with pytest.raises(ps.ConfigError) as caught:
        discover({present: "2"})
    assert present in str(caught.value) and missing in str(caught.value)


def test_half_of_the_master_address_names_the_other_half():
    environ = {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}
    with pytest.raises(ps.ConfigError, match="MASTER_PORT is missing"):
        discover(environ)


def test_torchruns_own_store_is_used_and_told_apart_by_run_and_restart():
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}
    point = discover({**TORCHRUN, **elastic, "MASTER_ADDR": "node7"}).meeting_point
    assert point is not None
    assert (point.kind, point.host, point.port, point.scope) == ("launcher", "node7", 29500, "abc/2")
    hosted = discover(TORCHRUN).meeting_point
    assert hosted is not None and hosted.kind == "tcp"


def test_mpirun_on_one_machine_meets_in_a_private_directory_of_this_job():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    point = discover({**environ, "PMIX_NAMESPACE": "prterun-vm-5227@1"}).meeting_point
    assert point is not None and point.kind == "file" and point.path.endswith("mpi-prterun-vm-5227_1")
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    one, other = (discover(hydra, parent_pid=pid).meeting_point for pid in (10, 11))
    assert one is not None and other is not None and one.path != other.path


def test_mpirun_on_several_machines_needs_a_place_to_meet():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ps.ConfigError, match="MASTER_ADDR and MASTER_PORT are missing"):
        discover(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,7],gpu3", "node01"),
        ("gpu3,node[1-2]", "gpu3"),
        ("rack[2-3]n[5,6]-ib", "rack2n5-ib"),
    ],
)
def test_slurm_meets_at_the_first_node_of_the_step(nodes, first):
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "4"}
    launch = discover({**environ, "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": nodes}, secret=SECRET)
    assert launch.meeting_point is not None
    assert (launch.meeting_point.kind, launch.meeting_point.host, launch.meeting_point.port) == ("tcp", first, 15127)
    single = discover({**environ, "SLURM_NNODES": "1"}).meeting_point
    assert single is not None and single.kind == "file" and "slurm-123-4" in single.path


def test_mpirun_inside_slurm_asks_mpirun():
    environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert discover(environ, rendezvous="file:///tmp/meet").options.rank == 3


def test_each_mpirun_of_a_batch_script_meets_in_a_directory_of_its_own():
    script = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "123", "SLURM_NNODES": "1", "SLURM_NTASKS": "4"}
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    one, other = (discover({**script, **hydra}, parent_pid=pid) for pid in (10, 11))
    assert (one.launcher, one.options.rank, one.options.world_size) == ("MPICH (PMI)", 1, 2)
    assert one.meeting_point is not None and other.meeting_point is not None
    assert one.meeting_point.path != other.meeting_point.path


def test_pmi_of_srun_is_slurms():
    step = {"SLURM_STEP_ID": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]"}
    task = {**step, "SLURM_PROCID": "3", "SLURM_JOB_ID": "123", "SLURM_NNODES": "2", "PMI_RANK": "3", "PMI_SIZE": "4"}
    launch = discover(task, secret=SECRET)
    assert (launch.launcher, launch.options.rank, launch.options.world_size) == ("Slurm", 3, 4)
    assert str(launch.meeting_point) == "tcp://node1:15127"
    placed = discover({**task, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, secret=SECRET).meeting_point
    assert placed is not None and placed.scope == "slurm-123-4"
    # An mpirun that this task has started counts by itself.
    launch = discover({**task, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, secret=SECRET)
    assert (launch.launcher, launch.options.rank, launch.options.world_size) == ("MPICH (PMI)", 1, 2)


def test_a_batch_script_is_none_of_its_tasks():
    script = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]"}
    for more in ({"SLURM_NTASKS": "4", "SLURM_NNODES": "1"}, {"SLURM_JOB_NUM_NODES": "2"}):
        with pytest.raises(ps.ConfigError, match="put srun before the command"):
            discover({**script, **more})
        assert discover({**script, **more}, world_size=1).options.world_size == 1
        started = discover({**script, **more, **TORCHRUN})
        assert (started.launcher, started.options.rank) == ("torchrun", 1)
    alone = discover({**script, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"})
    assert (alone.launcher, alone.options.world_size) == ("none", 1)


def test_a_launchers_job_is_told_apart_wherever_it_meets():
    environ = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "4"}
    for place in ("file:///tmp/meet", "tcp://127.0.0.1:5000"):
        for variables, scope in ((environ, "abc/1"), (slurm, "slurm-123-4"), ({}, "job")):
            given = {} if variables else {"rank": 0, "world_size": 2}
            point = discover(variables, rendezvous=place, **given).meeting_point
            assert point is not None and point.scope == scope


@pytest.mark.parametrize(
    ("raw", "kept", "address"),
    [
        (0, "127.0.0.1:0", ("127.0.0.1", 0)),
        (" 9400 ", "127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("node1:09400", "node1:9400", ("node1", 9400)),
        ("0.0.0.0:0", "0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9400", "[::1]:9400", ("::1", 9400)),
        ("metrics.prom", "metrics.prom", None),
        (pathlib.Path("/var/lib/penstock.prom"), "/var/lib/penstock.prom", None),
    ],
)
def test_metrics_are_at_a_port_of_the_loopback_interface_unless_it_is_said(raw, kept, address):
    options = discover({}, metrics=raw).options
    assert (options.metrics, options.metrics_address()) == (kept, address)
    assert ps.Options().metrics_address() is None


NO_PLACES = (
    *(True, -1, 65536, 9400.0, b"9400", "", "metrics.txt", pathlib.Path("metrics"), "a\0.prom"),
    *(":9400", "node1:", "node1:65536", "::1:9400", "a:0:9400", "u:p@node1:9400", "a b:9400"),
    *("http://node1:9400", "node1:9400/metrics"),
)


@pytest.mark.parametrize("raw", NO_PLACES)
def test_metrics_at_no_place_are_refused(raw):
    with pytest.raises(ps.ConfigError, match=r"option metrics: got .* accepted: a port from 0"):
        discover({}, metrics=raw)


@pytest.mark.parametrize(
    ("variable", "meant"), [("PENSTOCK_SLICEBYTES", "PENSTOCK_SLICE_BYTES"), ("PENSTOCK_SECERT", "PENSTOCK_SECRET")]
)
def test_an_unknown_variable_is_refused_with_a_suggestion(variable, meant):
    with pytest.raises(ps.ConfigError, match=f"unknown environment variable {variable}; did you mean {meant}\\?"):
        discover({variable: "1"})


def test_an_unknown_argument_is_refused_with_a_suggestion():
    with pytest.raises(ps.ConfigError, match="'slice_byte' of penstock\\.init; did you mean slice_bytes"):
        discover({}, slice_byte=1)


def test_the_secret_is_never_shown():
    launch = discover({}, secret=SECRET)
    assert launch.options.secret is not None
    for text in (repr(launch), str(launch), repr(launch.options)):
        for shown in (SECRET, launch.options.secret.hex(), repr(launch.options.secret)):
            assert shown not in text


@settings(deadline=None)
@given(st.integers(1, 65535), st.integers(1, 65535))
def test_ports(first, last):
    if first > last:
        with pytest.raises(ps.ConfigError):
            discover({}, port=f"{first}-{last}")
    else:
        assert list(discover({}, port=f"{first}-{last}").options.ports()) == list(range(first, last + 1))
    assert list(discover({}, port=first).options.ports()) == [first]
