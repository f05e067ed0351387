"""The files of examples/kubernetes/: valid by the schemas of their resources; their commands start jobs on hosts."""

import json
import shutil
import subprocess

import pytest
import real

from lab.cluster import INTERFACE

pytestmark = pytest.mark.long
FILES = sorted((real.ROOT / "examples" / "kubernetes").glob("*.yaml"))
PROGRAM = real.HERE / "kubernetes_files.py"
LIMIT_S = 120
WORKERS = 2
"""Of each node, for the four of the files: two processors do it."""
GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE}


def read(*files):
    """The documents of some files, with what is wrong with each."""
    python = real.ROOT / ".tools" / "launchers" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python.relative_to(real.ROOT)}: `make test-launchers` installs it")
    command = [str(word) for word in (python, PROGRAM, *files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def contents():
    """What the files say, by kind of resource."""
    return {document["content"]["kind"]: document["content"] for document in read(*FILES)}


def test_files_are_valid_by_the_schemas_of_their_resources():
    found = read(*FILES)
    kinds = [document["content"]["kind"] for document in found]
    assert sorted(kinds) == ["ClusterTrainingRuntime", "Job", "Service", "TrainJob"]
    assert {document["file"]: document["complaints"] for document in found if document["complaints"]} == {}


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("job.yaml", "completionMode: Indexed", "completionsMode: Indexed"),
        ("job.yaml", "completions: 2", "completions: two"),
        ("job.yaml", "                secretKeyRef:", "                secretRef:"),
        ("job.yaml", "  selector:", "  selectors:"),
        ("runtime.yaml", "numNodes: 2", "nodes: 2"),
        ("runtime.yaml", "numNodes: 2", "numNodes: two"),
        ("runtime.yaml", "                      command:", "                      commands:"),
        ("runtime.yaml", "kind: ClusterTrainingRuntime", "kind: ClusterRuntime"),
        ("trainjob.yaml", "runtimeRef:", "runtimeReference:"),
        ("trainjob.yaml", "numNodes: 3", "numberNodes: 3"),
    ],
)
def test_what_is_wrong_is_found(file, right, wrong, tmp_path):
    text = next(path for path in FILES if path.name == file).read_text(encoding="utf-8")
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong), encoding="utf-8")
    assert any(document["complaints"] for document in read(tmp_path / file))


def test_names_go_with_each_other(contents):
    """What no schema says: pods have the names that the command looks for, and both files ask for the same secret."""
    job, service, runtime = contents["Job"], contents["Service"], contents["ClusterTrainingRuntime"]
    pods, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pods["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{pods['subdomain']} " in container(job)["command"][-1]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert contents["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    asked = [
        one["valueFrom"]["secretKeyRef"]
        for one in (*container(job)["env"], *container(replicated(runtime))["env"])
        if one["name"] == "PENSTOCK_SECRET"
    ]
    assert asked == [{"name": "penstock-train", "key": "secret"}] * 2


def replicated(runtime):
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]


def container(job):
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def put(word, instead):
    """Words of the files and what stands for them here, each of which must be there once."""
    for old, new in instead.items():
        assert word.count(old) == 1, (word, old)
        word = word.replace(old, str(new))
    return word


def check_ddp(folder, tmp_path):
    """What the same program comes to with gloo, on this machine."""
    gloo = real.made(tmp_path / "gloo")
    launcher = [real.PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2 * WORKERS]
    real.run_here([*launcher, real.DDP, gloo], tmp_path)
    real.check_same(real.saved(folder), 2 * WORKERS, real.saved(gloo)[0], real.DDP_DIFFERENCE_MAX)


def test_the_job_s_command_starts_a_job_on_two_hosts(contents, tmp_path):
    *shell, line = container(contents["Job"])["command"]
    folder = real.made(tmp_path / "ours")
    with real.cluster() as cluster:
        line = put(
            line,
            {
                "--nproc-per-node 4": f"--nproc-per-node {WORKERS}",
                "penstock-train-0.penstock-train": cluster.hosts[0].name,  # known there, as a pod's name is
                "train.py": f"{real.DDP} {folder}",
            },
        )
        commands = [["env", f"JOB_COMPLETION_INDEX={index}", *shell, line] for index in range(2)]
        said = real.run_on(cluster.hosts, commands, tmp_path, **GLOO)
    assert sum(text.count(real.REPLACED) for text in said) == 1, said
    check_ddp(folder, tmp_path)


def test_the_runtime_s_command_starts_a_job_on_two_hosts(contents, tmp_path):
    """With what Kubeflow's controller tells the pods of a TrainJob."""
    node = container(replicated(contents["ClusterTrainingRuntime"]))
    folder = real.made(tmp_path / "ours")
    command = [{"4": str(WORKERS), "train.py": str(real.DDP)}.get(word, word) for word in node["command"]]
    assert shutil.which(command[0], path=real.environment()["PATH"])
    told = {one["name"]: one["value"] for one in node["env"] if "value" in one}
    with real.cluster() as cluster:
        first = cluster.hosts[0].name
        pet = ["PET_NNODES=2", "PET_NPROC_PER_NODE=auto", f"PET_MASTER_ADDR={first}", f"PET_MASTER_PORT={real.PORT}"]
        commands = [["env", *pet, f"PET_NODE_RANK={index}", *command, folder] for index in range(2)]
        said = real.run_on(cluster.hosts, commands, tmp_path, **told, **GLOO)
    assert sum(text.count(real.REPLACED) for text in said) == 1, said
    check_ddp(folder, tmp_path)
