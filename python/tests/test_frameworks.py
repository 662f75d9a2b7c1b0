"""Programs of other frameworks on two ranks, compared with the same program in one plain process.

script/setup --frameworks installs those that .deps/python has not. docs/frameworks.md has their versions.
"""

import importlib
import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Programs, find_zero, under_the_runner

for package in ("transformers", "accelerate", "peft", "diffusers"):
    pytest.importorskip(package)
PROGRAM = str(Path(__file__).parent / "frameworks_program.py")
INSTALLED = REPOSITORY / ".deps" / "frameworks" / "site-packages"
CLOSE = 1e-4

pytestmark = pytest.mark.nightly


def needs(*packages: str) -> None:
    for package in packages:
        if not (INSTALLED / package).is_dir():
            pytest.skip(f"{package} is not installed: script/setup --frameworks")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs find what script/setup --frameworks has installed, after the environment's own packages."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(Programs, "environment", with_frameworks(Programs.environment))


def with_frameworks(environment: Any) -> Any:
    def more(self: Programs) -> dict[str, str]:
        variables: dict[str, str] = environment(self)
        return {**variables, "PYTHONPATH": f"{variables['PYTHONPATH']}:{INSTALLED}"}

    return more


def plain(folder: Path, *words: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the program sees without DeepSpeed."""
    out = folder / "plain.json"
    command = [*prefix, sys.executable, PROGRAM, "--plain", "--folder", str(folder / "plain"), "--out", str(out)]
    environment = Programs(folder).environment()
    done = subprocess.run(
        [*command, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(out.read_text())
    return {name.rsplit(" ", 1)[0]: value for name, value in seen.items()}


def by_deepspeed(folder: Path, *words: str, ranks: int = 2) -> dict[str, Any]:
    """What the ranks see, by case and stage."""
    out = folder / "seen.json"
    under_the_runner(folder, PROGRAM, "--folder", str(folder / "ranks"), "--out", str(out), *words, ranks=ranks)
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def values(seen: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(seen, dict | list):
        for key, value in seen.items() if isinstance(seen, dict) else enumerate(seen):
            yield from values(value, f"{place}/{key}")
    else:
        yield place, seen


def require_same(seen: dict[str, Any], wanted: dict[str, Any], *, loose: tuple[str, ...] = ()) -> None:
    """Every number of every case and stage within CLOSE."""
    for name, value in seen.items():
        here, there = dict(values(value)), dict(values(wanted[name.rsplit(" ", 1)[0]]))
        for part in loose:
            here.pop(f"/{part}", None)
            there.pop(f"/{part}", None)
        assert here.keys() == there.keys(), name
        for place, expected in there.items():
            got = here[place]
            number = isinstance(expected, int | float) and isinstance(got, int | float)
            same = got == (pytest.approx(expected, rel=CLOSE, abs=CLOSE) if number else expected)
            assert same, f"{name}{place}: {got!r}, not {expected!r}"


def require_moved(losses: list[float]) -> None:
    assert len(losses) > 3 and len({round(loss, 5) for loss in losses}) > 3, losses


def test_one_of_each_framework(tmp_path: Path) -> None:
    """Trainer with an adapter of PEFT, Accelerate's loop, and the loop of diffusers."""
    words = ("--own", "--cases", "trainer.adapted", "accelerate.loop", "published.pictures")
    seen, wanted = by_deepspeed(tmp_path, *words), plain(tmp_path, *words)
    require_same(seen, wanted, loose=("average",))
    again, whole = seen["trainer.adapted 3"]["again"], seen["trainer.adapted 3"]["log"]
    assert all(again[step] == whole[step] for step in ("3", "4", "5")), (again, whole)  # resume is exact
    assert seen["accelerate.loop 3"]["again"]["losses"] == seen["accelerate.loop 3"]["losses"][6:]
    require_moved(seen["accelerate.loop 3"]["losses"])


def test_trainer_evaluates_saves_resumes_and_predicts(tmp_path: Path) -> None:
    words = ("--cases", "trainer.whole", "trainer.resumed", "trainer.adapted")
    seen, wanted = by_deepspeed(tmp_path, "--stages", "0", "1", "2", "3", *words), plain(tmp_path, *words)
    require_same(seen, wanted)
    for stage in range(4):
        log, again = seen[f"trainer.whole {stage}"]["log"], seen[f"trainer.resumed {stage}"]["again"]
        assert all(again[step] == log[step] for step in ("3", "4", "5"))
        assert seen[f"trainer.whole {stage}"]["best"] == "checkpoint-1"


def test_trainer_resumes_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks save; one and three resume; one resumes what three have saved."""
    words = ("--cases", "trainer.resized", "--stages", "0", "1", "2", "3")
    wanted = plain(tmp_path, "--cases", "trainer.resized")["trainer.resized"]
    for ranks, begin, end in ((2, 0, 2), (3, 2, 4), (1, 4, 5), (1, 2, 5), (3, 2, 5)):
        seen = by_deepspeed(tmp_path, *words, "--part", f"{begin}:{end}", ranks=ranks)
        for stage, model in itertools.product(range(4), ("whole", "adapter")):
            log = seen[f"trainer.resized {stage}"][model]["log"]
            expected = {step: row for step, row in wanted[model]["log"].items() if int(step) <= end}
            require_same({"log 0": log}, {"log": expected})
    require_moved([row["loss"] for row in wanted["whole"]["log"].values()])


BY_LIBZERO = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "adafactor", "rmsprop"}
BY_LIBZERO |= {"adamw_bnb_8bit", "ademamix_8bit", "lion_8bit", "paged_adamw_32bit", "rmsprop_bnb_8bit"}


def test_each_name_of_optim_trains_as_torch_or_is_refused(tmp_path: Path) -> None:
    words = ("--cases", "trainer.optimizers")
    wanted = plain(tmp_path, *words)["trainer.optimizers"]
    seen = by_deepspeed(tmp_path, "--stages", "2", *words)["trainer.optimizers 2"]
    assert seen.keys() == wanted.keys() >= BY_LIBZERO
    for name, expected in wanted.items():
        got = seen[name]
        if isinstance(expected, str):  # its package is not installed
            assert got == expected, name
        elif isinstance(got, str):
            assert "cannot take over an optimizer of class" in got and name not in BY_LIBZERO, (name, got)
        else:
            assert got == pytest.approx(expected, abs=CLOSE), name


def test_accelerate_with_a_plugin_of_the_program(tmp_path: Path) -> None:
    words = ("--own", "--cases", "accelerate.loop")
    require_same(by_deepspeed(tmp_path, "--stages", "1", "2", "3", *words), plain(tmp_path, *words))


def by_accelerate_launch(folder: Path, stage: int, block: dict[str, Any]) -> dict[str, Any]:
    """What two ranks of `accelerate launch` see: their `deepspeed` is the package that libzero.deepspeed.shim writes.

    block: the part deepspeed_config of the file that `accelerate config` writes.
    """
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    environment = Programs(folder).environment()
    environment["PYTHONPATH"] = f"{packages}:{environment['PYTHONPATH']}"
    about = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_machines": 1, "debug": False,
             "machine_rank": 0, "num_processes": 2, "use_cpu": False, "downcast_bf16": "no",
             "main_training_function": "main", "rdzv_backend": "static", "same_network": True,
             "deepspeed_config": block}  # fmt: skip
    if "deepspeed_config_file" not in block:
        about["mixed_precision"] = "no"
    (folder / "accelerate.yaml").write_text(json.dumps(about))  # which is YAML
    out = folder / "seen.json"
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
    program = [PROGRAM, "--cases", "accelerate.loop", "--stages", str(stage), "--folder", "ranks", "--out", str(out)]
    for command in (["-m", "libzero.deepspeed.shim", "--package", str(packages)], [*launch, *program]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def test_accelerate_launches_with_deepspeeds_plugin(tmp_path: Path) -> None:
    """Of the launcher's file: its keys, and a file of DeepSpeed's that it names."""
    wanted = plain(tmp_path, "--cases", "accelerate.loop")
    for stage in (1, 2, 3):
        keys = {"zero_stage": stage, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
                "offload_optimizer_device": "none", "offload_param_device": "none", "zero3_init_flag": False,
                "zero3_save_16bit_model": stage == 3, "deepspeed_multinode_launcher": "standard"}  # fmt: skip
        require_same(by_accelerate_launch(tmp_path, stage, keys), wanted)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True,
                              "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    }))  # fmt: skip
    named = {"deepspeed_config_file": str(file), "zero3_init_flag": True}
    require_same(by_accelerate_launch(tmp_path, 3, named), wanted)


def test_trl_supervised_and_preferences(tmp_path: Path) -> None:
    needs("trl", "datasets")
    words = ("--cases", "trl.sft", "trl.dpo")
    seen, wanted = by_deepspeed(tmp_path, "--stages", "2", "3", *words), plain(tmp_path, *words)
    require_same(seen, wanted)
    for stage in (2, 3):
        log, again = seen[f"trl.sft {stage}"]["log"], seen[f"trl.sft {stage}"]["again"]
        assert all(again[step] == log[step] for step in ("3", "4"))


def test_trl_rewards(tmp_path: Path) -> None:
    """Compared with torch's DistributedDataParallel, whose ranks draw the same texts."""
    needs("trl", "datasets")
    zero = find_zero()
    if zero is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    words = ("--cases", "trl.grpo")
    wanted = plain(tmp_path, *words, prefix=(zero, "run", "-n", "2"))
    require_same(by_deepspeed(tmp_path, "--stages", "2", "3", *words), wanted)
    assert len(set(wanted["trl.grpo"]["losses"])) == 4


def test_lightning_with_its_default_checkpoints(tmp_path: Path) -> None:
    needs("lightning")
    words = ("--cases", "lightning.fit")
    seen, wanted = by_deepspeed(tmp_path, "--stages", "1", "2", "3", *words), plain(tmp_path, *words)
    require_same(seen, wanted)
    for stage in (1, 2, 3):
        assert seen[f"lightning.fit {stage}"]["again"] == seen[f"lightning.fit {stage}"]["losses"][6:]


def test_lightning_tests_predicts_and_converts(tmp_path: Path) -> None:
    needs("lightning")
    words = ("--cases", "lightning.rest")
    seen, wanted = by_deepspeed(tmp_path, "--stages", "1", "2", "3", *words), plain(tmp_path, *words)
    require_same(seen, wanted)


MONITORED = """
    import json
    import deepspeed
    blocks = {name: {"enabled": True, "output_path": ".", "job_name": name} for name in ("csv_monitor", "tensorboard")}
    engine, *_ = deepspeed.initialize(
        model=network(),
        config={**config(2), "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}, **blocks,
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
                "wandb": {"enabled": True, "project": "mine", "group": "of two"},
                "comet": {"enabled": True, "online": False, "samples_log_interval": 16, "experiment_name": "mine"}},
    )
    for step in range(5):
        engine.backward(engine(batch(engine.global_rank, step).half()).float().square().mean())
        engine.step()
"""


def records_of_wandb(data: bytes) -> Iterator[bytes]:
    """Of a run's file: blocks of 32 KiB, parts with a sum of 4 bytes, a length of 2 and a kind of 1."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            yield record
            record = b""


def test_services_get_the_events_of_the_csv_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B and Comet without a network, with what they would send later."""
    needs("wandb", "comet_ml")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "COMET_OFFLINE_DIRECTORY": "comet"}.items():
        monkeypatch.setenv(name, value)
    under_the_runner(tmp_path, Programs(tmp_path).write(MONITORED))
    wanted = {}
    for name in ("lr", "loss_scale"):
        rows = [row.split(",") for row in (tmp_path / "csv_monitor" / f"Train_Samples_{name}.csv").read_text().split()]
        wanted[f"Train/Samples/{name}"] = {int(samples): float(value) for samples, value in rows[1:]}
    assert [list(each) for each in wanted.values()] == [[8, 16, 24, 32, 40]] * 2
    assert all(len(set(values.values())) > 1 for values in wanted.values())
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))

    for folder in (INSTALLED, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    wandb: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged: dict[str, dict[int, float]] = {}
    for data in records_of_wandb(file.read_bytes()):
        record = wandb.Record()
        record.ParseFromString(data)
        row = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        for name in wanted.keys() & row.keys():
            logged.setdefault(name, {})[int(row["_step"])] = float(row[name])
    assert logged == {name: pytest.approx(values) for name, values in wanted.items()}

    (archive,) = tmp_path.glob("comet/*.zip")
    sent: dict[str, dict[int, float]] = {}
    with zipfile.ZipFile(archive) as opened:
        for line in opened.read("messages.json").splitlines():
            metric = json.loads(line)["payload"].get("metric")
            if metric and metric["metricName"] in wanted:
                sent.setdefault(metric["metricName"], {})[metric["step"]] = metric["metricValue"]
    every_second = {name: {at: values[at] for at in (8, 24, 40)} for name, values in wanted.items()}
    assert sent == {name: pytest.approx(values) for name, values in every_second.items()}


def test_programs_as_they_are_published(tmp_path: Path) -> None:
    cases = ("--cases", "published.bert", "published.megatron", "published.clm", "published.pictures")
    seen, wanted = by_deepspeed(tmp_path, "--stages", "1", "2", "3", *cases), plain(tmp_path, *cases)
    require_same(seen, wanted, loose=("average",))
    for case in ("bert", "megatron"):
        require_moved(wanted[f"published.{case}"]["losses"])
        for stage in (1, 2, 3):
            assert seen[f"published.{case} {stage}"]["again"] == seen[f"published.{case} {stage}"]["losses"][6:]
    for stage in (1, 2):
        average = seen[f"published.pictures {stage}"]["average"]
        assert average == pytest.approx(wanted["published.pictures"]["average"], rel=CLOSE)
