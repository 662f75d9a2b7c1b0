"""Loops as programs for DeepSpeed write them, at every stage on two ranks: the parameters of a plain torch loop, or an
error that says what to do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import config
from test_loops import RANKS, State, draw, every_stage, mean_of, require_close, require_moved
from torch import nn

import libzero
from libzero import deepspeed


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    x = draw(rank, step, 5, 6)
    return (model(x) - x[:, :2]).square().mean()  # type: ignore[no-any-return]


def without_optimizer(stage: int, **more: Any) -> dict[str, Any]:
    settings = config(stage, **more)
    del settings["optimizer"]
    return settings


def one_step(engine: deepspeed.DeepSpeedEngine, step: int) -> None:
    engine.backward(loss_of(engine, engine.global_rank, step))
    engine.step()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, clipping: float = 0.0) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(mean_of(loss_of(model, rank, step) for rank in range(RANKS)))
    if clipping:
        nn.utils.clip_grad_norm_(model.parameters(), clipping)
    optimizer.step()


def state_of(engine: deepspeed.DeepSpeedEngine) -> State:
    return engine._engine.state_dict()


# ---- several losses, several models ---------------------------------------------------------------


class Pair:
    """A generator and its discriminator."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.discriminator, self.generator)
        return [torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.99)) for part in parts]


def judged(scores: torch.Tensor, real: bool) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def adversaries_by_loop(steps: int) -> Pair:
    pair = Pair()
    of_discriminator, of_generator = pair.optimizers()
    for step in range(steps):
        data = [(draw(rank, step, 5, 6) + 1, draw(rank + 7, step, 5, 3)) for rank in range(RANKS)]
        of_discriminator.zero_grad()
        for real, noise in data:
            torch.autograd.backward(judged(pair.discriminator(real), True) / RANKS)
            torch.autograd.backward(judged(pair.discriminator(pair.generator(noise).detach()), False) / RANKS)
        of_discriminator.step()
        of_generator.zero_grad()
        for _, noise in data:
            torch.autograd.backward(judged(pair.discriminator(pair.generator(noise)), True) / RANKS)
        of_generator.step()
    return pair


@every_stage
@pytest.mark.parametrize("form", ["sum", "two losses"])
def test_adversaries_train_as_in_a_plain_loop(form: str, stage: int) -> None:
    """The generator's loss goes through the discriminator, which it leaves as it is."""
    steps, pairs = 3, [Pair() for _ in range(RANKS)]
    wanted = adversaries_by_loop(steps)
    require_moved(Pair().discriminator, wanted.discriminator.state_dict(), "0.weight")

    def body(comm: libzero.Communicator) -> None:
        pair = pairs[comm.rank]
        parts = zip((pair.discriminator, pair.generator), pair.optimizers(), (1 + (form != "sum"), 1), strict=True)
        discriminator, generator = (
            deepspeed.initialize(
                model=part, optimizer=optimizer, config=without_optimizer(stage, gradient_accumulation_steps=losses)
            )[0]
            for part, optimizer, losses in parts
        )
        for step in range(steps):
            real, noise = draw(comm.rank, step, 5, 6) + 1, draw(comm.rank + 7, step, 5, 3)
            fake = generator(noise)
            losses = [(real, True), (fake.detach(), False)]
            if form == "sum":
                discriminator.backward(2 * mean_of(judged(discriminator(x), is_real) for x, is_real in losses))
                discriminator.step()
            else:
                for x, is_real in losses:
                    discriminator.backward(judged(discriminator(x), is_real), scale_wrt_gas=False)
                    discriminator.step()
            generator.backward(judged(discriminator(fake), True))
            generator.step()
        require_close(state_of(discriminator), wanted.discriminator.state_dict())
        require_close(state_of(generator), wanted.generator.state_dict())

    libzero.run_ranks(RANKS, body)


@every_stage
def test_a_second_loss_before_the_step_is_refused_on_every_rank(stage: int) -> None:
    models = [net() for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> None:
        engine, *_ = deepspeed.initialize(model=models[comm.rank], config=config(stage))
        engine.backward(loss_of(engine, comm.rank, 0))
        with pytest.raises(libzero.ConfigError, match=r"gradient_accumulation_steps is 1.*or add the losses up"):
            engine.backward(loss_of(engine, comm.rank, 1))

    libzero.run_ranks(RANKS, body)


@every_stage
def test_an_average_of_the_weights_in_an_engine_of_its_own(stage: int, tmp_path: Path) -> None:
    """It is whole on both ranks, in its forward and in its checkpoint."""
    plain, average = net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        plain_step(plain, optimizer, step)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), plain.parameters(), strict=True):
                mean.lerp_(p, 0.25)
    require_moved(net(), average.state_dict(), "0.weight", "4.bias")
    models, means = [net() for _ in range(RANKS)], [net() for _ in range(RANKS)]
    block = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}

    def body(comm: libzero.Communicator) -> None:
        model, mean = models[comm.rank], means[comm.rank]
        engine, *_ = deepspeed.initialize(model=model, config=config(stage, optimizer=block))
        holder, *_ = deepspeed.initialize(model=mean, config=without_optimizer(stage))
        for step in range(3):
            one_step(engine, step)
            for a, p in zip(mean.parameters(), model.parameters(), strict=True):
                with deepspeed.zero.GatheredParameters([p]), deepspeed.zero.GatheredParameters([a], modifier_rank=0):
                    if comm.rank == 0:
                        with torch.no_grad():
                            a.lerp_(p, 0.25)
        require_close(state_of(holder), average.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(holder(draw(9, 9, 3, 6)), average(draw(9, 9, 3, 6)))
        holder.save_checkpoint(tmp_path, tag="mean")
        with pytest.raises(RuntimeError, match="would be lost"), torch.no_grad():  # not said to be written
            with deepspeed.zero.GatheredParameters([*mean.parameters()]):
                next(mean.parameters()).lerp_(torch.zeros(24, 6), 0.5)

    libzero.run_ranks(RANKS, body)
    files = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "mean")
    require_close(files, average.state_dict())


# ---- what is frozen, and when ---------------------------------------------------------------------


@every_stage
def test_a_backbone_trains_from_the_step_that_unfreezes_it(stage: int) -> None:
    """Each group at its own rate, as in a plain loop."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        body, head = list(model[:4].parameters()), list(model[4].parameters())  # type: ignore[index]
        return torch.optim.AdamW([{"params": head, "lr": 2e-2}, {"params": body, "lr": 1e-3}], weight_decay=0.0)

    def freeze(model: Any, frozen: bool) -> None:
        model[:4].requires_grad_(not frozen)

    plain = net()
    freeze(plain, True)
    optimizer = groups(plain)
    for step in range(4):
        freeze(plain, step < 2)
        plain_step(plain, optimizer, step)
    require_moved(net(), plain.state_dict(), "0.weight", "4.weight")
    models = [net() for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        freeze(model, True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=groups(model), config=without_optimizer(stage))
        for step in range(4):
            freeze(model, step < 2)
            one_step(engine, step)
        require_close(state_of(engine), plain.state_dict())

    libzero.run_ranks(RANKS, body)


@every_stage
def test_a_reference_is_a_copy_made_before_the_engine(stage: int) -> None:
    """It gets an engine with the whole configuration, as preference training makes one."""
    settings = config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}})
    plain, first = net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)

    def apart(policy: Any, reference: Any, rank: int, step: int) -> torch.Tensor:
        x = draw(rank, step, 5, 6)
        with torch.no_grad():
            base = reference(x)
        return (policy(x) - base - x[:, :2]).square().mean()  # type: ignore[no-any-return]

    for step in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(mean_of(apart(plain, first, rank, step) for rank in range(RANKS)))
        optimizer.step()
    models = [net() for _ in range(RANKS)]
    copies = [copy.deepcopy(model).eval().requires_grad_(False) for model in models]

    def body(comm: libzero.Communicator) -> None:
        policy, *_ = deepspeed.initialize(model=models[comm.rank], config=settings)
        reference, *_ = deepspeed.initialize(model=copies[comm.rank], config=settings)
        for step in range(3):
            policy.backward(apart(policy, reference, comm.rank, step))
            policy.step()
        require_close(state_of(policy), plain.state_dict())
        require_close(state_of(reference), first.state_dict(), 0.0)
        with pytest.raises(libzero.ConfigError, match="Hint"):
            copy.deepcopy(models[comm.rank])

    libzero.run_ranks(RANKS, body)


@every_stage
def test_two_engines_never_share_a_layer(stage: int) -> None:
    pairs = [(net(1), net(2)) for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> None:
        policy, reference = pairs[comm.rank]
        reference[0] = policy[0]
        engine, *_ = deepspeed.initialize(model=policy, config=config(stage))
        with pytest.raises(libzero.ConfigError, match=r"parameter 0\.weight: is held by another Engine"):
            deepspeed.initialize(model=reference, config=config(stage))
        one_step(engine, 0)

    libzero.run_ranks(RANKS, body)


# ---- weights that change behind the engine --------------------------------------------------------


class Tied(nn.Module):
    """Rows of a table are its output layer's too."""

    def __init__(self, rows: int = 10) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.out = nn.Embedding(rows, 8), nn.Linear(8, rows, bias=False)
        self.out.weight = self.table.weight

    def resize(self, rows: int) -> None:
        """As transformers does it: new modules."""
        old = self.table.weight.detach()
        self.table, self.out = nn.Embedding(rows, 8), nn.Linear(8, rows, bias=False)
        with torch.no_grad():
            self.table.weight[: len(old)] = old
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.table(ids).tanh()), ids.roll(1))


@every_stage
def test_a_table_may_grow_before_the_engine_and_not_after(stage: int) -> None:
    def grown() -> Tied:
        model = Tied()
        with deepspeed.zero.Init(config_dict_or_path=config(stage)):
            model.resize(12)
        return model

    def ids_of(rank: int) -> torch.Tensor:
        return torch.tensor([rank, 11, 3, 9 - rank])

    models = [grown() for _ in range(RANKS)]
    with deepspeed.zero.GatheredParameters([*models[0].parameters()]):
        plain = copy.deepcopy(models[0])
    with deepspeed.zero.GatheredParameters([*models[1].parameters()], modifier_rank=0):
        models[1].load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(mean_of(plain(ids_of(rank)) for rank in range(RANKS)))
        optimizer.step()

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine, *_ = deepspeed.initialize(model=model, config=config(stage))
        for _ in range(2):
            engine.backward(engine(ids_of(comm.rank)))
            engine.step()
        state = state_of(engine)
        require_close(state, plain.state_dict())
        assert state["table.weight"].shape == (12, 8) and model.out.weight is model.table.weight

    libzero.run_ranks(RANKS, body)
    models = [Tied() for _ in range(RANKS)]

    def late(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine, *_ = deepspeed.initialize(model=model, config=config(stage))
        with engine._engine.gathered_parameters():
            model.resize(12)
        with pytest.raises(libzero.ConfigError, match=r"table\.weight.*Hint"):
            engine.backward(engine(torch.tensor([11, 3])))
            engine.step()

    libzero.run_ranks(RANKS, late)


@every_stage
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data", "load_module_state_dict"])
def test_weights_loaded_after_initialize_arrive_or_are_refused(how: str, bf16: bool, stage: int) -> None:
    """Arrived means: in the masters, also after updates that change next to nothing."""
    wanted, dtype = net(9).state_dict(), torch.bfloat16 if bf16 else torch.float32
    models = [net(2) for _ in range(RANKS)]
    block = {"type": "AdamW", "params": {"lr": 1e-9, "weight_decay": 0.0}}

    def load(engine: deepspeed.DeepSpeedEngine) -> None:
        if how == "load_state_dict":
            engine.module.load_state_dict(wanted)
        elif how == "load_module_state_dict":
            engine.load_module_state_dict({"module": wanted})
        for name, p in engine.module.named_parameters():
            if how == "copy_":
                p.data.copy_(wanted[name])
            elif how == "data":
                p.data = wanted[name].to(dtype)

    def body(comm: libzero.Communicator) -> str:
        settings = config(stage, optimizer=block, bf16={"enabled": bf16})
        engine, *_ = deepspeed.initialize(model=models[comm.rank], config=settings)
        try:
            load(engine)
            for step in range(2):
                engine.backward(engine(draw(comm.rank, step, 5, 6).to(dtype)).float().square().mean())
                engine.step()
        except (libzero.ConfigError, RuntimeError) as error:
            assert how != "load_module_state_dict"
            return str(error)
        for name, p in engine._engine.full_state_dict().items():
            torch.testing.assert_close(p, wanted[name], atol=1e-2 if bf16 else 1e-6, rtol=0)
        return ""

    for error in libzero.run_ranks(RANKS, body):
        assert "Hint" in error or not error, error


# ---- updates --------------------------------------------------------------------------------------


OFFLOADS: list[dict[str, Any]] = [
    {"offload_optimizer": {"device": "cpu"}},
    {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}},
]


@pytest.mark.parametrize(
    ("stage", "offload"), [*((s, {}) for s in range(4)), *((s, OFFLOADS[0]) for s in (1, 2, 3)), (3, OFFLOADS[1])]
)
def test_a_programs_optimizer_and_scheduler_with_states_in_host_memory(stage: int, offload: dict[str, Any]) -> None:
    """Groups with rates and decays of their own."""

    def made(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        flat = [p for p in model.parameters() if p.ndim == 1]
        rest = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": flat, "weight_decay": 0.0, "lr": 4e-3}, {"params": rest, "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.7, 0.9), eps=1e-5)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[4e-3, 1e-2], total_steps=6, cycle_momentum=False
        )

    plain = net()
    optimizer, scheduler = made(plain)
    for step in range(4):
        plain_step(plain, optimizer, step, 0.4)
        scheduler.step()
    models = [net() for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> None:
        settings = without_optimizer(stage, zero_optimization={"stage": stage, **offload})
        settings |= {"gradient_clipping": 0.4, "zero_allow_untested_optimizer": True}
        mine, of_mine = made(models[comm.rank])
        engine, *_ = deepspeed.initialize(
            model=models[comm.rank], optimizer=mine, lr_scheduler=of_mine, config=settings
        )
        for step in range(4):
            one_step(engine, step)
        require_close(state_of(engine), plain.state_dict())
        assert engine.get_lr() == pytest.approx(scheduler.get_last_lr())

    libzero.run_ranks(RANKS, body)


@every_stage
def test_gradients_that_overflow_at_every_scale_end_the_run(stage: int) -> None:
    models, most, kept = [net() for _ in range(RANKS)], 4, net().half().state_dict()
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 5, "hysteresis": 2, "min_loss_scale": 2}

    def body(comm: libzero.Communicator) -> tuple[int, str]:
        settings = config(stage, fp16=fp16, libzero={"max_skipped_steps": most})
        engine, optimizer, *_ = deepspeed.initialize(model=models[comm.rank], config=settings)
        assert optimizer is not None
        for step, scale in enumerate([32, 16, 8, 4, *[2] * most]):
            engine.backward(engine(draw(comm.rank, step, 5, 6).half()).float().square().mean() * 1e9)
            engine.step()
            assert optimizer.cur_scale == scale and engine.skipped_steps == step + 1
        require_close(state_of(engine), kept, 0.0)
        engine.backward(engine(draw(comm.rank, 9, 5, 6).half()).float().square().mean() * 1e9)
        try:
            engine.step()
        except (libzero.InternalError, libzero.CommError) as error:  # CommError: the other rank was first
            return error.code, str(error)
        return 0, ""

    ends = libzero.run_ranks(RANKS, body)
    assert 7 in [code for code, _ in ends]
    for _, text in ends:
        assert "4 steps in a row had non-finite gradients at the minimum loss scale, 2, first" in text
        assert "first in 4.weight (in the shard of rank 0)" in text


@every_stage
def test_a_resume_on_another_number_of_ranks_at_another_stage(stage: int, tmp_path: Path) -> None:
    """2 ranks, then 3, then 1; a step has the same 12 rows on all."""
    schedule = {"warmup_max_lr": 0.04, "warmup_min_lr": 0.0, "warmup_num_steps": 2, "total_num_steps": 10}
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    for step in range(7):
        done = step - 1  # the rate of an update is that of the one before
        optimizer.param_groups[0]["lr"] = 0.04 * max(0.0, done / 2 if done < 2 else (10 - done) / 8)
        optimizer.zero_grad()
        x = draw(0, step, 12, 6)
        torch.autograd.backward((plain(x) - x[:, :2]).square().mean())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
        optimizer.step()
    models = {world: [net(1 if world == 2 else 5) for _ in range(world)] for world in (1, 2, 3)}

    def body(comm: libzero.Communicator, first: int, last: int, at: int) -> State:
        micro = 4 if comm.size == 3 else 12 // comm.size // 2
        settings = config(
            at,
            train_batch_size=12,
            train_micro_batch_size_per_gpu=micro,
            gradient_clipping=0.4,
            optimizer={"type": "AdamW", "params": {"lr": 0.04, "weight_decay": 0.1}},
            scheduler={"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        )
        engine, *_ = deepspeed.initialize(model=models[comm.size][comm.rank], config=settings)
        if first:
            path, state = engine.load_checkpoint(tmp_path)
            assert path is not None and state == {"step": first} and engine.global_steps == first
        for step in range(first, last):
            x = draw(0, step, 12, 6)
            for part in range(engine.gradient_accumulation_steps()):
                mine = x[(part * comm.size + comm.rank) * micro :][:micro]
                engine.backward((engine(mine) - mine[:, :2]).square().mean())
                engine.step()
        engine.save_checkpoint(tmp_path, client_state={"step": last})
        return state_of(engine)

    for world, first, last, at in ((2, 0, 3, stage), (3, 3, 5, (stage + 1) % 4), (1, 5, 7, (stage + 2) % 4)):
        states = libzero.run_ranks(world, lambda comm: body(comm, first, last, at))  # noqa: B023
    require_close(states[0], plain.state_dict())


# ---- a batch that grows ---------------------------------------------------------------------------


@every_stage
@pytest.mark.parametrize("of_torch", [False, True])
def test_the_batch_may_change_between_updates(of_torch: bool, stage: int) -> None:
    counts = [2, 4, 4, 1, 3]  # micro-batches of each update; the configuration has 2
    plain = net(2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = 0
    for count in counts:
        optimizer.zero_grad()
        for _ in range(count):
            torch.autograd.backward(mean_of(loss_of(plain, rank, step) / count for rank in range(RANKS)))
            step += 1
        optimizer.step()
    models = [net(2) for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> None:
        block = {"type": "SGD", "params": {"lr": 0.1}}
        settings = {**without_optimizer(stage), "optimizer": block, "gradient_clipping": 0.0}
        settings = {key: value for key, value in settings.items() if key != "train_batch_size"}
        settings.update(train_micro_batch_size_per_gpu=5, gradient_accumulation_steps=2)
        engine, *_ = deepspeed.initialize(model=models[comm.rank], config=settings)
        one, step, samples = 5 * RANKS, 0, 0
        for number, count in enumerate(counts):
            engine.set_train_batch_size(count * one)
            assert engine.get_batch_info() == (count * one, 5, count)
            for i in range(count):
                assert engine.is_gradient_accumulation_boundary() == (i == count - 1)
                loss = loss_of(engine, comm.rank, step)
                if of_torch:
                    loss.backward()
                else:
                    assert engine.backward(loss) == pytest.approx(loss.item() / count)
                if count > 1 and i == 0:
                    with pytest.raises(libzero.ConfigError, match="set_accumulation_steps"):
                        engine.set_train_batch_size(7 * one)
                engine.step()
                step += 1
            samples += count * one
            assert engine.global_steps == number + 1 and engine.global_samples == samples and engine.was_step_applied()
        require_close(state_of(engine), plain.state_dict())
        with pytest.raises(ValueError, match=f"got {one + 1}, expected a multiple of {one}"):
            engine.set_train_batch_size(one + 1)
        engine.set_train_micro_batch_size(10)
        assert engine.get_batch_info() == (2 * 3 * one, 10, 3)

    libzero.run_ranks(RANKS, body)
