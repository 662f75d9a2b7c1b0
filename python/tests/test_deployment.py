"""The files of deploy/ and the commands of docs/deployment.md, as far as one machine can run them.

script/deploy-check tries them under a real Slurm and in a real image.
"""

import copy
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import REPOSITORY, Programs

import libzero
from libzero import demo

DEPLOY = REPOSITORY / "deploy"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STEPS = 3


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """deploy/train.py"""
    spec = importlib.util.spec_from_file_location("deploy_train", DEPLOY / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected(program: ModuleType) -> Callable[[int], str]:
    """What deploy/train.py prints on N ranks: by threads of this process, without a launcher."""

    def of(ranks: int) -> str:
        models = [demo.model() for _ in range(ranks)]

        def body(comm: libzero.Communicator) -> str:
            engine = libzero.Engine(models[comm.rank], demo.config(3, 4), comm=comm)
            text: str = program.train(engine, STEPS)
            return text

        return libzero.run_ranks(ranks, body)[0]

    return of


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without a launcher's variables; this host's name may be one that does not resolve."""
    variables = Programs(tmp_path).environment()
    for name in [name for name in variables if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "PET_"))]:
        del variables[name]
    return {**variables, "PET_LOCAL_ADDR": "127.0.0.1", "ZERO_TIMEOUT_S": "60"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def on_all(commands: list[list[str]], environments: list[dict[str, str]]) -> str:
    """Runs one command for each host, at once, and returns what they printed, ordered by host."""
    started = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, variables in zip(commands, environments, strict=True)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), ended
    return "".join(out for out, _ in ended)


def page_commands(first: str) -> list[str]:
    """The commands of docs/deployment.md whose first word this is."""
    blocks = re.findall(r"```sh\n(.*?)```", (REPOSITORY / "docs" / "deployment.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line for line in lines if line.startswith(first + " ")]


def as_tried(command: list[str], more: list[str]) -> list[str]:
    """The command with this interpreter's torchrun, the repository's program and three steps."""
    assert command[0] == "torchrun"
    words = [str(DEPLOY / "train.py") if word.endswith("train.py") else word for word in command[1:]]
    return [*TORCHRUN, *words, *more, "--steps", str(STEPS)]


# ---- torchrun ----
@pytest.mark.nightly
def test_torchrun_on_one_host(environment: dict[str, str], expected: Callable[[int], str]) -> None:
    (command,) = [text for text in page_commands("torchrun") if "--standalone" in text]
    words = as_tried(shlex.split(command), [])
    assert on_all([words], [environment]) == expected(2) + "\n"


@pytest.mark.nightly
def test_torchrun_on_two_hosts(
    environment: dict[str, str], expected: Callable[[int], str], tmp_path: Path
) -> None:
    (command,) = [text for text in page_commands("torchrun") if "--nnodes 2" in text]
    assert "w0:29400" in command
    words = as_tried(shlex.split(command.replace("w0:29400", f"127.0.0.1:{free_port()}")), [])
    secret = tmp_path / "token"
    secret.write_text("1" * 64 + "\n")
    secret.chmod(0o600)
    with_secret = {**environment, "ZERO_TOKEN_FILE": str(secret)}
    assert on_all([words, words], [with_secret, with_secret]) == expected(4) + "\n"


# ---- Slurm ----
@pytest.mark.nightly
def test_the_slurm_job_starts_ranks(
    environment: dict[str, str], expected: Callable[[int], str], tmp_path: Path
) -> None:
    """With a stand-in for srun that sets what a step on one host sets. script/slurm-check has the real one."""
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n[ ${#ZERO_TOKEN} = 64 ] || exit 9\n'
        'for id in 0 1; do SLURM_PROCID=$id SLURM_LOCALID=$id "$@" & pids="$pids $!"; done\n'
        "for pid in $pids; do wait $pid || exit; done\n"
    )
    srun.chmod(0o755)
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "1",
        "PATH": f"{tmp_path}:{environment['PATH']}",
    }  # fmt: skip
    job = ["bash", str(DEPLOY / "slurm.sbatch")]
    words = [*job, sys.executable, str(DEPLOY / "train.py"), "--steps", str(STEPS)]
    assert on_all([words], [{**environment, **step}]) == expected(2) + "\n"
    no_program = subprocess.run(job, env={**environment, **step}, capture_output=True, text=True)
    assert no_program.returncode == 2 and "got no program" in no_program.stderr


# ---- Kubernetes ----
def job_file() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "pytorchjob.yaml").read_text())
    return job


def faults(job: dict[str, Any]) -> list[str]:
    """By the schema of PyTorchJob and of pods that script/pytorchjob-schema writes."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "pytorchjob-schema.json").read_text())
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


def test_the_job_is_one_by_the_schema() -> None:
    assert faults(job_file()) == []


def wrong_files() -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    yield "'kubeflow.org/v1' was expected", lambda job, pod: job.update(apiVersion="kubeflow.org/v2")
    yield "'pytorchReplicaSpecs' is a required property", lambda job, pod: job["spec"].pop("pytorchReplicaSpecs")
    yield "'Workers' is not one of", lambda job, pod: job["spec"]["pytorchReplicaSpecs"].update(Workers={})
    yield "'rdzv_backend' was unexpected", lambda job, pod: job["spec"]["elasticPolicy"].update(rdzv_backend="c10d")
    yield "'2' is not of type 'integer'", lambda job, pod: job["spec"]["elasticPolicy"].update(minReplicas="2")
    yield "'containers' is a required property", lambda job, pod: pod.pop("containers")
    yield "2 is not of type 'string'", lambda job, pod: pod["containers"][0]["command"].append(2)
    yield "'containerPort' is a required", lambda job, pod: pod["containers"][0]["ports"][0].pop("containerPort")
    yield "4 is not of type 'string'", lambda job, pod: pod["containers"][0]["env"][0].update(value=4)
    yield "'claimName' is a required property", lambda job, pod: pod["volumes"][0].update(persistentVolumeClaim={})


@pytest.mark.parametrize(("text", "break_it"), list(wrong_files()))
def test_a_wrong_job_is_refused(text: str, break_it: Callable[[Any, Any], Any]) -> None:
    job = copy.deepcopy(job_file())
    break_it(job, job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    found = faults(job)
    assert len(found) == 1 and text in found[0]


def test_the_names_that_the_operator_looks_for() -> None:
    """The schema does not know them."""
    job = job_file()
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    elastic, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == workers


@pytest.mark.nightly
def test_the_pods_of_the_job_train(
    environment: dict[str, str], expected: Callable[[int], str], tmp_path: Path
) -> None:
    """Their command, with the variables that the operator makes from elasticPolicy, on this host."""
    job = job_file()
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/checkpoints"} and "/checkpoints/libzero" in container["command"]
    command = [word.replace("/checkpoints", str(tmp_path)) for word in container["command"]]
    assert "/opt/libzero/train.py" in command, "the file that deploy/Dockerfile puts there"
    operator = {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",  # in a cluster the name of the first pod and its port
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    pods = [as_tried(command, [])] * worker["replicas"]
    out = on_all(pods, [{**environment, **operator, "ZERO_TOKEN": "a" * 64}] * len(pods))
    assert out == expected(4) + "\n"
    assert (tmp_path / "libzero" / f"step-{STEPS}").is_dir()


def test_the_operators_own_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods without torchrun have a number of the pod, and none on their host."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(libzero.ConfigError, match="LOCAL_RANK"):
        libzero.Communicator.launched()


def test_a_restarted_job_continues_from_its_checkpoint(program: ModuleType, tmp_path: Path) -> None:
    def run(steps: int, checkpoints: str) -> str:
        with libzero.Engine(demo.model(), demo.config(3, 4), comm=libzero.Communicator.local()) as engine:
            text: str = program.train(engine, steps, checkpoints)
            return text

    run(2, str(tmp_path))
    assert run(4, str(tmp_path)) == run(4, "").replace("steps 0 to 4", "steps 2 to 4")


# ---- the image ----
def test_the_dockerfile_names_what_exists() -> None:
    text = re.sub(r"\\\n|^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line]
    known = {"ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "CMD"}
    assert {name for name, _ in instructions} <= known
    stages, arguments = set(), set()
    for name, rest in instructions:
        if name == "ARG":
            arguments.add(rest.split("=")[0])
        assigned = set(re.findall(r"\b(\w+)=\$\(", rest))
        for used in re.findall(r"\$\{?(\w+)", rest):
            assert used in arguments | assigned | {"PATH"}, rest
        for stage in re.findall(r"from=(\w+)", rest):
            assert stage in stages, rest
        if name == "FROM" and " AS " in rest:
            stages.add(rest.split(" AS ")[1])
        if name == "COPY":
            assert (REPOSITORY / rest.split()[0]).exists(), rest
        for script in re.findall(r"script/\w+", rest):
            assert os.access(REPOSITORY / script, os.X_OK), rest
    assert not re.search(r"==\d", text), "versions are those of script/setup (tests/packaging_test.py)"
    assert instructions[-1][0] == "CMD" and json.loads(instructions[-1][1])[0] == "zero"
