"""Mistakes that docs/errors.md lists are refused with its texts, as a Python exception on every rank."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, batch, config, find_zero, network

import libzero

PAGE = (REPOSITORY / "docs" / "errors.md").read_text()


def loss_of(engine: libzero.Engine) -> torch.Tensor:
    return engine(batch(engine.comm.rank)).square().mean()  # type: ignore[no-any-return]


def moved(engine: libzero.Engine) -> None:
    engine.module.double()
    engine.backward(engine(batch().double()).sum())


def registered(engine: libzero.Engine) -> None:
    if engine.comm.rank == 0:
        engine.module.add_module("late", torch.nn.Linear(4, 4))
    else:
        engine.module[0].bias = torch.nn.Parameter(torch.zeros(32))  # type: ignore[index]
    engine.backward(loss_of(engine))
    engine.step()


def tied(engine: libzero.Engine) -> None:
    engine.module[2].bias = engine.module[0].bias  # type: ignore[index]
    engine.step()


def hooked(engine: libzero.Engine) -> None:
    weight: Any = next(engine.module.parameters())
    weight.register_post_accumulate_grad_hook(lambda _: None)
    engine.backward(loss_of(engine))


def in_a_scope(engine: libzero.Engine) -> None:
    with engine.gathered_parameters():
        engine.backward(loss_of(engine))


def written(engine: libzero.Engine) -> None:
    with torch.no_grad():
        next(engine.module.parameters()).add_(1.0)


def read(engine: libzero.Engine) -> None:
    next(engine.module.parameters()).data_ptr()


def misnamed(engine: libzero.Engine) -> None:
    with engine.gathered_parameters("2.weigth"):
        pass


def clipped(engine: libzero.Engine) -> None:
    engine.backward(loss_of(engine))
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)


def cleared(engine: libzero.Engine) -> None:
    engine.backward(loss_of(engine))
    engine.module.zero_grad()
    engine.step()


def not_discarded(engine: libzero.Engine) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("of the model")

    y = engine(batch())
    y.register_hook(fail)
    with pytest.raises(KeyError):
        engine.backward(y.sum())
    engine.backward(loss_of(engine))


def old_graph(engine: libzero.Engine) -> None:
    old = loss_of(engine)
    engine.backward(loss_of(engine))
    engine.step()
    engine.backward(old)


def twice(engine: libzero.Engine) -> None:
    engine.backward(loss_of(engine))
    engine.backward(loss_of(engine))


def other_path(engine: libzero.Engine) -> None:
    engine.module[engine.comm.rank * 2](torch.ones(1, 8 + 24 * engine.comm.rank))  # type: ignore[index]


def other_units(engine: libzero.Engine) -> None:
    with engine.gathered_parameters(f"{2 * engine.comm.rank}.weight"):
        pass


def another(engine: libzero.Engine) -> None:
    libzero.Engine(engine.module, config(), comm=engine.comm)


def wide(engine: libzero.Engine) -> None:
    libzero.Engine(network().double(), config(), comm=engine.comm)


def no_such_pattern(engine: libzero.Engine) -> None:
    groups = [{"pattern": "*wieght", "lr": 0.5}]
    libzero.Engine(network(), config(libzero={"parameter_groups": groups}), comm=engine.comm)


def other_configuration(engine: libzero.Engine) -> None:
    libzero.Engine(network(), config(1 + engine.comm.rank), comm=engine.comm)


def evaluated(engine: libzero.Engine) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    delayed = offload | {"delayed_update": {"enabled": True, "start_step": 1}}
    other = libzero.Engine(network(), config(zero_optimization=delayed), comm=engine.comm)
    for _ in range(2):
        other.backward(loss_of(other))
        other.step()
    with torch.no_grad():
        other(batch())


def thawed(engine: libzero.Engine) -> None:
    files = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    model = network()
    model[0].weight.requires_grad_(False)
    other = libzero.Engine(
        model, config(zero_optimization={"stage": 3, "offload_optimizer": files}), comm=engine.comm
    )
    model[0].weight.requires_grad_(True)
    other.backward(loss_of(other))
    other.step()


MISTAKES: dict[str, Callable[[libzero.Engine], Any]] = {
    "parameter ... was replaced behind the Engine": moved,
    "parameter ... is held by another Engine": another,
    "the model has parameters that the Engine does not hold": registered,
    "parameter ... is now ..., but the Engine was made with a parameter of its own there": tied,
    "the post-accumulate-grad hook of parameter ... was replaced": hooked,
    "dtype Double, expected Float, Half or BFloat16": wide,
    'the pattern "..." matches no parameter': no_such_pattern,
    "called inside a scope of gathered_parameters": in_a_scope,
    "parameter ... was read past the dispatcher while it is sharded": read,
    "... writes parameter ... in place": written,
    "got names that match no parameter and no unit": misnamed,
    "the units asked for ... differ": other_units,
    "reads parameters without grad mode between steps": evaluated,
    "a gradient of ... arrived outside Engine::backward": lambda engine: torch.autograd.backward(loss_of(engine)),
    "... got the gradient of parameter ... between backward() and step()": clipped,
    "the gradient of ... was cleared or replaced": cleared,
    "called after a backward that failed": not_discarded,
    "modified by an inplace operation": old_graph,
    "requires_grad of parameter ... became true, but the Engine took it frozen": thawed,
    "called N times without step()": twice,
    "the configurations on rank 0 and on rank 1 differ": other_configuration,
    "got different calls, expected the same on every rank": other_path,
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_refused_on_every_rank(text: str) -> None:
    assert f"| `{text}`" in PAGE
    models = [network(), network()]

    def body(comm: libzero.Communicator) -> str:
        engine = libzero.Engine(models[comm.rank], config())
        with pytest.raises((libzero.ConfigError, libzero.CommError, RuntimeError)) as refused:
            MISTAKES[text](engine)
        return type(refused.value).__name__ + ": " + str(refused.value)

    pattern = re.escape(text).replace(r"\.\.\.", ".*").replace("N", r"\d+")
    for message in libzero.run_ranks(2, body):
        assert re.search(pattern, message), message


def test_a_module_that_holds_itself_is_named() -> None:
    model = network()
    model[2].parent = model
    with pytest.raises(libzero.ConfigError, match=r"the module 2\.parent is one that holds it, expected a tree"):
        libzero.Engine(model, config())


def test_weights_tied_after_the_engine_was_made_reach_no_file(tmp_path: Path) -> None:
    engine = libzero.Engine(network(), config(1))
    own = engine.module[2].bias  # type: ignore[index]
    engine.module[2].bias = engine.module[0].bias  # type: ignore[index]
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.save_checkpoint(tmp_path, "t"),
        lambda: engine.keep_snapshot(tmp_path),
        lambda: engine.export_weights(tmp_path / "out"),
        lambda: engine.save_16bit_model(tmp_path / "out"),
    ]
    for call in calls:
        with pytest.raises(libzero.ConfigError, match="parameter 2.bias is now 0.bias"):
            call()
    assert not list(tmp_path.iterdir())
    engine.module[2].bias = own  # type: ignore[index]
    engine.backward(loss_of(engine))
    assert engine.step().updated
    engine.module.add_module("again", engine.module[0])  # another name of the same parameters
    engine.save_checkpoint(tmp_path, "t")


def test_activations_are_left_to_torch() -> None:
    model = network()
    for block in ({"activation_checkpointing": {"cpu_checkpointing": True}},
                  {"libzero": {"activation_offload": {"device": "cpu"}}}):  # fmt: skip
        with pytest.raises(libzero.ConfigError, match="torch.utils.checkpoint"):
            libzero.Engine(model, config(**block))
    libzero.Engine(model, config())  # the refusals left nothing behind


def test_faults_of_a_file_have_line_and_column_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**config(3), "gradient_cliping": 1.0, "steps_per_print": "x"}, indent=2))

    def body(comm: libzero.Communicator) -> str:
        with pytest.raises(libzero.ConfigError) as refused:
            libzero.Engine(network(), file, comm=comm)
        return str(refused.value)

    first, second = libzero.run_ranks(2, body)
    assert first == second
    lines = file.read_text().splitlines()
    for key in ("gradient_cliping", "steps_per_print"):
        number = next(i for i, line in enumerate(lines, 1) if key in line)
        assert re.search(rf"{re.escape(str(file))}:{number}:\d+: error: /{key}: ", first), first
    assert 'did you mean "gradient_clipping"?' in first
    if (zero := find_zero()) is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    done = subprocess.run([zero, "config", "check", str(file)], capture_output=True, text=True)
    assert done.returncode == 2
    faults = [line for line in done.stderr.splitlines() + done.stdout.splitlines() if "error: /" in line]
    assert len(faults) == 2 and all(line in first for line in faults)


def test_a_buffer_of_another_dtype_is_named() -> None:
    def made() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))

    def run(**more: Any) -> None:
        with libzero.Engine(made(), config(1, bf16={"enabled": True}, **more)) as engine:
            engine.backward(engine(batch().bfloat16()).float().square().mean())
            engine.step()

    text = (
        r"reads parameter 1\.weight of BFloat16 and buffer 1\.running_mean of Float\. "
        r"Hint: data_types\.buffer_dtype .*; libzero\.keep_fp32 names"
    )
    with pytest.raises(RuntimeError, match=text):
        run()
    # What the hint names works.
    run(data_types={"buffer_dtype": "bf16"})
    run(libzero={"keep_fp32": ["1.*"]})
