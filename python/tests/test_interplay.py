"""The rest of PyTorch and Hugging Face with an engine at stage 3: the bits of stage 0, which frees no parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, config, network
from test_models import example, ids, same, trained
from torch.utils.checkpoint import checkpoint

import libzero


def hashes(make: Callable[[], torch.nn.Module], loss_of: Callable[[Any, int], torch.Tensor], stage: int) -> list[str]:
    """State of two ranks after three steps."""
    models = [make() for _ in range(2)]

    def body(comm: libzero.Communicator) -> str:
        with libzero.Engine(models[comm.rank], config(stage)) as engine:
            trained(engine, loss_of, 3, comm.rank, 2)
            return engine.state_hash()

    return libzero.run_ranks(2, body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_torch_and_of_hugging_face(reentrant: bool) -> None:
    def recomputed(model: Any, step: int) -> torch.Tensor:
        x = batch(0, step).requires_grad_()
        for layer in getattr(model, "module", model):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    def plainly(model: Any, step: int) -> torch.Tensor:
        return model(batch(0, step)).square().mean()  # type: ignore[no-any-return]

    assert len({*hashes(network, recomputed, 3), *hashes(network, plainly, 3), *hashes(network, plainly, 0)}) == 1

    make, loss_of = example("llama")
    runs = []

    def with_checkpoints() -> torch.nn.Module:
        model: Any = make()  # in train mode, where checkpointing acts, without dropout
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
        return model  # type: ignore[no-any-return]

    assert len({*hashes(with_checkpoints, loss_of, 3), *hashes(lambda: make().eval(), loss_of, 0)}) == 1
    assert len(runs) == 2 * 3 * 2  # ranks, steps, forward and recomputation


def test_generation_between_steps_with_prompts_of_different_lengths() -> None:
    make, loss_of = example("gpt2")
    words = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}

    def body(comm: libzero.Communicator) -> tuple[str, list[torch.Tensor], torch.Tensor]:
        with libzero.Engine(models[comm.rank], config(stage)) as engine:
            model: Any = engine.module
            prompt = ids(50 + comm.rank, 3 + 4 * comm.rank)
            trained(engine, loss_of, 2, comm.rank, 2)
            texts = [model.generate(prompt, **words)] if generates else []
            trained(engine, loss_of, 1, 4 + comm.rank, 2)
            if generates:
                more = {**words, "min_new_tokens": 2 + 3 * comm.rank, "max_new_tokens": 2 + 3 * comm.rank}
                with engine.gathered_parameters():  # ranks may take different numbers of steps
                    texts.append(model.generate(prompt, **more))
            trained(engine, loss_of, 1, 6 + comm.rank, 2)
            return engine.state_hash(), texts, prompt

    seen = {}
    for stage, generates in ((0, False), (0, True), (3, True)):
        models = [make().eval() for _ in range(2)]
        seen[stage, generates] = libzero.run_ranks(2, body)
    digests = {result[0] for results in seen.values() for result in results}
    assert len(digests) == 1
    for ours, theirs in zip(seen[3, True], seen[0, True], strict=True):
        assert all(same(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
        assert ours[1][0].shape[1] == ours[2].shape[1] + 4


def test_a_traced_model_computes_what_the_model_computes() -> None:
    def run(stage: int) -> tuple[torch.Tensor, str]:
        with libzero.Engine(network(), config(stage)) as engine:
            traced = torch.jit.trace(engine.module, batch())  # type: ignore[no-untyped-call]
            for step in range(2):
                engine.backward(traced(batch(0, step)).square().mean())
                engine.step()
            return traced(batch(0, 5)).detach(), engine.state_hash()

    (ours, digest), (theirs, expected) = run(3), run(0)
    assert same(ours, theirs) and digest == expected


def test_weight_norm_and_functional_transforms() -> None:
    def normed() -> torch.nn.Module:
        model = network()
        torch.nn.utils.parametrizations.weight_norm(model[2])
        return model

    def loss_of(model: Any, step: int) -> torch.Tensor:
        return model(batch(0, step)).square().mean()  # type: ignore[no-any-return]

    assert len({*hashes(normed, loss_of, 3), *hashes(normed, loss_of, 0)}) == 1

    def transforms(stage: int) -> list[torch.Tensor]:
        with libzero.Engine(network(), config(stage)) as engine:
            trained(engine, loss_of, 1)
            model, x = engine.module, batch()
            values: dict[str, torch.Tensor] = dict(model.named_parameters())

            def of(one: torch.Tensor) -> torch.Tensor:
                return torch.func.functional_call(model, values, (one,)).square().sum()  # type: ignore[no-any-return]

            return [
                torch.func.vmap(of)(x),
                torch.func.grad(of)(x),
                torch.func.vmap(torch.func.grad(of))(x),
                torch.func.jvp(of, (x,), (torch.ones_like(x),))[1],
                torch.func.jacrev(model)(x[0]),
            ]

    assert all(same(ours.detach(), theirs.detach()) for ours, theirs in zip(transforms(3), transforms(0), strict=True))


def test_a_critic_with_a_gradient_penalty_and_its_generator() -> None:
    """Two engines, double backward through one of them, and gradients that cross both."""

    def run(stage: int) -> tuple[str, ...]:
        pairs = [(network(1), network(2)) for _ in range(2)]

        def body(comm: libzero.Communicator) -> tuple[str, str]:
            generator, critic = (libzero.Engine(model, config(stage)) for model in pairs[comm.rank])
            widen = torch.eye(4, 8)
            for step in range(3):
                real, fake = batch(comm.rank, step), generator(batch(comm.rank, 10 + step)) @ widen
                mixed = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().mean()
                critic.backward(critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty)
                critic.step()
                generator.backward(-critic(fake).mean())
                generator.step()
            return generator.state_hash(), critic.state_hash()

        return tuple(sorted({digest for result in libzero.run_ranks(2, body) for digest in result}))

    assert run(3) == run(0) and len(run(3)) == 2
