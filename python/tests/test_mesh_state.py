"""Whole states of a model that tensor parallelism cuts: state dicts, and checkpoints read without an engine."""

import json
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from test_mesh import SPECS, Block, settings

import libzero
import libzero.deepspeed
from libzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Model(torch.nn.Sequential):
    """5 heads and 21 hidden units, which 2 ranks have unevenly; a frozen weight that is cut; a tie; a buffer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(Block(15, 21), Block(15, 21))
        self[1].down.weight.requires_grad_(False)
        self[1].norm.weight = self[0].norm.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))


def config(stage: int, **more: Any) -> dict[str, Any]:
    plan = {"use_default_specs": False, "layer_specs": SPECS}
    return {**settings(stage, partition_config=plan), **more}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 5, 15, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: libzero.Engine, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(batch(engine.mesh.rank("dp"), step)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_is_read_whole(stage: int, tmp_path: Path) -> None:
    models = [Model() for _ in range(4)]

    def body(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        engine = libzero.Engine(models[comm.rank], config(stage))
        train(engine)
        engine.save_checkpoint(tmp_path, "two")
        return engine.full_state_dict()

    masters = libzero.run_ranks(4, body)[0]
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    cut = {each["name"] for each in manifest["tensors"] if "slices" in each}
    assert {"0.qkv.weight", "0.qkv.bias", "0.out.weight", "0.up.weight", "1.down.weight"} <= cut
    assert masters["0.up.weight"].shape == (21, 15)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    equal(found, {**masters, "scale": models[0].scale, "1.norm.weight": masters["0.norm.weight"]})


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    engine = libzero.Engine(conftest.network(), conftest.config())
    engine.save_checkpoint(tmp_path, "one")
    file = tmp_path / "one" / "manifest.json"
    text = file.read_text()
    assert '"min_reader": 4' in text
    file.write_text(text.replace('"min_reader": 4', '"min_reader": 99'))
    with pytest.raises(libzero.IoError, match="min_reader: got 99, expected [0-9]+ or less"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (0, True), (3, False), (3, True)])
def test_a_state_dict_is_whole(stage: int, bf16: bool) -> None:
    models = [Model() for _ in range(4)]
    dtype = torch.bfloat16 if bf16 else torch.float32

    def body(comm: libzero.Communicator) -> Any:
        engine = libzero.Engine(models[comm.rank], config(stage, bf16={"enabled": bf16}))
        for step in range(2):
            loss = engine(batch(engine.mesh.rank("dp"), step).to(dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
        state = engine.state_dict()
        assert state["1.norm.weight"] is state["0.norm.weight"]
        with engine.gathered_parameters():
            part = models[comm.rank][0].down.weight.detach().clone()
        begin = 0 if engine.mesh.rank("tp") == 0 else 10
        assert torch.equal(part, state["0.down.weight"][:, begin : begin + part.size(1)])
        assert models[comm.rank].scale.data_ptr() != state["scale"].data_ptr()
        return state, engine.full_state_dict()

    results = libzero.run_ranks(4, body)
    fp32 = results[0][1]
    fp32["1.norm.weight"] = fp32["0.norm.weight"]
    expected = {name: value.to(dtype) for name, value in fp32.items()}
    # Buffers keep the dtype that the model has for them.
    for state, _ in results:
        equal(state, {**expected, "scale": models[0].scale})
    model = Model().to(dtype)
    model.load_state_dict(results[3][0])


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_saves_and_loads_whole_weights(stage: int, tmp_path: Path) -> None:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}

    def made() -> torch.nn.Module:
        model = Model()
        model[1].down.weight.requires_grad_(True)
        return model

    models, others = [made() for _ in range(4)], [made() for _ in range(4)]

    def body(comm: libzero.Communicator) -> Any:
        block = config(stage, zero_optimization=zero, train_batch_size=8, gradient_accumulation_steps=2)
        engine, *_ = libzero.deepspeed.initialize(model=models[comm.rank], config=block)
        assert engine.train_batch_size() == 8
        assert (engine.autotp_size(), engine.get_tensor_parallel_rank()) == (2, comm.rank % 2)
        for step in range(4):
            engine.backward(engine(batch(engine.get_data_parallel_rank(), step)).square().mean())
            engine.step()
        assert engine.global_samples == 16  # of 2 data-parallel ranks
        with pytest.raises(libzero.ConfigError, match="module_state_dict: got a model with tensor parallelism"):
            engine.module_state_dict()
        assert engine.save_16bit_model(tmp_path / "weights")
        engine.save_checkpoint(tmp_path / "checkpoint")
        masters = engine._engine.full_state_dict()
        hashed = engine._engine.state_hash()

        for p in others[comm.rank].parameters():
            torch.nn.init.constant_(p, 0.25)
        other, *_ = libzero.deepspeed.initialize(model=others[comm.rank], config=block)
        other.load_checkpoint(tmp_path / "checkpoint", load_module_only=True)
        assert other._engine.state_hash() != hashed  # moments
        if comm.rank == 0:
            equal(masters, other._engine.full_state_dict())
        else:
            other._engine.full_state_dict()
        with torch.no_grad():
            same = torch.equal(engine(batch(7, 7)), other(batch(7, 7)))
        other.load_checkpoint(tmp_path / "checkpoint")
        assert other._engine.state_hash() == hashed
        return masters, same

    results = libzero.run_ranks(4, body)
    assert all(same for _, same in results)
    masters = results[0][0]
    masters["1.norm.weight"] = masters["0.norm.weight"]
    saved = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    equal(saved, {**masters, "scale": models[0].scale})


def test_weights_that_cannot_be_loaded_into_parts() -> None:
    models = [Model(), Model()]

    def body(comm: libzero.Communicator) -> None:
        engine, *_ = libzero.deepspeed.initialize(model=models[comm.rank], config=config(0))
        state = {"module": engine._engine.state_dict()}
        with pytest.raises(libzero.ConfigError, match=r"1\.down\.weight is frozen and cut"):
            engine.load_module_state_dict(state)
        with pytest.raises(libzero.ConfigError, match="got custom_load_fn with tensor parallelism"):
            engine.load_module_state_dict(state, custom_load_fn=lambda src, dst: None)

    libzero.run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_state_dicts_of_torch_are_taken_back(stage: int) -> None:
    """Masters and states of cut, frozen and tied parameters, in another engine, whose training continues."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    models = [Model() for _ in range(8)]
    full = StateDictOptions(full_state_dict=True)

    def body(comm: libzero.Communicator) -> Any:
        engine = libzero.Engine(models[comm.rank], config(stage))
        train(engine)
        model_state, states = get_state_dict(engine.module, engine.optimizer, options=full)
        masters = engine.full_state_dict()
        whole = {name: engine.parameter_state(name, "exp_avg") for name in states["state"]}
        train(engine)
        expected = engine.state_hash()
        engine.close()
        other = models[4 + comm.rank]
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        with libzero.Engine(other, config(3 - stage)) as engine:
            set_state_dict(other, engine.optimizer, model_state_dict=model_state, optim_state_dict=states, options=full)
            train(engine)
            return model_state, states, masters, whole, engine.state_hash() == expected

    ranks = libzero.run_ranks(4, body)
    masters = ranks[0][2]
    for model_state, states, _, whole, same in ranks:
        assert same and model_state["0.up.weight"].shape == (21, 15)
        assert torch.equal(model_state["1.norm.weight"], model_state["0.norm.weight"])
        for name, value in masters.items():
            frozen = name == "1.down.weight"
            assert torch.equal(model_state[name].float(), value), name
            assert frozen != (name in states["state"])
        for name, value in whole.items():
            assert torch.equal(states["state"][name]["exp_avg"], value), name
