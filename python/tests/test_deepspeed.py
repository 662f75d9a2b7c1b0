"""Programs written for DeepSpeed run over libzero, with what DeepSpeed itself was seen to do."""

import copy
import functools
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Programs, batch, config, network, nightly, no_large_files, under_the_runner, without

import libzero
import libzero.deepspeed as deepspeed
from libzero import _program
from libzero.deepspeed import _names, run
from libzero.deepspeed._refuse import Refused, listed
from libzero.deepspeed.runtime.engine import _VALUES
from libzero.deepspeed.runtime.lr_schedules import WarmupLR
from libzero.deepspeed.utils import zero_to_fp32

HERE = Path(__file__).parent
RECORD: dict[str, Any] = json.loads((HERE / f"deepspeed-{_names.VERSION}.json").read_text())
NAMES = (HERE / f"deepspeed-{_names.VERSION}.txt").read_text().split()
CASES = [case for case in RECORD if case != "huggingface"]


# Behind the program, whose ranks it uses.
PORTS = """
import os
import deepspeed_program
deepspeed_program.main()
import deepspeed
import torch
from conftest import config, network

engine, *_ = deepspeed.initialize(model=network(), config=config(3))
other = torch.distributed.new_group([0, 1])  # another device of gloo
ones = torch.ones(1)
torch.distributed.all_reduce(ones, group=other)
assert ones.item() == 2
engine.backward(engine(torch.ones(4, 8)).sum())
engine.step()
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
mine = {os.readlink(path) for path in paths if os.path.islink(path)}
for version in ("tcp", "tcp6"):
    with open(f"/proc/net/{version}") as lines:
        for line in list(lines)[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                print("listens on", fields[1].split(":")[0], flush=True)
"""


@pytest.fixture(scope="module")
def run_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the program has observed, and what was printed."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PORTS)
    out = under_the_runner(folder, str(folder / "program.py"), "--out", str(folder / "seen.json"))
    return json.loads((folder / "seen.json").read_text()), out


@pytest.fixture(scope="module")
def observed(run_of_two_ranks: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return run_of_two_ranks[0]


def compare(ours: Any, theirs: Any, where: str, tolerance: float = 1e-4) -> None:
    assert type(ours) is type(theirs) or isinstance(ours, int | float), where
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key, value in theirs.items():
            compare(ours[key], value, f"{where}/{key}", tolerance)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, value in enumerate(theirs):
            compare(ours[i], value, f"{where}[{i}]", tolerance)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=tolerance), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("case", CASES)
def test_a_program_sees_what_it_sees_with_deepspeed(case: str, observed: dict[str, Any]) -> None:
    theirs = RECORD[case]
    if case == "checkpoint":  # DeepSpeed's stage 3 keeps its shards, and with them its old weights
        theirs["3"]["weights only"] = theirs["2"]["weights only"]
    # DeepSpeed reduces gradients of linear layers in bf16 there, the engine all of them in fp32; with masters in bf16
    # DeepSpeed's update rounds more than once.
    compare(observed[case], theirs, case, {"autocast_of_some": 2e-3, "narrow_states": 5e-3}.get(case, 1e-4))


def test_torch_distributed_of_one_host_listens_on_the_loopback(run_of_two_ranks: tuple[dict[str, Any], str]) -> None:
    _, out = run_of_two_ranks
    assert out.count("listens on 0100007F") == out.count("listens on") >= 3, out  # the store, gloo of two ranks


ENDS = """
import atexit

if "PROGRAM":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from libzero import deepspeed

engine, *_ = deepspeed.initialize(model=network(), config=config(3))
engine.backward(engine(torch.ones(4, 8)).sum())
engine.step()
for moment in ("before the end", "after it"):
    print(sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")))
    atexit._run_exitfuncs()
"""


@pytest.mark.parametrize("starter", ["program", nightly("")])
def test_no_thread_of_gloo_is_left_at_the_interpreters_end(starter: str, programs: Programs) -> None:
    """A thread that frees a tensor then would need the GIL: "terminate called without an active exception"."""
    during, after = programs.run(ENDS.replace("PROGRAM", starter)).splitlines()[-2:]
    assert "gloo" in during and "gloo" not in after, (during, after)


@pytest.mark.nightly
def test_unit_tests_in_deepspeeds_pattern_pass_on_every_rank(tmp_path: Path) -> None:
    words = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(tmp_path), str(HERE / "deepspeed_unit.py")]
    out = under_the_runner(tmp_path, "--no_local_rank", "--module", "pytest", *words)
    assert out.count("12 passed") == 2, out


@pytest.mark.nightly
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    words = ["--out", str(tmp_path / "seen.json"), "--folder", str(tmp_path)]
    under_the_runner(tmp_path, str(HERE / "huggingface_program.py"), *words)
    compare(json.loads((tmp_path / "seen.json").read_text()), RECORD["huggingface"], "huggingface")


@pytest.mark.nightly
def test_embeddings_of_a_model_loaded_at_stage_3_are_resized(programs: Programs) -> None:
    pytest.importorskip("transformers")
    out = programs.run("""
        from libzero.deepspeed._under_its_name import install
        install()
        import deepspeed, transformers
        from transformers.integrations import HfDeepSpeedConfig

        folder = os.path.join(os.path.dirname(__file__), "pretrained")
        sizes = dict(vocab_size=100, n_layer=1, n_embd=32, n_head=4, n_positions=8, bos_token_id=0, eos_token_id=0)
        expected = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        expected.save_pretrained(folder)
        keep = HfDeepSpeedConfig(config(3))  # from_pretrained within zero.Init
        deepspeed.init_distributed()
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        assert hasattr(model.transformer.wte.weight, "ds_id")
        model.resize_token_embeddings(108, mean_resizing=False)
        engine, _, _, _ = deepspeed.initialize(model=model, config=config(3))
        weight = model.transformer.wte.weight
        with deepspeed.zero.GatheredParameters(weight):
            assert weight.shape == (108, 32) and model.lm_head.weight is weight
            assert torch.equal(weight[:100], expected.transformer.wte.weight)
        ids = torch.full((2, 4), 107)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        print("steps", engine.global_steps)
    """)
    assert "steps 1" in out


# ---- names ----
def owner_of(owner: str) -> Any:
    return deepspeed if owner == "deepspeed" else _attribute(deepspeed, owner.removeprefix("deepspeed."))


def _attribute(start: Any, path: str) -> Any:
    for part in path.split("."):
        start = getattr(start, part)
    return start


@pytest.fixture(scope="module")
def engine() -> deepspeed.DeepSpeedEngine:
    made, _, _, _ = deepspeed.initialize(model=network(), config=config(3))
    return made


def test_every_name_is_built_or_refused_by_name(engine: deepspeed.DeepSpeedEngine) -> None:
    for full in NAMES:
        owner, _, name = full.rpartition(".")
        place = engine if owner == "DeepSpeedEngine" else owner_of(owner)
        found = _names.reason(owner, name)
        if found is None:
            assert not isinstance(getattr(place, name), Refused), f"{full} is neither built nor refused"
        elif place is engine:
            with pytest.raises(AttributeError, match=rf"{full} is {found[0]}: .*\."):
                getattr(place, name)
            assert not hasattr(place, name)
        elif not isinstance(value := getattr(place, name), types.ModuleType):  # a module has names that refuse
            arguments = [] if isinstance(value, Refused) else [None] * len(inspect.signature(value).parameters)
            with pytest.raises(NotImplementedError, match=rf"{full} is {found[0]}: .*\."):
                value(*arguments)


def test_every_module_and_name_can_be_imported() -> None:
    """DeepSpeed's modules by their full names. What is not built refuses when it is called, in words."""
    refused = 0
    for inside, theirs in listed().items():
        module = importlib.import_module(f"libzero.deepspeed.{inside}".strip("."))
        for name, how in theirs.names.items():
            value = getattr(module, name)
            refused += isinstance(value, Refused)
            assert not how.startswith("=") or repr(value) == how[1:], f"{inside}.{name}"
    assert refused > 500
    for path in ("pipe.PipelineModule", "runtime.hybrid_engine.DeepSpeedHybridEngine", "inference.engine"):
        assert functools.reduce(getattr, path.split("."), deepspeed), path  # found without an import of the module


def test_a_refused_name_is_a_class_that_nothing_is_made_of() -> None:
    from libzero.deepspeed import PipelineEngine, PipelineModule

    class Mine(PipelineModule):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(layers=[])

    for make in (Mine, PipelineModule):
        with pytest.raises(NotImplementedError, match=r"PipelineModule is not built: .* Hint: .*\.$"):
            make()
    with pytest.raises(AttributeError, match=r"^Mine.apply: .*PipelineModule is not built"):
        Mine.apply  # noqa: B018
    assert not isinstance(network(), PipelineModule) and not issubclass(torch.nn.Module, PipelineEngine)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        from libzero.deepspeed import no_such_name  # noqa: F401
    assert not hasattr(deepspeed, "no_such_name") and getattr(deepspeed.pipe, "no_such_name", 7) == 7
    scope: dict[str, Any] = {}
    exec("from libzero.deepspeed import *", scope)  # asks for __all__ only
    assert scope["initialize"] is deepspeed.initialize


def test_what_is_built_is_said_where_programs_ask() -> None:
    from libzero.deepspeed.git_version_info import installed_ops
    from libzero.deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, OpBuilder
    from libzero.deepspeed.ops.op_builder.all_ops import ALL_OPS
    from libzero.deepspeed.utils import instrument_w_nvtx
    from libzero.deepspeed.utils.torch import required_torch_version

    # As DeepSpeed records without its sources, and on a CPU without the library of asynchronous IO.
    assert (deepspeed.__git_hash__, deepspeed.__git_branch__) == ("unknown", "unknown")
    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME] and not installed_ops[AsyncIOBuilder.NAME]
    assert issubclass(CPUAdamBuilder, OpBuilder) and CPUAdamBuilder().is_compatible()
    assert ALL_OPS["fused_adam"].absolute_name() == "deepspeed.ops.adam.fused_adam_op"
    with pytest.raises(NotImplementedError, match=r"CPUAdamBuilder.load\(\) is not built: .* Hint: deepspeed.ops"):
        CPUAdamBuilder().load()
    assert required_torch_version(min_version=2.0) and required_torch_version(min_version="2.0", max_version="99")
    assert not required_torch_version(min_version="99.1") and not required_torch_version(max_version=1.13)
    with pytest.raises(AssertionError, match="got neither min_version nor max_version"):
        required_torch_version()
    assert instrument_w_nvtx(network)()[0].in_features == network()[0].in_features


def test_the_page_is_that_of_the_table() -> None:
    loader = importlib.machinery.SourceFileLoader("page", str(REPOSITORY / "script" / "deepspeed-compatibility"))
    spec = importlib.util.spec_from_loader("page", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert (REPOSITORY / "docs" / "deepspeed-compatibility.md").read_text() == module.page()
    assert {case for _, _, cases in module.BEHAVIOURS for case in cases.split()} == set(CASES)


def test_names_of_the_configuration_and_of_the_model_answer(engine: deepspeed.DeepSpeedEngine) -> None:
    for name in _VALUES:
        assert callable(getattr(engine, name)), name
    assert engine.zero_optimization_stage() == 3 and engine.fp16_enabled() is False
    assert engine.append == engine.module.append  # of Sequential
    with pytest.raises(AttributeError, match="DeepSpeedEngine.no_such_name"):
        engine.no_such_name()


def test_the_name_deepspeed_is_only_taken_by_the_runner(programs: Programs) -> None:
    out = programs.run("""
        import importlib.metadata, importlib.util
        before = importlib.util.find_spec("deepspeed")
        from libzero.deepspeed._under_its_name import install
        install()
        assert importlib.util.find_spec("deepspeed") is not None
        assert importlib.metadata.version("deepspeed") == importlib.metadata.metadata("deepspeed")["Version"]
        import deepspeed.runtime.zero.stage3
        import libzero.deepspeed
        assert deepspeed is libzero.deepspeed
        assert deepspeed.runtime.zero.stage3 is libzero.deepspeed.runtime.zero.stage3
        assert deepspeed.runtime.zero.stage3.__spec__.name == "libzero.deepspeed.runtime.zero.stage3"
        assert deepspeed.__version__ == importlib.metadata.version("deepspeed")
        from deepspeed.pipe import PipelineModule
        import deepspeed.runtime.pipe.topology as topology
        assert topology is libzero.deepspeed.runtime.pipe.topology
        try:
            import deepspeed.pipeline
        except ModuleNotFoundError as refusal:
            print("before:", before, refusal)
        importlib.metadata.version("torch")
    """)
    assert "before: None deepspeed.pipeline is not a module of libzero.deepspeed. Hint: docs/" in out


def test_options_of_deepspeeds_launcher_are_left_to_zero_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `zero run --deepspeed` makes of them: tests/tools/run_test.cpp."""
    started: list[list[str]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        assert program == command[0] == "/bin/zero" and environment["ZERO_PYTHON"] == sys.executable
        started.append(command[1:])
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("ZERO_PROGRAM", "/bin/zero")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for words in (["--num_gpus", "2", "train.py", "--num_nodes", "7"], ["--module", "-H", "hosts", "a.b"], ["--help"]):
        with pytest.raises(SystemExit):
            run.main(words)
        assert started.pop() == ["run", "--deepspeed", *words]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    for words, text in ((["--num_gpus", "2", "train.py"], "got --num_gpus, expected a script"), ([], "got no script")):
        with pytest.raises(SystemExit) as ended:
            run.main(words)
        assert ended.value.code == 2 and text in capsys.readouterr().err
    assert not started


def test_the_installed_program_starts_ranks_with_the_interpreter_it_is_installed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_program, "program", lambda: "/bin/zero")
    monkeypatch.setattr(sys, "argv", ["zero", "run", "--deepspeed", "train.py"])
    started: list[tuple[list[str], str | None]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((words, os.environ.get("ZERO_PYTHON"))))
    for chosen in ("", "/other/python"):
        monkeypatch.setenv("ZERO_PYTHON", chosen)
        if not chosen:
            monkeypatch.delenv("ZERO_PYTHON")
        _program.main()
    words = ["/bin/zero", "run", "--deepspeed", "train.py"]
    assert started == [(words, sys.executable), (words, "/other/python")]


# ---- one rank, in this process ----
def one_step(engine: deepspeed.DeepSpeedEngine, step: int = 0) -> float:
    loss = engine(batch(0, step)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_schedules_that_the_program_makes_are_those_of_the_configuration() -> None:
    numbers = {"warmup_num_steps": 3, "warmup_max_lr": 0.05}
    rates = []
    for own in (True, False):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = WarmupLR(optimizer, 0.0, 0.05, 3) if own else None
        more = {} if own else {"scheduler": {"type": "WarmupLR", "params": numbers}}
        engine, _, _, scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=given, config=config(2, **more)
        )
        seen = []
        for step in range(4):
            one_step(engine, step)
            seen.append(scheduler.get_last_lr())
        rates.append(seen)
    assert rates[0] == rates[1] and rates[0][0] != rates[0][-1]
    with pytest.raises(NotImplementedError, match="cannot jump"):
        scheduler.step(7)


def test_weights_of_a_checkpoint_without_an_engine(tmp_path: Path) -> None:
    model = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(4))
    model[0][4].bias.requires_grad_(False)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(3))
    one_step(engine)
    engine.save_checkpoint(tmp_path)
    expected = engine._engine.state_dict()
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "0.4.bias" not in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, exclude_frozen_parameters=True
    )
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(written["0.0.weight"], expected["0.0.weight"])
    fresh = torch.nn.Sequential(network(2), torch.nn.BatchNorm1d(4))
    zero_to_fp32.load_state_dict_from_zero_checkpoint(fresh, tmp_path)
    assert torch.equal(fresh[0][0].weight, expected["0.0.weight"])


def test_client_state_keeps_its_types_and_refuses_what_is_unsafe(tmp_path: Path) -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(2))
    one_step(engine)
    engine.save_checkpoint(tmp_path, client_state={1: (2, torch.ones(2)), "none": None})
    path, state = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step1") and state is not None
    assert state[1][0] == 2 and torch.equal(state[1][1], torch.ones(2)) and state["none"] is None
    with pytest.raises(TypeError, match="client_state: got an object that cannot be loaded safely"):
        engine.save_checkpoint(tmp_path, client_state={"engine": Path("x")})


def test_16bit_weights_are_saved_at_stage_3_where_the_configuration_says_so(tmp_path: Path) -> None:
    more = {"bf16": {"enabled": True}}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(3, **more))
    assert engine.save_16bit_model(tmp_path) is False and not list(tmp_path.iterdir())
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine, _, _, _ = deepspeed.initialize(model=network(), config={**config(3, **more), "zero_optimization": zero})
    assert engine.save_16bit_model(tmp_path) is True
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found["0.weight"].dtype == torch.bfloat16 and found["0.weight"].shape == (32, 8)


def test_tiles_compute_what_the_layer_computes() -> None:
    layer = torch.nn.Linear(7, 5)
    x = torch.randn(3, 7)
    for splits in ((1, 1), (3, 2), (7, 5)):
        tiled = deepspeed.zero.TiledLinear(7, 5, in_splits=splits[0], out_splits=splits[1], init_linear=layer)
        torch.testing.assert_close(tiled(x), layer(x))
    parts = deepspeed.zero.TiledLinear(7, 5, out_splits=2, combine_out_splits=False, init_linear=layer)(x)
    assert [part.shape for part in parts] == [(3, 3), (3, 2)]
    with pytest.raises(RuntimeError, match="in_splits: got 8, expected 1 to 7"):
        deepspeed.zero.TiledLinear(7, 5, in_splits=8)


def test_checkpointing_recomputes() -> None:
    assert not deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {}})
    assert deepspeed.checkpointing.is_configured()
    with pytest.raises(NotImplementedError, match="cpu_checkpointing"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    runs = []

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return deepspeed.checkpointing.checkpoint(self.part, x)  # type: ignore[no-any-return]

        def part(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return self.inner(x)  # type: ignore[no-any-return]

    block = {"partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True}
    engine, _, _, _ = deepspeed.initialize(model=Twice(), config=config(3, activation_checkpointing=block))
    one_step(engine)
    assert len(runs) == 2


def test_metrics_are_written_as_csv(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(1, csv_monitor=monitor))
    one_step(engine)
    one_step(engine, 1)
    rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().split()
    assert rows == ["step,lr", "4,0.001", "8,0.001"]


def test_estimates_are_the_planners() -> None:
    stage3 = deepspeed.runtime.zero.stage3
    host, device, layer = stage3.estimate_zero3_model_states_mem_needs(
        10**9, 10**7, num_gpus_per_node=4, cpu_offload=False, cpu_offload_params=False
    )
    assert layer == 2 * 10**7 and device == pytest.approx(16 * 10**9 / 4, rel=0.3) and host < 10**8
    stage2 = deepspeed.runtime.zero.stage_1_and_2
    _, device = stage2.estimate_zero2_model_states_mem_needs(10**9, num_gpus_per_node=4, cpu_offload=False)
    assert device == pytest.approx(2 * 10**9 + 14 * 10**9 / 4, rel=0.3)
    stage3.estimate_zero3_model_states_mem_needs_all_live(torch.nn.Linear(512, 512))
    stage2.estimate_zero2_model_states_mem_needs_all_live(torch.nn.Linear(512, 512))


def test_what_the_engine_says_of_itself() -> None:
    model: Any = network()
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": list(model.parameters()), "weight_decay": 0.0}],
        training_data=torch.utils.data.TensorDataset(torch.zeros(8, 8)),
        collate_fn=lambda samples: {"rows": len(samples)},
        dist_init_required=True,
        config_params=config(1, fp16={"enabled": True, "loss_scale": 128}),
    )
    assert loader is not None and list(loader) == [{"rows": 4}] * 2
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert engine.device == torch.device("cpu") and engine.get_data_types()[0] == torch.float16
    assert engine.fp16_enabled() and not engine.bfloat16_enabled() and not engine.dynamic_loss_scale()
    assert engine.cur_scale == engine.loss_scale() == 128
    assert optimizer is not None and optimizer.param_groups[0]["weight_decay"] == 0.0
    assert engine.monitor.enabled is False
    assert engine.eval().training is False and engine.train().module.training is True
    with pytest.raises(AttributeError, match="flops_profiler is not built"):
        engine.flops_profiler  # noqa: B018
    before = model[0].weight.detach().clone()
    engine.set_lr(0.0)
    assert engine.get_lr() == [0.0]
    engine.backward(engine(batch().half()).float().square().mean())
    engine.step()
    assert torch.equal(model[0].weight, before) and engine.was_step_applied()


def test_gradients_are_those_of_plain_torch() -> None:
    reference, model = network(), network()
    reference(batch()).square().mean().backward()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(3))
    engine.backward(engine(batch()).square().mean())
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        whole, part = deepspeed.utils.safe_get_full_grad(p), deepspeed.utils.safe_get_local_grad(p)
        torch.testing.assert_close(whole, expected.grad)
        assert part is not None and whole is not None and torch.equal(part.view(p.shape), whole)  # one rank


def test_a_background_save_that_fails_is_false_and_leaves_latest(tmp_path: Path) -> None:
    settings = {"checkpoint": {"writer": {"decoupled": True}}, "libzero": {"save_errors": "warn"}}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(2, **settings))
    one_step(engine)
    assert engine.save_checkpoint(tmp_path, "good", save_latest=False) is True
    assert not (tmp_path / "latest").exists()
    assert engine.save_checkpoint(tmp_path, "newest") is True
    one_step(engine, 1)
    engine._engine.finish_checkpoint()
    before = (tmp_path / "latest").read_bytes()
    with no_large_files():
        assert engine.save_checkpoint(tmp_path, "bad", save_latest=False) is False
    assert (tmp_path / "latest").read_bytes() == before
    assert not (tmp_path / "bad").exists()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "newest")


def first_of(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    return next(engine.module.parameters())


def test_a_checkpoint_is_loaded_without_its_optimizer_states(tmp_path: Path) -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(2))
    one_step(engine)
    engine.save_checkpoint(tmp_path)
    after = {}
    for states in (True, False):
        again, _, _, _ = deepspeed.initialize(model=network(2), config=config(2))
        again.load_checkpoint(tmp_path, load_optimizer_states=states)
        assert torch.equal(first_of(again), first_of(engine))
        one_step(again, 1)
        after[states] = first_of(again).detach().clone()
    one_step(engine, 1)
    assert torch.equal(after[True], first_of(engine))
    assert not torch.equal(after[False], after[True])


def test_an_engine_without_an_optimizer_evaluates() -> None:
    settings = config(3)
    del settings["optimizer"]
    model, expected = network(), network()
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=settings)
    assert optimizer is None and scheduler is None
    with torch.no_grad():
        torch.testing.assert_close(engine(batch()), expected(batch()))
    with pytest.raises(libzero.ConfigError, match="no optimizer"):
        engine.backward(engine(batch()).sum())


def bad(**words: Any) -> None:
    deepspeed.initialize(model=network(), **words)


def test_what_does_not_fit_is_refused_in_words() -> None:
    settings = config(2)
    model = network()
    some = torch.optim.AdamW([model[0].weight], lr=0.1)
    with pytest.raises(libzero.ConfigError, match="that the model has not"):
        bad(optimizer=some, config=settings)
    with pytest.raises(NotImplementedError, match="class LBFGS: step.. needs a closure"):
        deepspeed.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=settings)
    with pytest.raises(NotImplementedError, match="amsgrad"):
        deepspeed.ops.adam.FusedAdam(model.parameters(), amsgrad=True)
    with pytest.raises(libzero.ConfigError, match="got no configuration"):
        bad()
    with pytest.raises(libzero.ConfigError, match="neither a file nor base64"):
        bad(config="no_such_file.json")
    with pytest.raises(libzero.ConfigError, match="stge"):
        bad(config={**settings, "zero_optimization": {"stge": 2}})


class SignSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


class OwnAdam(deepspeed.ops.adam.FusedAdam):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_a_programs_own_rule_is_computed_as_it_is_written(stage: int) -> None:
    """A subclass with another step(), rules that the engine has not, groups that differ in any number."""
    makers: dict[str, Any] = {
        "a subclass of SGD": lambda ps: SignSgd(ps, lr=0.01),
        "a subclass of FusedAdam": lambda ps: OwnAdam(ps, lr=0.01),
        "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9),
        "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
        "groups": lambda ps: torch.optim.AdamW(
            [{"params": ps[:2], "betas": (0.5, 0.6)}, {"params": ps[2:], "eps": 0.1}]
        ),
    }
    for name, make in makers.items():
        plain_model = network()
        optimizer = make(list(plain_model.parameters()))
        model = network()
        client = make(list(model.parameters()))
        engine, returned, _, _ = deepspeed.initialize(
            model=model, optimizer=client, config=without("optimizer", config(stage))
        )
        for step in range(5):
            loss = plain_model(batch(0, step)).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ours = engine(batch(0, step)).square().mean()
            assert ours.item() == loss.item(), (name, step)
            engine.backward(ours)
            engine.step()
        assert returned is not None and returned.param_groups is client.param_groups
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_of_the_configurations_optimizer_have_their_own_numbers(stage: int) -> None:
    base = network()
    plain_model, model = copy.deepcopy(base), copy.deepcopy(base)
    reference = torch.optim.AdamW(
        [{"params": plain_model[0].parameters(), "betas": (0.5, 0.6)}, {"params": plain_model[2:].parameters()}],
        lr=1e-3, weight_decay=0.01,
    )  # fmt: skip
    groups = [{"params": model[0].parameters(), "betas": (0.5, 0.6)}, {"params": model[2:].parameters()}]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config(stage))
    for step in range(5):
        loss = plain_model(batch(0, step)).square().mean()
        torch.autograd.backward(loss)
        reference.step()
        reference.zero_grad()
        ours = engine(batch(0, step)).square().mean()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
        engine.backward(ours)
        engine.step()
    engine.destroy()


def test_an_optimizer_whose_step_would_not_run_is_refused() -> None:
    settings = config(1)
    del settings["optimizer"]

    def refused(make: Any, why: str, change: Any = lambda optimizer: None) -> None:
        model = network()
        optimizer = make(model.parameters())
        change(optimizer)
        with pytest.raises(NotImplementedError, match=f"optimizer of class {type(optimizer).__name__}: {why}"):
            deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        with pytest.raises(NotImplementedError, match=why):
            deepspeed.initialize(model=model, optimizer=lambda _: optimizer, config=settings)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    refused(adamw, "it has hooks of step", lambda o: o.register_step_pre_hook(lambda *_: None))
    refused(adamw, "it has hooks of step", lambda o: o.register_step_post_hook(lambda *_: None))
    refused(adamw, r"its step\(\) was replaced", lambda o: setattr(o, "step", lambda closure=None: None))
    wrapped = functools.wraps(torch.optim.AdamW.step)

    def clipped(optimizer: Any) -> None:
        plain = optimizer.step
        optimizer.step = wrapped(lambda *a: plain(*a))  # looks like the method that it wraps

    refused(adamw, r"its step\(\) was replaced", clipped)

    # torch's schedulers put a wrapper of their own around step().
    model = network()
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, returned, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
    )
    assert returned is not None
    seen: list[float] = []
    returned.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    for step in range(2):
        one_step(engine, step)
    assert seen == [0.1, 0.05]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_states_of_a_programs_optimizer_are_not_dropped(kind: str, stage: int) -> None:
    settings = config(stage)
    del settings["optimizer"]

    def made(momentum: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = network()
        words = {"lr": 0.01, **({"momentum": momentum} if kind == "SGD" else {})}
        return model, getattr(torch.optim, kind)(model.parameters(), **words)

    def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(0.9)
    trained(model, optimizer)
    with pytest.raises(NotImplementedError, match=r"it has states of 6 parameters, which would be lost"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    fresh, loaded = made(0.9)
    loaded.load_state_dict(optimizer.state_dict())
    with pytest.raises(NotImplementedError, match="it has states of 6"):
        deepspeed.initialize(model=fresh, optimizer=loaded, config=settings)
    model, optimizer = made(0.0)
    if kind == "SGD":  # without momentum there is nothing to lose
        trained(model, optimizer)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@pytest.mark.parametrize("how", ["optimizer", "model_parameters"])
def test_groups_name_their_parameters_alone(how: str) -> None:
    """Whatever characters the names have."""

    def made() -> tuple[torch.nn.ModuleDict, list[dict[str, Any]]]:
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("ab", "a?", "c*", "c_long", "d[e]", "f")})
        listed = [
            {"params": list(model["a?"].parameters()), "lr": 0.0},
            {"params": list(model["c*"].parameters()), "lr": 0.5},
        ]
        rest = [p for name in ("ab", "c_long", "d[e]", "f") for p in model[name].parameters()]
        return model, [{"params": rest}, *listed]

    def loss(model: torch.nn.ModuleDict, step: int) -> torch.Tensor:
        return sum(part(batch(0, step)).square().mean() for part in model.values())  # type: ignore[return-value]

    reference, groups = made()
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(reference, step).backward()
        optimizer.step()
    model, groups = made()
    settings = config(1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    words: dict[str, Any] = {"model_parameters": groups}
    if how == "optimizer":
        words = {"optimizer": torch.optim.SGD(groups, lr=0.1)}
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings, **words)
    for step in range(3):
        engine.backward(loss(model, step))
        engine.step()
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), expected.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("how", ["optimizer", "model_parameters"])
def test_a_parameter_in_no_group_is_not_trained_when_it_is_unfrozen(how: str, stage: int) -> None:
    model = network()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    words: dict[str, Any] = {"model_parameters": trained}
    if how == "optimizer":
        words = {"optimizer": torch.optim.AdamW(trained, lr=0.1)}
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(stage), **words)
    one_step(engine)
    before = engine._engine.state_dict()["0.weight"]
    model[0].requires_grad_(True)
    one_step(engine, 1)
    assert engine.global_steps == 2
    with deepspeed.zero.GatheredParameters([model[0].weight]):
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("own", [True, False])
def test_a_group_that_comes_after_initialize_is_refused(own: bool) -> None:
    model = network()
    model[0].requires_grad_(False)
    mine = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=mine, config=config(1))
    one_step(engine)
    model[0].requires_grad_(True)
    (mine if own else optimizer).add_param_group({"params": list(model[0].parameters())})
    before = model[0].weight.detach().clone()
    engine.backward(engine(batch()).square().mean())
    with pytest.raises(libzero.ConfigError, match="add_param_group: got 2 groups, expected the 1 that the engine"):
        engine.step()
    assert torch.equal(model[0].weight, before)


def test_groups_of_a_compiled_model_have_the_names_of_the_model() -> None:
    model = network()
    weights, biases = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    groups = [{"params": weights}, {"params": biases, "lr": 0.0}]
    compiled: Any = torch.compile(model, backend="eager")
    engine, _, _, _ = deepspeed.initialize(
        model=compiled, optimizer=torch.optim.AdamW(groups, lr=0.1), config=config(1)
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    one_step(engine)
    assert all(torch.equal(p, before[name]) == name.endswith("bias") for name, p in model.named_parameters())


def test_calls_out_of_order_are_refused_in_words() -> None:
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(2))
    assert optimizer is not None
    with pytest.raises(libzero.ConfigError, match="stage 2: gradients are sharded"), engine.no_sync():
        pass
    engine.backward(engine(batch()).square().mean())
    with pytest.raises(NotImplementedError, match="cannot drop gradients"):
        engine.zero_grad()
    engine.step()
    engine.zero_grad()
    optimizer.param_groups[0]["bias_correction"] = False
    with pytest.raises(libzero.ConfigError, match="bias_correction.* it cannot change while training"):
        one_step(engine)


def test_no_sync_accumulates_below_stage_2() -> None:
    losses = []
    for inside in (True, False):
        engine, _, _, _ = deepspeed.initialize(model=network(), config=config(1, gradient_accumulation_steps=2))
        if inside:
            with engine.no_sync():
                engine.backward(engine(batch(0, 0)).square().mean())
                with pytest.raises(libzero.ConfigError, match="within no_sync"):
                    engine.step()
            engine.set_gradient_accumulation_boundary(True)
        else:
            engine.backward(engine(batch(0, 0)).square().mean())
            engine.step()
        engine.backward(engine(batch(0, 1)).square().mean())
        engine.step()
        assert engine.global_steps == 1
        losses.append(float(engine(batch(0, 2)).square().mean()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_read_at_the_boundary_of_an_accumulation(stage: int) -> None:
    utils = deepspeed.utils
    plain = network()
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage, gradient_accumulation_steps=2))
    weight = engine.module[0].weight
    for step in range(2):
        loss = engine(batch(0, step)).square().mean()
        torch.autograd.backward(plain(batch(0, step)).square().mean() / 2)
        engine.backward(loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    local = utils.safe_get_local_grad(weight)
    whole = utils.safe_get_full_grad(weight)
    assert local is not None and whole is not None and torch.equal(local, whole.flatten())
    torch.testing.assert_close(whole, plain[0].weight.grad, atol=1e-7, rtol=1e-5)
    with pytest.raises(libzero.ConfigError, match=r"called after gradient\(\) .* step\(\) before the next"):
        engine.backward(engine(batch(0, 2)).square().mean())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_set_by_parameter(stage: int) -> None:
    """As a plain loop that replaces .grad."""
    utils = deepspeed.utils
    plain = network()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
    settings = config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}})
    settings["gradient_clipping"] = 0.5
    engine, _, _, _ = deepspeed.initialize(model=network(), config=settings)
    first, *_, last = engine.module.parameters()
    for step in range(3):
        reference.zero_grad()
        plain(batch(0, step)).square().mean().backward()
        gradients = [parameter.grad for parameter in plain.parameters()]
        assert gradients[0] is not None and gradients[-1] is not None
        gradients[0].copy_(torch.full_like(gradients[0], 0.25 * (step + 1)))
        for gradient in gradients[1:-1]:
            assert gradient is not None
            gradient.mul_(2)
        gradients[-1].neg_()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()

        engine.backward(engine(batch(0, step)).square().mean())
        utils.safe_set_full_grad(first, torch.full_like(first, 0.25 * (step + 1), dtype=torch.float32))
        rest = list(engine.module.parameters())[1:-1]
        utils.safe_update_full_grad_vectorized(rest, lambda gradient, parameter: 2 * gradient)
        utils.safe_set_local_grad(last, -utils.safe_get_local_grad(last))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert utils.safe_get_full_grad(network()[0].weight) is None  # of no engine
    utils.safe_set_full_grad(network()[0].weight, torch.ones(1))  # no effect


def test_states_are_read_and_set_by_parameter() -> None:
    utils = deepspeed.utils
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(3, bf16={"enabled": True}))
    engine.backward(engine(batch().bfloat16()).float().square().mean())
    engine.step()
    weight = engine.module[0].weight
    exact = torch.full((32, 8), 1 + 2.0**-20)  # not a bf16
    utils.safe_set_full_fp32_param(weight, exact)
    found = utils.safe_get_full_fp32_param(weight)
    assert found is not None and torch.equal(found, exact)
    utils.safe_set_local_fp32_param(weight, 2 * exact)
    local = utils.safe_get_local_fp32_param(weight)
    assert local is not None and torch.equal(local, 2 * exact.flatten())
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.eq(2).all()
    for key, value in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        before = utils.safe_get_full_optimizer_state(weight, key)
        assert before is not None and before.any()
        utils.safe_set_full_optimizer_state(weight, torch.full((32, 8), value), key)
        utils.safe_set_local_optimizer_state(weight, 3 * utils.safe_get_local_optimizer_state(weight, key), key)
        found = utils.safe_get_full_optimizer_state(weight, key)
        assert found is not None and found.eq(3 * value).all()
    with pytest.raises(libzero.ConfigError, match="expected one of master, exp_avg, exp_avg_sq"):
        utils.safe_get_full_optimizer_state(weight, "step")
    assert utils.safe_get_full_fp32_param(network()[0].weight) is None  # of no engine
