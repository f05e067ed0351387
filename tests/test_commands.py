"""Every command of README, CONTRIBUTING, docs, help texts, docstrings and messages is run, or the table says why not.

Commands are collected from the texts. Each has an entry in `TABLE`, and each entry a command, but for those of `make`:
whether a target exists is asked of `make` itself. What runs does so in a copy of the repository, as it stands but for
what its entry puts in and appends: placeholders, and options that make it short. CHANGELOG and decisions are history.
"""

import ast
import functools
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/*.md", "docs/api/*.md", "docs/benchmarks/**/*.md")
MODULES = ("python/penstock/**/*.py", "examples/*.py", "benchmarks/*.py", "lab/**/*.py")
COPIED = ("README.md", "pyproject.toml", "benchmarks", "docs", "examples", "lab", "tests")

# The first word of a command, behind what is left out of the table: how a program is found, and by whom it is run.
PREFIX = r"(?:sudo |\.venv/bin/)*"
COMMAND = rf"{PREFIX}(?:(?:penstock|python3?|torchrun|mpirun|srun|make|cargo|pytest|pip|uv|apt-get|lab) [^=]|\.ci/run)"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"(?<!`)(`{1,2})(?!`)((?:[^`\n]|\n(?!\n))+?)\1(?!`)")
INTERPRETED = {"penstock": [Path(sys.executable).parent / "penstock"], "python": []}
OF_A_SHELL = re.compile(r"[$`<>|&;*?~]")
WRITTEN = re.compile(r"(?:--plot|--json-lines|>) (\S+)")


@dataclass(frozen=True)
class Run:
    """A command that runs here, in well under a minute."""

    more: str = ""  # appended
    put: dict[str, str] = field(default_factory=dict)  # instead of words of it
    long: bool = False
    hosts: int = 1  # started as often at the same time; {host} is the number, {port} a free one
    clusters: bool = False  # makes network namespaces
    needs: tuple[str, ...] = ()  # programs
    status: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class By:
    """A command that another test runs, with less work."""

    test: str


@dataclass(frozen=True)
class Not:
    """A command that cannot be run here."""

    why: str


NAMED = Run("--help")  # a program is named, and not how it is called
JUDGED = (0, 1)  # 1: measured, and a bar was missed, as on a busy machine or with so little work
ALONE = {"torchrun ": "torchrun --standalone "}  # the default port is taken once on a machine
AS_HOSTS = {"--nnodes 4": "--nnodes 2", "--nnodes 8": "--nnodes 2"} | {
    " ... ": " --node-rank {host} --master-addr 127.0.0.1 --master-port {port} "
}
BY_HAND = {"--world-size 4": "--world-size 2", "--world-size 8": "--world-size 2"} | {
    "--rank 0": "--rank {host}",
    "HOST:PORT": "127.0.0.1:{port}",
}
LINKS = "--largest 65536"
SUMS = "--sizes 4KB --seconds 0.1"
FEW_SMALL_STEPS = '--hosts 2 --models "400 tensors of 1 K" --repetitions 1 --blocks 1 --steps 2'
ONE_PROGRAM = "--programs accumulation --repetitions 1"
FEW_SUMS = "--hosts 2 --megabytes 0.1 --rounds 2 --sets 1"
FEW_TENSORS = f"{FEW_SUMS} --vectors 2"
MODEL = {"MODEL": "lab:vgg19"}
TASKS = By("tests/launch/test_tasks.py::test_a_job_of_tasks_with_a_server")
SERVERS = By(
    "tests/servers/test_dedicated.py::test_training_has_the_bits_of_a_job_without_servers_and_moves_what_table_1_says"
)
SERVER_BY_HAND = By(
    "tests/servers/test_dedicated.py::test_servers_that_are_started_by_hand_serve_workers_that_something_else_starts"
)
REPLAYS = By("tests/elastic/test_replays.py::test_a_run_that_lost_one_and_took_one_in_is_repeated_to_the_same_bits")
METRICS = By("tests/metrics/test_metered_jobs.py::test_the_page_s_commands")
TRACES = By("tests/trace_report/test_recorded.py::test_the_page_s_commands")
WATCHED = By("tests/live/test_top.py::test_a_job_that_was_told_where_is_shown")
UNCHANGED = By("tests/ddp/test_unchanged_programs.py::test_a_program_ends_with_the_parameters_that_it_has_under_gloo")
DDP_OF_MPIRUN = By("tests/launchers/test_mpirun.py::test_penstock_run_lets_programs_for_ddp_train")
DDP_OF_SLURM = By("tests/launchers/test_slurm.py::test_penstock_run_lets_programs_for_ddp_train")
WHEEL = By("tests/packages/test_wheel.py::test_a_new_user_needs_the_wheel_alone")
FRAMEWORKS = "tests/integrations/test_frameworks.py::test_"
HUGGING_FACE = By(f"{FRAMEWORKS}hugging_face_trains_under_penstock_run_as_on_gloo")
NO_TORCHVISION = {"vgg19": "lab:vgg19"}  # tests/cost/test_explain.py has a torchvision
IMAGES = {"DIR": "../shared/data/cifar10"}
C10D = "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id run1"
CLUSTER = Not("takes a cluster: tests/launchers/test_kubernetes.py checks the files, and runs what is in them")

TABLE = {
    # README and the several hosts
    'python -c "import secrets; print(secrets.token_hex(32))" > secret': By(
        "tests/test_listings.py::test_readme_s_commands_for_several_hosts"
    ),
    'export PENSTOCK_SECRET="$(cat secret)"': By("tests/test_listings.py::test_readme_s_commands_for_several_hosts"),
    "torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr HOST0 --master-port 29500 train.py": By(
        "tests/test_listings.py::test_readme_s_commands_for_several_hosts"
    ),
    "torchrun --nproc-per-node 4 train.py": Run(put=ALONE, long=True),
    "python train.py": By("tests/test_listings.py::test_readme_s_integration"),
    "torchrun --nproc-per-node N": By("tests/test_listings.py::test_readme_s_commands_for_several_hosts"),
    "pip install penstock": WHEEL,
    "pip install dist/penstock-*.whl": WHEEL,
    'pip install "penstock[demo]"': WHEEL,
    "pip install .": By("tests/packages/test_wheel.py::test_the_sdist_is_what_git_has_and_builds"),
    "pip install torchvision": Not("changes the environment"),
    "pip install mpich": Not("changes the environment"),
    "pip install penstock[checkpoint]": Not("changes the environment"),
    "pip install penstock[metrics]": Not("changes the environment"),
    "pip install penstock[report]": Not("changes the environment"),
    "pip install penstock[top]": Not("changes the environment"),
    "pip install mpi4py mpich": Not("changes the environment"),
    "pip install penstock[lightning]": Not("changes the environment"),
    "pip install penstock[ray]": Not("changes the environment"),
    "mpirun -x PENSTOCK_SECRET": Not("takes OpenMPI"),
    # launchers
    f"torchrun {C10D} train.py": By(
        "tests/launchers/test_torchrun_hosts.py::test_two_lines_under_torchrun_on_two_hosts"
    ),
    f"PENSTOCK_REPLACE_DDP=1 torchrun {C10D} train_ddp.py": By(
        "tests/launchers/test_torchrun_hosts.py::test_a_ddp_program_under_torchrun_on_two_hosts"
    ),
    "mpirun -n 4 python train.py": By("tests/launchers/test_mpirun.py::test_two_lines_on_one_machine"),
    "mpirun -n 4 penstock run train_ddp.py": DDP_OF_MPIRUN,
    "mpirun penstock run train_ddp.py": DDP_OF_MPIRUN,
    "srun penstock run train_ddp.py": DDP_OF_SLURM,
    "srun --nodes 2 --ntasks 8 penstock run train_ddp.py": DDP_OF_SLURM,
    "mpirun -hosts node1:4,node2:4 -n 8 -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 python train.py": By(
        "tests/launchers/test_mpirun.py::test_two_hosts"
    ),
    "mpirun --host node1:4,node2:4 -n 8 -x PENSTOCK_SECRET -x MASTER_ADDR=node1 -x MASTER_PORT=29500 "
    "python train.py": By("tests/launchers/test_mpirun.py::test_two_hosts"),
    "srun --nodes 2 --ntasks 8 python train.py": By("tests/launchers/test_slurm.py::test_two_lines_on_two_nodes"),
    "srun penstock run --servers 2 train.py": By(
        "tests/launchers/test_slurm.py::test_penstock_run_makes_the_last_task_a_server"
    ),
    "srun --export=NONE": Not("is what goes wrong"),
    f"srun --nodes 2 --ntasks-per-node 1 torchrun {C10D} train_ddp.py": By(
        "tests/launchers/test_slurm.py::test_torchrun_on_each_node_with_a_ddp_program"
    ),
    "kubectl create secret generic penstock-train --from-literal=secret=$(openssl rand -hex 32)": CLUSTER,
    "kubectl apply -f examples/kubernetes/job.yaml": CLUSTER,
    "kubectl apply --server-side -f examples/kubernetes/runtime.yaml": CLUSTER,
    "kubectl apply -f examples/kubernetes/trainjob.yaml": CLUSTER,
    "apt-get install iproute2 util-linux mpich openmpi-bin slurmctld slurmd slurm-client munge": Not(
        "changes the machine"
    ),
    # CONTRIBUTING
    "python -m pytest FILE": Run(put={"FILE": "tests/measure/test_links.py"}),
    ".ci/run": Not("runs all tests, of which this is one"),
    "cargo update --workspace": Not("changes Cargo.lock, when the version has changed"),
    # penstock
    "python -m penstock": NAMED,
    "penstock demo": Run(long=True),
    "penstock demo --help": Run(),
    "penstock demo --workers 2 --epochs 5": Run(long=True),
    "penstock demo --data DIR --epochs 1": Run("--workers 2", put=IMAGES, long=True),
    "penstock demo --json > result.json": Run("--workers 2 --epochs 1", long=True),
    "python -m penstock.demo.worker DIRECTORY RANK": By("tests/demo/test_cli.py::test_a_short_demo"),
    "penstock info": Run(),
    "penstock info --json": Run(),
    "penstock run": NAMED,
    "penstock server": NAMED,
    "penstock run --workers 4 --servers 2 train.py": SERVERS,
    "penstock run --workers 4 --clients 2 train.py": By(
        "tests/servers/test_groups.py::test_training_is_the_same_and_moves_what_is_promised"
    ),
    "penstock server --rank 0 --world-size 4 --servers 2 --rendezvous tcp://HOST:PORT": SERVER_BY_HAND,
    "penstock server --rank 0 --world-size 4 --servers 2 --rendezvous tcp://node1:29400": SERVER_BY_HAND,
    "penstock run --workers 4 --min 3 train.py": By(
        "tests/elastic/test_launched.py::test_a_program_goes_on_without_a_worker_that_is_killed"
    ),
    "penstock run --min 3 --max 4 train.py": By(
        "tests/elastic/test_launched.py::test_a_new_worker_comes_in_the_place_of_one_that_is_killed"
    ),
    "PENSTOCK_MEMBERSHIP_LOG=run.jsonl penstock run --min 3 --max 4 train.py": REPLAYS,
    "penstock replay": NAMED,
    "penstock replay run.jsonl": REPLAYS,
    "penstock replay run.jsonl train.py --epochs 3": REPLAYS,
    "mpirun penstock run --servers 2 train.py": By("tests/launch/test_tasks.py::test_a_job_of_tasks_with_a_server"),
    "mpirun -n 6 penstock run --servers 2 train.py": By(
        "tests/launch/test_tasks.py::test_a_job_of_tasks_with_a_server"
    ),
    "mpirun penstock run train.py": By(
        "tests/launch/test_penstock_run.py::test_a_task_of_another_launcher_becomes_the_program"
    ),
    "penstock run --keep-ddp": NAMED,
    "penstock run --nproc-per-node 4 train_ddp.py": UNCHANGED,
    "penstock run --keep-ddp --nproc-per-node 4 train_ddp.py": UNCHANGED,
    "penstock run --nproc-per-node 4 train.py --epochs 3": By(
        "tests/launch/test_penstock_run.py::test_workers_find_their_place_and_their_output_is_told_apart"
    ),
    "penstock run --hosts hosts.txt --nproc-per-node 2 train.py": By(
        "tests/launch/test_hosts.py::test_a_job_on_two_hosts_needs_nothing_else"
    ),
    "penstock run --hosts hosts.txt --clients auto train.py": By(
        "tests/servers/test_groups.py::test_the_grouping_that_is_chosen_is_the_faster_one"
    ),
    "penstock run --hosts hosts.txt --workers 6 train.py": By(
        "tests/launch/test_where_workers_run.py::test_ranks_go_up_host_by_host"
    ),
    "penstock run --nnodes 2 --node-rank 0 --master-addr node1 --master-port 29500 train.py": By(
        "tests/launch/test_penstock_run.py::test_a_launcher_on_each_host"
    ),
    "srun penstock run train.py": By(
        "tests/launch/test_penstock_run.py::test_a_task_of_another_launcher_becomes_the_program"
    ),
    "python -m penstock.launch.agent": By(
        "tests/launch/test_penstock_run.py::test_nothing_is_left_of_a_launcher_that_is_killed"
    ),
    "penstock explain": NAMED,
    "penstock explain --json": NAMED,
    "penstock explain MODEL --workers 8 --batch 32": Run(put=MODEL),
    "penstock explain MODEL --collective-schemes": Run(put=MODEL),
    "penstock explain MODEL --policy paper": Run(put=MODEL),
    "penstock explain vgg19": Run(put=NO_TORCHVISION),
    "penstock explain lab:vgg19": Run(),
    "penstock explain lab:vgg19 --workers 8": Run(),
    "penstock explain lab:vgg19 --workers 8 --servers 2": Run(),
    "penstock explain lab:vgg19 --workers 8 --per-host 4 --groups host": Run(),
    "penstock explain lab:vgg19 --bandwidth-mbit 50 --mode diloco --sync-every 30 --wire int8": Run(),
    "penstock explain lab:vgg19 --workers 4 --bandwidth-mbit 50 --mode diloco --sync-every 30 --wire int8": Run(),
    "penstock explain vgg19 --workers 8 --per-host 4 --groups host": Run(put=NO_TORCHVISION),
    "penstock explain MODEL --workers W --servers S": Run(put=MODEL | {" W ": " 4 ", " S": " 2"}),
    "penstock explain lab:vgg19 --workers 8 --policy paper": Run(),
    "penstock explain vgg19 --workers 8 --batch 32": Run(put=NO_TORCHVISION),
    "penstock explain vgg19 --workers 8 --compute-s 0.9 --json": Run(put=NO_TORCHVISION),
    "penstock explain vgg19 --lossy 'classifier*=1bit' --lossy '*=dgc:0.001'": Run(
        put=NO_TORCHVISION | {"classifier*": "fc*"}
    ),
    "penstock explain mycode.nets:make_model --workers 4": Run(),
    "PENSTOCK_TRACE=traces penstock run --workers 4 train.py": TRACES,
    "PENSTOCK_METRICS=9400 penstock run --nproc-per-node 4 train.py": METRICS,
    "penstock trace": NAMED,
    "penstock trace merge": NAMED,
    "penstock trace merge traces -o trace.json.gz": TRACES,
    "penstock trace merge traces --json > summary.json": TRACES,
    "penstock trace merge traces -o trace.json --kineto 3=profile.json": By(
        "tests/tracing/test_traced_jobs.py::test_a_profile_that_says_no_rank_is_left_out_or_given_one"
    ),
    "python -m benchmarks.lateness": NAMED,
    "python -m benchmarks.lateness [--json-lines docs/benchmarks/lateness.jsonl]": Run(
        "--pairs 1 --models '400 tensors of 1 K'", long=True, status=JUDGED
    ),
    "penstock report": NAMED,
    "penstock report traces -o report.html": TRACES,
    "penstock report traces --json > report.json": TRACES,
    "PENSTOCK_STATUS=status penstock run --workers 4 train.py": WATCHED,
    "penstock top": NAMED,
    "penstock top status": By(
        "tests/live/test_top.py::test_in_a_terminal_it_goes_on_until_the_job_has_ended_and_leaves_a_table"
    ),
    "penstock top status --once": WATCHED,
    "penstock top status --json": WATCHED,
    "python -m benchmarks.traces": NAMED,
    "python -m benchmarks.traces [--json-lines docs/benchmarks/traces.jsonl]": Run(
        "--pairs 1 --models '400 tensors of 1 K'", long=True, status=JUDGED
    ),
    "python -m benchmarks.metrics": NAMED,
    "python -m benchmarks.metrics [--json-lines docs/benchmarks/metrics.jsonl]": Run(
        "--pairs 1 --models '400 tensors of 1 K'", long=True, status=JUDGED
    ),
    "penstock measure": NAMED,
    "penstock measure line-rate": NAMED,
    "penstock measure line-rate --local 4": Run(long=True),
    "penstock measure line-rate --plot rates.png --json > rates.json": Run(f"--local 2 {LINKS}"),
    "penstock measure line-rate --rank 0 --world-size 4 --rendezvous tcp://HOST:PORT": Run(LINKS, put=BY_HAND, hosts=2),
    "torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock measure line-rate": Run(
        LINKS, put=AS_HOSTS, hosts=2, long=True
    ),
    "torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock measure line-rate --plot rates.png": Run(
        LINKS, put=AS_HOSTS, hosts=2, long=True
    ),
    "penstock measure allreduce": NAMED,
    "penstock measure allreduce --local 4 --sizes 64KB,8MB": Run(long=True),
    "penstock measure allreduce --rank 0 --world-size 8 --rendezvous tcp://HOST:PORT": Run(
        SUMS, put=BY_HAND, hosts=2, long=True
    ),
    "penstock measure allreduce --workers 2,4,8 --plot allreduce.png --json-lines allreduce.jsonl": Run(
        f"--local 8 {SUMS}", long=True
    ),
    "penstock measure allreduce --workers 2,4,8 --sizes 4KB,1MB,53MB --plot FILE": Run(
        f"--local 8 {SUMS}", put={"FILE": "file.png"}, long=True
    ),
    "torchrun --nnodes 8 --nproc-per-node 1 ... -m penstock measure allreduce": Run(
        SUMS, put=AS_HOSTS, hosts=2, long=True
    ),
    "torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock measure allreduce --plot allreduce.png "
    "--json-lines allreduce.jsonl": Run(SUMS, put=AS_HOSTS, hosts=2, long=True),
    # docs/algorithms.md: the program that follows it
    "torchrun --nproc-per-node 4": By("tests/test_listings.py::test_what_the_coordinator_answers"),
    # examples
    "torchrun --nproc-per-node 4 examples/minimal.py": Run(put=ALONE, long=True),
    "python examples/minimal.py": By("tests/test_examples.py::test_minimal"),
    "torchrun --nproc-per-node 4 examples/char_lm.py --batch 8": Run("--steps 2 --every 1", put=ALONE, long=True),
    "python examples/char_lm.py --batch 32": Run("--steps 2 --every 1", long=True),
    "torchrun --nproc-per-node 4 examples/cifar10.py --batch 100": Run("--epochs 1", put=ALONE, long=True),
    "python examples/cifar10.py --batch 400": Run("--epochs 1", long=True),
    "torchrun --nproc-per-node 4 examples/kvstore.py": Run(put=ALONE, long=True),
    "python examples/kvstore.py": By("tests/test_examples.py::test_kvstore_ends_alike_with_any_number_of_workers"),
    "torchrun --nproc-per-node 4 examples/local_updates.py": Run(put=ALONE, long=True),
    "python examples/local_updates.py": By("tests/test_examples.py::test_local_updates_learn_and_go_on"),
    "torchrun --nproc-per-node 4 examples/asynchronous.py": Run(put=ALONE, long=True),
    "python examples/asynchronous.py": By("tests/test_examples.py::test_asynchronous_says_how_late_gradients_were"),
    "torchrun --nproc-per-node 4 examples/elastic_averaging.py": Run(put=ALONE, long=True),
    "python examples/elastic_averaging.py": By("tests/test_examples.py::test_elastic_averaging_ends_at_its_centre"),
    # frameworks, which `make test-integrations` has
    "torchrun --nproc-per-node 2 examples/with_lightning.py": By(
        f"{FRAMEWORKS}lightning_trains_with_our_strategy_as_with_ddp_on_gloo"
    ),
    "penstock run --nproc-per-node 2 examples/with_accelerate.py": HUGGING_FACE,
    "penstock run --nproc-per-node 2 examples/with_trainer.py": HUGGING_FACE,
    "python examples/with_ray.py": By(f"{FRAMEWORKS}ray_trains_on_two_nodes_as_on_gloo"),
    "torchrun --nproc-per-node 4 examples/with_fsdp.py": By(
        f"{FRAMEWORKS}fsdp_averages_replicas_as_its_own_hsdp_on_gloo"
    ),
    # benchmarks: a page names some, and their own text says how they are called
    "python -m benchmarks.allreduce [--json-lines docs/benchmarks/allreduce.jsonl]": Run(
        FEW_SUMS, clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.allreduce --arms book encrypted-book": Run(FEW_SUMS, clusters=True, long=True, status=JUDGED),
    "python -m benchmarks.allreduce --mbit 1000 --hosts 4 --megabytes 53": Run(
        FEW_SUMS, clusters=True, needs=("iperf3",), long=True, status=JUDGED
    ),
    "python -m benchmarks.checkpoint": NAMED,
    "python -m benchmarks.checkpoint [--json-lines docs/benchmarks/checkpoint.jsonl]": Run(
        "--workers 2 --compute-s 0.01 --every 3 --blocks 1", long=True, status=JUDGED
    ),
    "python -m benchmarks.checkpoint --mbit 1000": Run(
        "--workers 2 --compute-s 0.01 --every 3 --blocks 1", clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.cifar10_curve": NAMED,
    "python -m benchmarks.cifar10_curve --data DIR": Run("--epochs 1 --runs 2 1", put=IMAGES, long=True),
    "python -m benchmarks.cifar10_curve --draw": Run(),
    "python -m benchmarks.churn --data DIR [--json-lines docs/benchmarks/churn.jsonl]": Run(
        "--epochs 1 --kinds undisturbed", put=IMAGES, clusters=True, long=True
    ),
    "python -m benchmarks.collectives": NAMED,
    "python -m benchmarks.collectives run": Run(
        "--hosts 2 --sizes 4KB --algorithms store --seconds 0.1", clusters=True, long=True
    ),
    "python -m benchmarks.collectives run --hosts 4 --json-lines docs/benchmarks/collectives/1000.jsonl": Run(
        "--sizes 4KB --seconds 0.1", clusters=True, long=True
    ),
    "python -m benchmarks.collectives slow-host": Run("--sizes 4KB", clusters=True, long=True),
    "python -m benchmarks.collectives even-hosts": Run("--sizes 4KB", clusters=True, long=True),
    "python -m benchmarks.collectives report": Run(),
    "python -m benchmarks.convergence": NAMED,
    "python -m benchmarks.convergence --data DIR": Run(
        '--steps 2 --kinds exact "one process"', put=IMAGES, long=True, status=JUDGED
    ),
    "python -m benchmarks.convergence --draw": Run(),
    "python -m benchmarks.device [--json-lines docs/benchmarks/device.jsonl]": Run(
        "--device cpu --models 'GPT of 0.9 M, batch 2 x 64' --ranks 2 --mbit none --blocks 2 --steps 2",
        clusters=True,
        long=True,
        status=(0, 1),
    ),
    "python -m benchmarks.device_sums [--json-lines docs/benchmarks/device_sums.jsonl]": Run(
        "--device cpu --ranks 2 --megabytes 1 --rounds 2", clusters=True, long=True, status=(0, 1)
    ),
    "python -m benchmarks.drift": NAMED,
    "python -m benchmarks.drift [--json-lines docs/benchmarks/drift.jsonl]": Run(
        "--workers 2 --models perceptron", long=True, status=JUDGED
    ),
    "python -m benchmarks.load_balance": Run(
        "--hosts 2 --width 0.1 --steps 1", clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.load_balance --draw": Run(),
    "python -m benchmarks.local_quality characters [--json-lines docs/benchmarks/local_quality.jsonl]": Run(
        '--steps 2 --seeds 0 --arms synchronous "diloco, every 30"', long=True, status=JUDGED
    ),
    "python -m benchmarks.local_quality images --mbit 50 --data DIR": Run(
        '--steps 2 --seeds 0 --arms synchronous "async, staleness 4"', put=IMAGES, clusters=True, long=True
    ),
    "python -m benchmarks.local_quality --draw FILE": By(
        "tests/lab/test_benchmarks.py::TestLocalQuality::test_quality_of_local_updates_is_judged_by_seed"
    ),
    "python -m benchmarks.local_speed": NAMED,
    "python -m benchmarks.local_speed [--json-lines docs/benchmarks/local_speed.jsonl]": Run(
        '--repetitions 1 --mbit 1000 --step-ms 100 --sync-every 4 --fragments 2 --delay 1 --arms "DiLoCo, streaming"',
        clusters=True,
        long=True,
        status=JUDGED,
    ),
    "python -m benchmarks.membership [--json-lines docs/benchmarks/membership.jsonl]": Run(
        "--repetitions 1 --compute-s 0.1", clusters=True, long=True, status=(0, 1)
    ),
    "python -m benchmarks.overhead [--json-lines docs/benchmarks/overhead.jsonl]": Run(
        "--pairs 2 --only time", long=True, status=JUDGED
    ),
    "python -m benchmarks.priority [--json-lines docs/benchmarks/priority.jsonl]": Run(
        "--trials 1 --megabytes 20", clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.ddp_programs": NAMED,
    "python -m benchmarks.ddp_programs --mbit 1000": Run(ONE_PROGRAM, clusters=True, long=True, status=JUDGED),
    "python -m benchmarks.ddp_programs [--json-lines docs/benchmarks/ddp_programs.jsonl]": Run(
        ONE_PROGRAM, clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.sites [--json-lines docs/benchmarks/sites.jsonl]": Run(
        "--repetitions 1 --steps 1 --sync-every 2", clusters=True, long=True, status=(0, 1)
    ),
    "python -m benchmarks.small_tensors": NAMED,
    "python -m benchmarks.small_tensors --mbit 1000": Run(FEW_SMALL_STEPS, clusters=True, long=True, status=JUDGED),
    "python -m benchmarks.small_tensors [--json-lines docs/benchmarks/small_tensors.jsonl]": Run(
        FEW_SMALL_STEPS, clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.tensor_collectives run": NAMED,
    "python -m benchmarks.tensor_collectives run [--json-lines docs/benchmarks/tensors/tensors.jsonl]": Run(
        FEW_TENSORS, clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.tensor_collectives run --json-lines docs/benchmarks/tensors/tensors.jsonl": Run(
        FEW_TENSORS, clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.tensor_collectives report": By(
        "tests/lab/test_benchmarks.py::TestTensorCollectives::test_page_and_picture_are_what_the_records_give"
    ),
    "python -m benchmarks.update_memory": NAMED,
    "python -m benchmarks.update_memory [--json-lines docs/benchmarks/update_memory.jsonl]": Run(
        "--workers 2 --millions 3 --steps 2 --rounds 1 --clip", long=True, status=JUDGED
    ),
    "python -m benchmarks.update_memory --mbit 1000": Run(
        "--workers 2 --millions 3 --steps 2 --rounds 1", clusters=True, long=True, status=JUDGED
    ),
    "python -m benchmarks.wire": NAMED,
    "python -m benchmarks.wire [--json-lines docs/benchmarks/wire.jsonl]": Run(
        "--pairs 1 --seconds 0.5", clusters=True, needs=("iperf3",), long=True, status=JUDGED
    ),
    "python -m benchmarks.wire_types": NAMED,
    "python -m benchmarks.wire_types [--json-lines docs/benchmarks/wire_types.jsonl]": Run("--workers 2", long=True),
    "python -m benchmarks.whole_steps [--json-lines docs/benchmarks/whole_steps.jsonl]": Run(
        "--pairs 2 --workers 2", long=True, status=JUDGED
    ),
    # the lab
    "python -m lab": NAMED,
    "python -m lab list": Run(),
    "python -m lab run": NAMED,
    "python -m lab run SCENARIO": NAMED,
    "python -m lab run SCENARIO ...": NAMED,
    "python -m lab run my.toml --output FOLDER": By(
        "tests/lab/test_run.py::test_what_a_run_writes_also_of_a_system_that_fails"
    ),
    "python -m lab run resnet50-1000": Run(
        "--repetitions 1 --systems penstock", clusters=True, needs=("iperf3",), long=True
    ),
    "python -m lab report": Run(long=True, status=JUDGED),
    "python -m lab report --json FILES...": Run(
        put={"FILES...": "docs/benchmarks/lab/resnet50-1000.jsonl"}, status=JUDGED
    ),
    "python -m lab.peers install": Not("installs 3 GB: tests/lab/test_peers.py installs a small one"),
    "python -m lab.peers install [NAME ...]": Not("installs 3 GB: tests/lab/test_peers.py installs a small one"),
    "python -m lab.peers install mpich": Not("installs from an index: tests/lab/test_peers.py installs a small one"),
    "python -m lab.peers list [--json]": Run(),
    "python -m lab.systems.NAME SPEC.json": Not("the lab starts it with a pipe: tests/lab/test_worker.py"),
    "python -m MODULE SPEC.json": Not("the lab starts it with a pipe: tests/lab/test_worker.py"),
    "apt-get install iproute2 util-linux iperf3": Not("changes the machine"),
}


def quoted(text):
    """The commands between backquotes, also those that go on in the next line."""
    spans = (" ".join(span.split()) for _, span in QUOTED.findall(text))
    yield from (span for span in spans if re.match(COMMAND, span))


def of_a_page(text):
    """What is in its code blocks for a shell, in indented ones, and between backquotes."""
    for language, body in FENCED.findall(text):
        if language == "sh":
            yield from (line for line in body.splitlines() if line.strip())
    text = FENCED.sub("", text)
    yield from re.findall(rf"^    ({COMMAND}.*)$", text, re.MULTILINE)
    yield from quoted(text)


def of_a_module(source):
    """What its strings (docstrings, help, messages) have between backquotes, indented, or with words beside it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(rf"^( {{2,}}{COMMAND}.*|{COMMAND}.* {{2,}}\S.*)$", node.value, re.MULTILINE)
            yield from quoted(node.value)


@functools.cache
def collected():
    """Where each command is given. Not when this file is read: whoever collects tests would wait for it."""
    found = {}
    for patterns, commands_of in ((PAGES, of_a_page), (MODULES, of_a_module)):
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
            for line in commands_of(path.read_text(encoding="utf-8")):
                command = re.split(r"\s+# | {2,}", line.strip())[0]
                found.setdefault(re.sub(PREFIX, "", command), set()).add(str(path.relative_to(ROOT)))
    return found


RUNS = [
    pytest.param(command, entry, id=command, marks=[pytest.mark.long] if entry.long else [])
    for command, entry in TABLE.items()
    if isinstance(entry, Run)
]


def test_every_command_is_in_the_table_and_every_entry_is_given_somewhere():
    given = {command: sorted(where) for command, where in collected().items() if not command.startswith("make ")}
    assert {command: where for command, where in given.items() if command not in TABLE} == {}
    assert sorted(command for command in TABLE if command not in given) == []


@pytest.mark.parametrize(
    ("kind", "text", "command"),
    [
        (of_a_page, "```sh\nanything --new   # why\n```\n", "anything --new   # why"),
        (of_a_page, "text\n\n    torchrun new.py\n", "torchrun new.py"),
        (of_a_page, "says `sudo penstock\nnew --all` so\n", "sudo penstock new --all"),
        (of_a_module, '"""Title.\n\n    python examples/new.py\n"""\n', "    python examples/new.py"),
        (of_a_module, '"""Title.\n\npython examples/new.py   # alone\n"""\n', "python examples/new.py   # alone"),
        (of_a_module, 'raise ValueError(f"run `make new` for {x}")\n', "make new"),
    ],
)
def test_a_new_command_is_noticed(kind, text, command):
    assert list(kind(text)) == [command]


def test_values_and_other_languages_are_no_commands():
    text = "```toml\nmake new\n```\n\n`penstock = { lanes = 1 }`, `lab` and\nmake no mistake\n"
    assert list(of_a_page(text)) == []


def test_make_has_the_targets():
    for command in sorted(command for command in collected() if command.startswith("make ")):
        done = subprocess.run(
            ["bash", "-c", command.replace("make ", "make --dry-run ", 1)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize("entry", sorted({entry.test for entry in TABLE.values() if isinstance(entry, By)}))
def test_the_other_test_exists(entry):
    path, *_, name = entry.split("::")  # with a class between, or without
    assert re.search(rf"^( *def {name}\(|{name} = )", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository, in which commands may write, with what their texts take for granted beside it."""
    place = tmp_path_factory.mktemp("commands") / "penstock"
    place.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    shutil.copy(place / "examples" / "minimal.py", place / "train.py")
    (place / "mycode").mkdir()
    (place / "mycode" / "nets.py").write_text(
        "from torch import nn, zeros\n\n\ndef make_model():\n    return nn.Linear(8, 4), zeros(1, 8)\n"
    )
    return place


@pytest.fixture(scope="module")
def data(checkout):
    """Small data sets where programs look for the large ones."""
    folder = checkout.parent / "shared" / "data"
    (folder / "tinyshakespeare").mkdir(parents=True)
    (folder / "tinyshakespeare" / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "cifar10").mkdir()
    pytest.importorskip("pyarrow")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tests" / "demo" / "test_data.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for split, count in (("train", 800), ("test", 100)):
        labels = [index % 10 for index in range(count)]
        pictures.write_parquet(folder / "cifar10" / f"{split}-00000-of-00001.parquet", labels, edge=32)


def environment(checkout, hosts):
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TORCHELASTIC_"))}
    path = f"{Path(sys.executable).parent}:{mine.get('PATH', '')}"
    secret = {"PENSTOCK_SECRET": "what several hosts are given"} if hosts > 1 else {}
    return {**mine, "PATH": path, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", **secret}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(command, **options):
    """By an interpreter that has imported PyTorch (`programs`); by a shell what one must read, and other programs."""
    program, *arguments = shlex.split(command)
    if program in INTERPRETED and not OF_A_SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", command)):
        return programs.start(*INTERPRETED[program], *arguments, **options)
    return subprocess.Popen(["bash", "-euo", "pipefail", "-c", command], text=True, **options)


def ran(commands, checkout):
    """Run them at the same time: status and output of each."""
    running = [
        started(
            command,
            cwd=checkout,
            env=environment(checkout, len(commands)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
                process.communicate()
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def test_what_is_long_goes_on_when_a_part_has_failed():
    done = subprocess.run([ROOT / ".ci" / "long", "no-such-part", "help"], capture_output=True, text=True, check=False)
    *_, title, failed, good = done.stdout.splitlines()
    assert (title, done.returncode) == ("== summary", 1)
    assert failed.split()[:2] == ["no-such-part", "FAILED"] and good.split()[:2] == ["help", "ok"]


OF_TORCHRUN = re.compile(r"^[EW]\d{4} \S+ \d+ torch/distributed/elastic/.*$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "entry"), RUNS)
def test_it_runs(command, entry, checkout, request):
    from lab.cluster import Cluster, Unavailable, need

    try:
        for program in entry.needs:
            need(program, f"install {program}")
        if entry.clusters:
            Cluster(2).close()
    except Unavailable as error:
        pytest.skip(str(error))
    if entry.long:
        request.getfixturevalue("data")
    command = re.sub(r"[][]", "", command)  # optional words are given
    for word, mine in entry.put.items():
        command = command.replace(word, mine)
    command = f"{command} {entry.more}".replace("{port}", str(free_port()))
    done = ran([command.replace("{host}", str(host)) for host in range(entry.hosts)], checkout)
    for status, said in done:
        assert status in entry.status, said
        # Agents of torchrun log one themselves when the host that has their store ends before they do.
        assert "Traceback" not in OF_TORCHRUN.sub("", said), said
    for file in WRITTEN.findall(command):
        assert (checkout / file).stat().st_size > 0, file
