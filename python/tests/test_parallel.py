"""Python's functions of tensor and sequence parallelism, with ranks as threads and as processes."""

import json
import re
from typing import Any

import pytest
import torch
from conftest import Programs, plain
from test_mesh import settings

import libzero
from libzero import tp

attend = torch.nn.functional.scaled_dot_product_attention


def numbers(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def parts(x: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    n = x.size(dim)
    return [x.narrow(dim, j * n // ranks, (j + 1) * n // ranks - j * n // ranks) for j in range(ranks)]


def test_groups_of_a_mesh() -> None:
    def body(comm: libzero.Communicator) -> Any:
        plan = {"layer_specs": [{"patterns": ["weight"], "partition_type": "column"}]}
        config = {**settings(0, partition_config=plan), "sequence_parallel_size": 2}
        mesh = libzero.Mesh.of(config)
        members = {
            dim: tuple(int(each) for each in mesh.group(dim).all_gather_bytes(str(comm.rank).encode()))
            for dim in ("dp", "sp", "tp", "dp_sp")
        }
        assert all((mesh.group(d).rank, mesh.group(d).size) == (mesh.rank(d), mesh.size(d)) for d in members)
        assert (mesh.world.rank, mesh.world.size) == (comm.rank, 8)
        assert mesh.tokens(9) == ((0, 4) if mesh.rank("sp") == 0 else (4, 9))
        with pytest.raises(libzero.ConfigError, match='got the dimension "pp", expected dp, sp, tp or dp_sp'):
            mesh.group("pp")
        with libzero.Engine(torch.nn.Linear(4, 4), config, mesh=mesh) as engine:
            assert repr(engine.mesh) == repr(mesh)
            assert engine.comm.rank == comm.rank
        with pytest.raises(libzero.ConfigError, match="got a mesh of 8 ranks"):
            libzero.Engine(torch.nn.Linear(4, 4), settings(0), mesh=mesh)
        with pytest.raises(libzero.ConfigError, match="got comm and mesh, expected one of them"):
            libzero.Engine(torch.nn.Linear(4, 4), config, comm=comm, mesh=mesh)
        return members

    # docs/parallelism.md has this table.
    found = libzero.run_ranks(8, body)
    assert {each["tp"] for each in found} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {each["sp"] for each in found} == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert {each["dp"] for each in found} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {each["dp_sp"] for each in found} == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_mappings_and_their_gradients() -> None:
    ranks = 3
    whole, weights = numbers(4, 7), [numbers(4, 7, seed=10 + j) for j in range(ranks)]
    split = parts(whole, ranks, -1)
    of_weights = [parts(w, ranks, -1) for w in weights]  # by rank that computes, and by part
    total = sum(weights)

    def body(comm: libzero.Communicator) -> None:
        j = comm.rank

        def run(function: Any, x: torch.Tensor, weight: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.clone().requires_grad_()
            y = function(x, comm, *more)
            (y * weight).sum().backward()
            assert x.grad is not None
            return y.detach(), x.grad

        def check(found: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor, gradient: torch.Tensor) -> None:
            torch.testing.assert_close(found[0], y)
            torch.testing.assert_close(found[1], gradient)

        lengths = [each.size(-1) for each in split]
        assert lengths == [2, 2, 3]
        check(run(tp.copy, whole, weights[j]), whole, total)
        check(run(tp.reduce, weights[j], whole), total, whole)
        check(run(tp.scatter, whole, split[j], -1), split[j], whole)
        check(run(tp.gather, split[j], whole, -1, lengths), whole, split[j])
        check(run(tp.gather_split, split[j], weights[j], -1, lengths), whole, sum(w[j] for w in of_weights))
        check(run(tp.reduce_scatter, weights[j], split[j], -1), sum(w[j] for w in of_weights), whole)
        with pytest.raises(libzero.ConfigError, match=r"\[tp::gather\] got dim 2"):
            tp.gather(whole, comm, 2)
        with torch.inference_mode():
            torch.testing.assert_close(tp.reduce(weights[j], comm), total)

    libzero.run_ranks(ranks, body)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_vocabulary_that_is_divided(smoothing: float) -> None:
    rows, vocabulary, width, ranks = 6, 11, 5, 3
    table, ids = numbers(vocabulary, width), torch.tensor([[0, 10, 3], [4, 4, 7]])
    logits, targets = 3 * numbers(rows, vocabulary, seed=2), torch.tensor([0, 10, -100, 3, 7, 7])

    # torch's smoothing is V / (V - 1) of Megatron's.
    reference = logits.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(
        reference, targets, label_smoothing=smoothing * vocabulary / (vocabulary - 1)
    )
    wanted.backward()
    rows_of = table.clone().requires_grad_()
    torch.nn.functional.embedding(ids, rows_of).square().sum().backward()
    assert reference.grad is not None and rows_of.grad is not None
    gradients, gradients_of_rows = parts(reference.grad, ranks, 1), parts(rows_of.grad, ranks, 0)

    def body(comm: libzero.Communicator) -> None:
        j = comm.rank
        own = parts(logits, ranks, 1)[j].clone().requires_grad_()
        loss = tp.cross_entropy(own, targets, comm, label_smoothing=smoothing, vocabulary=vocabulary)
        loss.backward()
        torch.testing.assert_close(loss.detach(), wanted.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(own.grad, gradients[j], atol=1e-5, rtol=0)
        weight = parts(table, ranks, 0)[j].clone().requires_grad_()
        begin = j * vocabulary // ranks
        found = tp.vocab_parallel_embedding(weight, ids, comm, begin=begin, vocabulary=vocabulary)
        torch.testing.assert_close(found.detach(), table[ids])
        found.square().sum().backward()
        torch.testing.assert_close(weight.grad, gradients_of_rows[j])
        with pytest.raises(IndexError):
            tp.vocab_parallel_embedding(weight, ids + 1, comm, begin=begin, vocabulary=vocabulary)
        with pytest.raises(IndexError):
            tp.cross_entropy(own, targets + 2, comm, vocabulary=vocabulary)

    libzero.run_ranks(ranks, body)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_without_a_counted_target_have_no_gradient(smoothing: float) -> None:
    """A part of a batch may be padding alone."""
    rows, vocabulary, ranks = 4, 6, 2
    logits, targets = numbers(rows, vocabulary), torch.full((rows,), -100)
    reference = logits.clone().requires_grad_()
    torch.nn.functional.cross_entropy(reference, targets, label_smoothing=smoothing).backward()
    assert reference.grad is not None
    wanted = parts(reference.grad, ranks, 1)

    def body(comm: libzero.Communicator) -> None:
        own = parts(logits, ranks, 1)[comm.rank].clone().requires_grad_()
        tp.cross_entropy(own, targets, comm, label_smoothing=smoothing, vocabulary=vocabulary).backward()
        assert own.grad is not None and torch.equal(own.grad, wanted[comm.rank])
        assert not own.grad.any()

    libzero.run_ranks(ranks, body)


@pytest.mark.parametrize(("ranks", "heads", "groups"), [(2, 4, 4), (2, 4, 2), (3, 5, 5), (2, 6, 2), (3, 6, 2)])
def test_attention_over_heads(ranks: int, heads: int, groups: int) -> None:
    tokens = 7
    q, k, v = (numbers(2, tokens, n, 3, seed=s).requires_grad_() for s, n in ((1, heads), (2, groups), (3, groups)))
    weight = numbers(2, tokens, heads, 3, seed=4)

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    wanted = local(q, k, v)
    (wanted * weight).sum().backward()

    def body(comm: libzero.Communicator) -> None:
        config = {**settings(0), "tensor_parallel": {}, "sequence_parallel_size": ranks}
        mesh = libzero.Mesh.of(config, comm)
        begin, end = mesh.tokens(tokens)
        own = [x.detach()[:, begin:end].clone().requires_grad_() for x in (q, k, v)]
        found = libzero.attention_over_heads(*own, local, mesh=mesh, tokens=tokens)
        torch.testing.assert_close(found, wanted[:, begin:end], atol=1e-5, rtol=0)
        (found * weight[:, begin:end]).sum().backward()
        for x, mine in zip((q, k, v), own, strict=True):
            assert x.grad is not None
            torch.testing.assert_close(mine.grad, x.grad[:, begin:end], atol=1e-5, rtol=0)
        of_heads = libzero.sequence_to_heads(own[0], mesh=mesh, tokens=tokens)
        assert of_heads.shape[1:3] == (tokens, (comm.rank + 1) * heads // ranks - comm.rank * heads // ranks)
        back = libzero.heads_to_sequence(of_heads, mesh=mesh, tokens=tokens, heads=heads)
        assert torch.equal(back, own[0])
        with pytest.raises(libzero.ConfigError, match="expected"):
            libzero.sequence_to_heads(own[0], mesh=mesh, tokens=tokens + ranks)

    libzero.run_ranks(ranks, body)


VOCABULARY, TOKENS = 17, 9


class Gpt(torch.nn.Module):
    """A small GPT. With a mesh of several "sp" ranks it computes on this rank's stretch of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.mesh: libzero.Mesh | None = None
        self.token = torch.nn.Embedding(VOCABULARY, 12)
        self.position = torch.nn.Embedding(TOKENS, 12)
        self.blocks = torch.nn.ModuleList([self.block() for _ in range(2)])
        self.head = torch.nn.Linear(12, VOCABULARY, bias=False)

    @staticmethod
    def block() -> torch.nn.ModuleDict:
        nn = torch.nn
        return nn.ModuleDict({
            "norm": nn.LayerNorm(12), "qkv": nn.Linear(12, 36), "out": nn.Linear(12, 12),
            "mlp": nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)),
        })  # fmt: skip

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)

        return local(q, k, v) if self.mesh is None else libzero.attention_over_heads(
            q, k, v, local, mesh=self.mesh, tokens=TOKENS)  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        begin, end = (0, TOKENS) if self.mesh is None else self.mesh.tokens(TOKENS)
        x = self.token(ids[:, begin:end]) + self.position.weight[begin:end]
        for block in self.blocks:
            b, s, _ = x.shape
            q, k, v = block["qkv"](block["norm"](x)).view(b, s, 3, -1, 3).unbind(2)
            x = x + block["out"](self.attention(q, k, v).reshape(b, s, -1))
            x = x + block["mlp"](x)
        return self.head(x)


def text(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def reference(data_ranks: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a plain loop, and the gradients of its first step."""

    def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
        batches = [text(d, step) for d in range(data_ranks)]
        total = sum((loss_sum(model(each[:, :-1]), each[:, 1:]) for each in batches), torch.zeros(()))
        return total / (data_ranks * 2 * TOKENS)

    model = Gpt()
    loss_of(model, 0).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return plain(Gpt(), steps, loss_of), gradients


def train_on_stretches(engine: libzero.Engine, model: Gpt, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same on an engine: this rank's sum of losses by step, and the first step's gradients."""
    model.mesh = engine.mesh
    begin, end = engine.mesh.tokens(TOKENS)
    losses, gradients = [], {}
    for step in range(steps):
        batch = text(engine.mesh.rank("dp"), step)
        loss = loss_sum(engine(batch[:, :-1]), batch[:, 1:][:, begin:end])
        losses.append(loss.item())
        engine.backward(loss, tokens=2 * (end - begin))
        if step == 0:
            for name, _ in model.named_parameters():
                gradient = engine.gradient(name)
                assert gradient is not None
                gradients[name] = gradient
        engine.step()
    return losses, gradients


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 3), (4, 2)])
def test_a_gpt_whose_tokens_are_divided(ranks: int, stage: int) -> None:
    """Uneven stretches: losses and gradients of one rank."""
    models = [Gpt() for _ in range(ranks)]

    def body(comm: libzero.Communicator) -> Any:
        config = {**settings(stage), "tensor_parallel": {}, "sequence_parallel_size": 2}
        engine = libzero.Engine(models[comm.rank], config)
        return train_on_stretches(engine, models[comm.rank], 3)

    results = libzero.run_ranks(ranks, body)
    losses, gradients = reference(ranks // 2, 3)
    count = ranks // 2 * 2 * TOKENS
    assert [sum(each) / count for each in zip(*(r[0] for r in results), strict=True)] == pytest.approx(losses, abs=1e-5)
    for _, found in results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=0, msg=name)


@pytest.mark.nightly
def test_both_in_processes(programs: Programs) -> None:
    """t = 2 with a divided vocabulary and u = 2, by shared memory: losses of one rank."""
    out = programs.ranks(
        """
        import json
        from libzero import tp
        from test_mesh import settings
        from test_parallel import TOKENS, VOCABULARY, Gpt, text

        specs = [
            {"patterns": [r".*qkv\\.weight"], "partition_type": "column", "shape": [3, -1], "multiple": 3},
            {"patterns": [r".*out\\.weight", r".*mlp\\.3\\.weight"], "partition_type": "row"},
            {"patterns": [r".*mlp\\.1\\.weight", r"token\\.weight", r"head\\.weight"], "partition_type": "column"},
        ]
        cuts = {"layer_specs": specs, "lm_head_patterns": ["head"]}
        plan = {"partition_config": cuts, "vocab_parallel_lm_head": True}
        model = Gpt()
        mesh = libzero.Mesh.of({**settings(3, **plan), "sequence_parallel_size": 2})
        engine = libzero.Engine(model, {**settings(3, **plan), "sequence_parallel_size": 2}, mesh=mesh)
        model.mesh = mesh
        begin, end = mesh.tokens(TOKENS)
        losses = []
        for step in range(3):
            batch = text(mesh.rank("dp"), step)
            logits = engine(batch[:, :-1])
            assert logits.size(-1) == (8 if mesh.rank("tp") == 0 else 9)
            targets = batch[:, 1:][:, begin:end].flatten()
            mean = tp.cross_entropy(logits.flatten(0, 1), targets, mesh.group("tp"), vocabulary=VOCABULARY)
            losses.append(mean.item() * targets.numel())
            engine.backward(mean * targets.numel(), tokens=targets.numel())
            engine.step()
        print("losses", mesh.rank("tp"), json.dumps(losses), flush=True)
        assert engine.comm.stats()["by_op"]["sp.all_to_all"][0] > 0
        """,
        ranks=4,
    )
    losses = [json.loads(each) for each in re.findall(r"losses 0 (\[.*\])", out)]
    assert len(losses) == 2, out
    expected, _ = reference(1, 3)
    assert [sum(each) / (2 * TOKENS) for each in zip(*losses, strict=True)] == pytest.approx(expected, abs=1e-5)


def test_a_call_of_one_rank_only_does_not_hold_the_gil() -> None:
    """The other rank, a thread of this process, would never get to its call."""

    def body(comm: libzero.Communicator) -> float:
        if comm.rank == 1:
            sum(range(2_000_000))
        return tp.reduce(torch.ones(3), comm).sum().item()

    assert libzero.run_ranks(2, body) == [6.0, 6.0]
