"""Tensor parallelism on unmodified modules of torch and of Hugging Face."""

import re
import sys
from typing import Any

import pytest
import torch
from conftest import Programs, plain

import libzero


class Block(torch.nn.Module):
    """Attention and MLP that take the number of heads from their input."""

    def __init__(self, width: int = 12, hidden: int = 20, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, -1, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(x))))


SPECS = [
    {"patterns": [r"\d+\.qkv\.weight"], "partition_type": "column", "shape": [3, -1], "multiple": 3},
    {"patterns": [r"\d+\.out\.weight"], "partition_type": "row", "multiple": 3},
    {"patterns": [r"\d+\.up\.weight"], "partition_type": "column"},
    {"patterns": [r"\d+\.down\.weight"], "partition_type": "row"},
]


def settings(stage: int, **tensor_parallel: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "tensor_parallel": {"autotp_size": 2, **tensor_parallel},
    }


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(Block(), Block())


def samples(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_module_is_cut(ranks: int) -> None:
    """Losses of a plain loop, and one state at every stage."""
    hashes = set()
    for stage in range(4):
        models = [model() for _ in range(ranks)]

        def body(comm: libzero.Communicator, stage: int = stage, models: list[torch.nn.Module] = models) -> Any:
            config = settings(stage, partition_config={"use_default_specs": False, "layer_specs": SPECS})
            engine = libzero.Engine(models[comm.rank], config)
            assert (engine.mesh.size("tp"), engine.mesh.rank("tp")) == (2, comm.rank % 2)
            assert engine.mesh.size("dp") == ranks // 2
            assert models[comm.rank][0].up.weight.shape == (10, 12)
            losses = []
            for step in range(4):
                loss = engine(samples(engine.mesh.rank("dp"), step)).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            whole = engine.parameter_state("0.up.weight")
            assert whole.shape == (20, 12)
            return engine.state_hash(), losses

        results = libzero.run_ranks(ranks, body)
        hashes |= {each[0] for each in results}
        losses = [results[2 * d][1] for d in range(ranks // 2)]
        assert [each[1] for each in results] == [losses[r // 2] for r in range(ranks)]
    assert len(hashes) == 1
    expected = plain(
        model(), 4, lambda m, step: torch.stack([m(samples(d, step)).square().mean() for d in range(ranks // 2)]).mean()
    )
    assert [sum(each) / len(losses) for each in zip(*losses, strict=True)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.nightly
def test_over_a_process_group_of_the_program(programs: Programs) -> None:
    """The bits of `zero run`."""
    text = """
        from test_mesh import SPECS, model, samples, settings
        MODE = {mode!r}
        comm = None
        if MODE == "c10d":
            torch.distributed.init_process_group("gloo")
            comm = libzero.Communicator.from_process_group(torch.distributed.group.WORLD)
        config = settings(2, partition_config={{"use_default_specs": False, "layer_specs": SPECS}})
        engine = libzero.Engine(model(), config, comm=comm)
        assert engine.comm.transport == MODE and engine.mesh.size("tp") == 2
        for step in range(3):
            engine.backward(engine(samples(engine.mesh.rank("dp"), step)).square().mean())
            engine.step()
        digest = engine.state_hash()
        if engine.comm.rank == 0:
            print("hash", digest, flush=True)
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    found = re.findall("hash (.*)", programs.run(text.format(mode="c10d"), *torchrun))
    assert found and found == re.findall("hash (.*)", programs.ranks(text.format(mode="shm"), 2))


def test_a_llama_of_hugging_face_is_cut_by_preset() -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

    def llama() -> torch.nn.Module:
        torch.manual_seed(5)
        return transformers.LlamaForCausalLM(shape)

    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    models = [llama(), llama()]

    def body(comm: libzero.Communicator) -> list[float]:
        engine = libzero.Engine(models[comm.rank], settings(3, preset_model="llama"))
        losses = []
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    results = libzero.run_ranks(2, body)
    assert results[0] == results[1]
    reference = llama()
    expected = plain(reference, 3, lambda m, step: m(input_ids=tokens, labels=tokens).loss)
    assert results[0] == pytest.approx(expected, abs=1e-4)


def test_an_operator_that_parts_do_not_support() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.up.weight * 2).T

    models = [Odd(), Odd()]

    def body(comm: libzero.Communicator) -> None:
        specs = [{"patterns": ["up.weight"], "partition_type": "column"}]
        engine = libzero.Engine(models[comm.rank], settings(0, partition_config={"layer_specs": specs}))
        # torch raises an error of its operators as a RuntimeError.
        with pytest.raises(RuntimeError, match="aten::mul reads up.weight, of which this rank holds rows"):
            engine(torch.ones(2, 4))

    libzero.run_ranks(2, body)


def test_samples_and_writers_of_deepspeeds_engine_are_data_parallel(programs: Programs) -> None:
    programs.ranks(
        """
        import libzero.deepspeed as deepspeed

        deepspeed.init_distributed()
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        specs = [
            {"patterns": ["0.weight"], "partition_type": "column"},
            {"patterns": ["2.weight"], "partition_type": "row"},
        ]
        settings = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}},
        }
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        assert engine.get_batch_info() == (8, 2, 2), engine.get_batch_info()
        for micro in range(4):
            seed = 10 * micro + engine.get_data_parallel_rank()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(x).square().mean())
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (2, 16), (engine.global_steps, engine.global_samples)

        # A rank that writes gives no other rank its own part.
        gathered, rank = deepspeed.zero.GatheredParameters, torch.distributed.get_rank()
        for stage in (0, 3):
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            block = {**settings, "zero_optimization": {"stage": stage}}
            engine, _, _, _ = deepspeed.initialize(model=model, config=block)
            cut, bias = model[0].weight, model[2].bias
            before = engine._engine.state_dict()
            try:
                with gathered([cut, bias], modifier_rank=1), torch.no_grad():
                    raise AssertionError("a part may be sent to ranks with another one")
            except libzero.ConfigError as error:
                assert "got modifier_rank=1 for 0.weight, of which ranks have different parts" in str(error), error
            for name, value in engine._engine.state_dict().items():
                assert torch.equal(value, before[name]), name
            with gathered(bias, modifier_rank=1), torch.no_grad():
                bias.fill_(rank)
            with gathered(cut, modifier_rank=0), torch.no_grad():
                cut.fill_(rank)
            state = engine._engine.state_dict()
            assert state["2.bias"].tolist() == [1.0, 1.0], (stage, state["2.bias"])
            assert state["0.weight"].tolist() == [[0.0] * 4] * 4 + [[1.0] * 4] * 4, (stage, state["0.weight"])
        """,
        ranks=4,
    )
