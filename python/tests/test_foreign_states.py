"""States of optimizers that programs of torch have saved, in engines that run such an optimizer."""

import copy
import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import REPOSITORY, Programs, batch, config, find_zero, network, nightly, without
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import libzero

O = torch.optim


class OwnAdam(O.Adam):
    """Run by the program's own step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (O.AdamW, {}),
    "RMSprop": (O.RMSprop, {"momentum": 0.9}),
    "Adam, own step": (OwnAdam, {}),
    "SGD": (O.SGD, {"momentum": 0.9}),
    "Adafactor": (O.Adafactor, {}),
    "NAdam": (O.NAdam, {}),
}


def clean(stage: int) -> dict[str, Any]:
    return without("gradient_clipping", without("optimizer", config(stage)))


class Plain:
    """A program of torch that has made three steps and saved itself, and its weights after three more."""

    def __init__(self, kind: Any, words: dict[str, Any], folder: Path) -> None:
        self.folder, self.file = str(folder / "dcp"), str(folder / "plain.pt")
        self.make: Callable[[Any], O.Optimizer] = lambda model: kind(model.parameters(), lr=1e-3, **words)
        model = network()
        optimizer = self.make(model)
        self.run(model, optimizer, range(3))
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=self.folder, no_dist=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.file)
        self.run(model, optimizer, range(3, 6))
        self.weights = copy.deepcopy(model.state_dict())

    @staticmethod
    def run(model: Any, optimizer: O.Optimizer, steps: range) -> None:
        for step in steps:
            torch.stack([model(batch(rank, step)).square().mean() for rank in (0, 1)]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def continued(self, take: Callable[[libzero.Engine, Any, Any], Any], stage: int = 3, ranks: int = 2) -> None:
        """Engines with other values that take() the saved ones give the weights of the program."""
        def rank(comm: libzero.Communicator) -> Any:
            model = network(seed=9)
            optimizer = self.make(model)
            with libzero.Engine(model, clean(stage), comm=comm, optimizer=optimizer) as engine:
                take(engine, model, optimizer)
                for step in range(3, 6):
                    each = range(comm.rank, 2, comm.size)
                    engine.backward(torch.stack([model(batch(i, step)).square().mean() for i in each]).mean())
                    optimizer.step()
                return engine.state_dict()

        for name, value in libzero.run_ranks(ranks, rank)[0].items():
            torch.testing.assert_close(value, self.weights[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD", "Adafactor", *map(nightly, ["Adam, own step", "NAdam"])])
def test_what_a_program_of_torch_saved(name: str, tmp_path: Path) -> None:
    """By torch.distributed.checkpoint, and by torch.save() of optimizer.state_dict(), which is given as it is."""
    plain = Plain(*KINDS[name], tmp_path)

    def by_dcp(engine: libzero.Engine, model: Any, optimizer: Any) -> None:
        found = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(found, checkpoint_id=plain.folder, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def by_save(engine: libzero.Engine, model: Any, optimizer: Any) -> None:
        engine.import_weights(plain.file, key="model")
        optimizer.load_state_dict(torch.load(plain.file, weights_only=True)["optimizer"])

    for stage in (0, 3):
        plain.continued(by_dcp, stage)
        plain.continued(by_save, stage)


@pytest.mark.parametrize("name", ["RMSprop", "Adam, own step", nightly("AdamW")])
def test_import_weights_takes_states_and_counts(name: str, tmp_path: Path) -> None:
    plain = Plain(*KINDS[name], tmp_path)
    plain.continued(lambda engine, *_: engine.import_weights(plain.folder, optimizer=True))


def test_a_checkpoint_that_was_imported(tmp_path: Path) -> None:
    """`zero checkpoint import`, for an optimizer of the program of the class's name."""
    if (zero := find_zero()) is None:
        pytest.skip("needs the program zero")
    for name, (kind, words) in KINDS.items():
        if name not in ("AdamW", "RMSprop", "SGD", "Adam, own step"):
            continue
        plain = Plain(kind, words, tmp_path / name)
        words_of_it = [zero, "checkpoint", "import", plain.folder, "--into", str(tmp_path / name), "--tag", "one"]
        subprocess.run(words_of_it, check=True, capture_output=True)
        if name == "Adam, own step":  # a class whose states may mean something else
            with pytest.raises(libzero.ConfigError, match="expected numbers of a OwnAdam of the program, got none"):
                plain.continued(lambda engine, *_, at=tmp_path / name: engine.load_checkpoint(at), ranks=1)
            continue
        plain.continued(lambda engine, *_, at=tmp_path / name: engine.load_checkpoint(at))


def test_files_of_the_engines_own_rule(tmp_path: Path) -> None:
    """A universal checkpoint of DeepSpeed's form, and a checkpoint of libzero, of the built-in RMSprop."""
    kind, words = KINDS["RMSprop"]
    plain = Plain(kind, words, tmp_path)
    with libzero.Engine(network(), config(1, optimizer={"type": "RMSprop", "params": {"lr": 1e-3, **words}})) as engine:
        for step in range(3):
            engine.backward(torch.stack([engine(batch(i, step)).square().mean() for i in (0, 1)]).mean())
            engine.step()
        engine.export_weights(tmp_path / "universal", format="universal")
        engine.save_checkpoint(tmp_path / "saved", "one")
    plain.continued(lambda engine, *_: engine.import_weights(tmp_path / "universal", optimizer=True))
    plain.continued(lambda engine, *_: engine.load_checkpoint(tmp_path / "saved"))


def test_numbers_that_files_lack_are_named(tmp_path: Path) -> None:
    """And nothing has changed."""
    for name, lacking in (("Adafactor", "col_var, row_var of 0.weight"), ("NAdam", "mu_product of 0.weight")):
        kind, words = KINDS[name]
        plain = Plain(kind, words, tmp_path / name)
        model = network(seed=9)
        optimizer = plain.make(model)
        with libzero.Engine(model, clean(1), optimizer=optimizer) as engine:
            engine.backward(engine(batch()).square().mean())
            engine.step()
            before = engine.state_hash()
            with pytest.raises(libzero.ConfigError, match=f"have no {lacking}.*optimizer.load_state_dict"):
                engine.import_weights(plain.folder, optimizer=True)
            assert engine.state_hash() == before
            engine.backward(engine(batch()).square().mean())
            engine.step()


def fixtures() -> Any:
    """The program that wrote tests/golden/interchange."""
    loader = importlib.machinery.SourceFileLoader("fixtures", str(REPOSITORY / "script" / "make-interchange-fixtures"))
    module = types.ModuleType("fixtures")
    module.__file__ = loader.path
    loader.exec_module(module)
    return module


class OwnAdamW(O.AdamW):
    """Run by the program's own step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("name", [*(f"deepspeed-{stage}-fp32" for stage in (1, 3)), "universal-3",
                                  nightly("deepspeed-2-fp32"), nightly("universal-2"),
                                  nightly("deepspeed-0-fp32")])  # fmt: skip
def test_deepspeeds_files_continue_an_optimizer_of_the_program(name: str) -> None:
    """Ten losses are those of the program of DeepSpeed that continued."""
    safe_open = pytest.importorskip("safetensors").safe_open
    pytest.importorskip("numpy")
    made, folder = fixtures(), REPOSITORY / "tests" / "golden" / "interchange" / name
    bf16 = name.startswith("universal")  # made of files of bf16
    written = name.replace("universal-", "deepspeed-") + ("-bf16" if bf16 else "")
    with safe_open(folder.parent / written / "expected.safetensors", "pt") as file:
        losses = json.loads(file.metadata()["losses"])

    def rank(comm: libzero.Communicator) -> list[float]:
        torch.manual_seed(5)
        model = made.Model()
        optimizer = OwnAdamW(model.groups(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
        settings = {**clean(3), "gradient_clipping": 1.0, "bf16": {"enabled": bf16}}
        found = []
        with libzero.Engine(model, settings, comm=comm, optimizer=optimizer) as engine:
            engine.import_weights(folder, optimizer=True)
            assert engine.global_step == 3
            for step in range(3, 13):
                logits = engine(made.tokens_of(comm.rank, step))
                loss = torch.nn.functional.cross_entropy(logits.float(), made.tokens_of(comm.rank, step + 1))
                found.append(loss.item())
                engine.backward(loss)
                engine.step()
        return found

    for found, theirs in zip(libzero.run_ranks(2, rank), losses, strict=True):
        assert found == pytest.approx(theirs, rel=1e-4)


FSDP = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    rank, folder = torch.distributed.get_rank(), os.path.dirname(os.path.abspath(__file__))
    model = network()
    for module in (*model[::2], model):
        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.{kind}(model.parameters(), lr=1e-3)

    def run(model, optimizer, steps):
        for step in steps:
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run(model, optimizer, range(3))
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer))), checkpoint_id=folder + "/fsdp")
    run(model, optimizer, range(3, 6))
    expected = {{name: value.full_tensor() for name, value in model.state_dict().items()}}

    model = network(seed=9)
    optimizer = torch.optim.{kind}(model.parameters(), lr=1e-3)
    settings = {{key: value for key, value in config(3).items() if key not in ("optimizer", "gradient_clipping")}}
    with libzero.Engine(model, settings, optimizer=optimizer) as engine:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=folder + "/fsdp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        run(model, optimizer, range(3, 6))
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    print("same", flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["RMSprop", nightly("AdamW")])
def test_a_program_of_fsdp2_becomes_one_of_libzero(kind: str, programs: Programs) -> None:
    """With its own lines for saving and loading."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    assert programs.run(FSDP.format(kind=kind), *torchrun, timeout=120).count("same") == 2
