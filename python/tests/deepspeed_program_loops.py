"""Cases of deepspeed_program.py: loops of training that programs write, and what they call around them."""

import contextlib
import os
import shutil
import tempfile

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed_program import HIDDEN, SimpleModel, batches, config, model, start

STAGES = (1, 2, 3)


def without_optimizer(stage, **more):
    return {key: value for key, value in config(stage, **more).items() if key != "optimizer"}


def sums(network):
    """Of whole parameters, by name."""
    with deepspeed.zero.GatheredParameters(list(network.parameters())):
        return {name: float(p.detach().float().sum()) for name, p in network.named_parameters()}


def run(engine, count, backward=None, before=None):
    """A loop in which the program has its own backward(loss, number), and before(number) a micro-batch."""
    losses = []
    for number, (x, y) in enumerate(batches(engine, count)):
        if before is not None:
            before(number)
        loss = engine(x, y)
        if backward is None:
            engine.backward(loss)
        else:
            backward(loss, number)
        engine.step()
        losses.append(loss.item())
    return {"loss": losses, "steps": engine.global_steps, "sums": sums(engine.module)}


def refused(error, call, *words, **more):
    """Whether the call raises such an error."""
    try:
        call(*words, **more)
    except Exception as raised:
        return isinstance(raised, error)
    return False


@contextlib.contextmanager
def folder_of_rank_0():
    folder = [tempfile.mkdtemp()] if deepspeed.comm.get_rank() == 0 else [None]
    deepspeed.comm.broadcast_object_list(folder, src=0)
    yield folder[0]
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        shutil.rmtree(folder[0])


# ---- backward() and boundaries ----
class Outputs(SimpleModel):
    """Returns rows, and no loss."""

    def forward(self, x):
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


def backwards():
    """backward() of torch: of a loss, of what is no scalar, of one sum of the losses of two engines."""
    seen = {}
    for stage in STAGES:
        engine = start(stage, gradient_accumulation_steps=2)
        seen[f"loss, {stage}"] = run(engine, 4, lambda loss, number: loss.backward())
        torch.manual_seed(1)
        engine = start(stage, network=Outputs())
        for x, y in batches(engine, 2):
            engine(x).backward(torch.ones(len(y), HIDDEN) / 64)
            engine.step()
        seen[f"rows, {stage}"] = sums(engine.module)
        engines = [start(stage), start(stage, seed=2)]
        for x, y in batches(engines[0], 2):
            (engines[0](x, y) + 0.5 * engines[1](x, y)).backward()
            for engine in engines:
                engine.step()
        seen[f"two engines, {stage}"] = [sums(engine.module) for engine in engines]
    return seen


def scaled():
    """With fp16 a backward() of torch is one of engine.scale(loss)."""
    fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1000}
    seen = {}
    for stage in STAGES:
        engine = start(stage, fp16=fp16, gradient_accumulation_steps=2)
        seen[str(stage)] = run(engine, 4, lambda loss, number, engine=engine: engine.scale(loss).backward())
        named = engine.module.named_parameters()
        seen[str(stage)]["sums"] = {name: float(safe_get_full_fp32_param(p).sum()) for name, p in named}
        x, y = next(batches(engine, 1))
        loss = engine(x, y)
        seen[f"scaled at {stage}"] = float(engine.scale(loss).detach()) / loss.item()
        engine = start(stage, fp16=fp16)
        seen[f"not a scalar at {stage}"] = refused(AssertionError, engine.scale, engine.module.linears[0].bias)
        seen[f"not scaled at {stage}"] = refused(RuntimeError, lambda engine=engine: engine(x, y).backward())
    return seen


def boundaries():
    """The program says when a step ends, with gradient_accumulation_steps 1."""
    seen = {}
    for stage in STAGES:
        engine = start(stage)
        count = engine.set_gradient_accumulation_boundary
        seen[f"counted, {stage}"] = run(engine, 4, before=lambda number, count=count: count(number % 2 == 1))
        engine = start(stage)
        for _ in range(2):
            with engine.coalesce_grad_reduction():
                for x, y in batches(engine, 3):
                    engine.backward(engine(x, y))
                stopped = refused(AssertionError, engine.step)
                nested = refused(AssertionError, engine.coalesce_grad_reduction().__enter__)
            engine.step()
        seen[f"coalesced, {stage}"] = [engine.global_steps, stopped, nested, sums(engine.module)]
        engine = start(stage)
        if stage > 1:
            seen[f"no_sync, {stage}"] = refused(AssertionError, engine.no_sync().__enter__)
            continue
        for first in (True, False) * 2:
            x, y = next(batches(engine, 1))
            with engine.no_sync() if first else contextlib.nullcontext():
                engine.backward(engine(x, y))
                if first:
                    stopped = refused(AssertionError, engine.step)
            if not first:
                engine.step()
        seen[f"no_sync, {stage}"] = [engine.global_steps, stopped, sums(engine.module)]
    return seen


def caches():
    """empty_partition_cache() at every moment."""
    seen = {}
    for stage in STAGES:
        engine = start(stage)
        for x, y in batches(engine, 3):
            engine.empty_partition_cache()
            loss = engine(x, y)
            engine.backward(loss)
            engine.empty_partition_cache()
            engine.step()
        engine.empty_partition_cache()
        seen[str(stage)] = [loss.item(), sums(engine.module)]
    return seen


# ---- optimizers ----
class Rule(torch.optim.Optimizer):
    """An element-wise rule of the program's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                    p -= group["lr"] * m / (1 + m.abs())


def own_rules():
    seen = {}
    for stage in (0, *STAGES):
        network = model()
        groups = [{"params": network.linears[0].parameters()}, {"params": network.linears[1].parameters(), "lr": 0.02}]
        settings = without_optimizer(stage, zero_allow_untested_optimizer=True)
        engine, optimizer, _, _ = deepspeed.initialize(model=network, optimizer=Rule(groups, 0.1), config=settings)
        seen[str(stage)] = run(engine, 4)
        seen[str(stage)]["rates"] = [group["lr"] for group in optimizer.param_groups]
    return seen


def optimizers():
    """What initialize() returns as the optimizer, and what programs read of it."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4}
    bf16, sums_in_fp32 = {"enabled": True}, {"grad_accum_dtype": "fp32"}
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    seen = {}
    for name, (stage, more) in {
        "0": (0, {"optimizer": adam}),
        "0, fp16": (0, {"fp16": fp16}),
        "1": (1, {}),
        "1, bf16, fp32 sums": (1, {"bf16": bf16, "data_types": sums_in_fp32}),
        "2, bf16": (2, {"bf16": bf16}),
        "2, fp16": (2, {"fp16": fp16}),
        "2, offload": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
        "3": (3, {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}),
        "3, fp16": (3, {"fp16": {**fp16, "loss_scale": 32}}),
    }.items():
        engine, optimizer, _, _ = deepspeed.initialize(model=model(), config=config(stage, **more))
        inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
        seen[name] = [type(optimizer).__name__, type(inner).__name__, inner.param_groups[0]["lr"]]
        if "fp16" in name and stage:
            scaler = optimizer.loss_scaler
            numbers = ["cur_scale", "loss_scale"]
            if scaler.dynamic:
                numbers += ["cur_iter", "scale_factor", "scale_window", "min_scale", "delayed_shift"]
            each = [[float(getattr(scaler, number)) for number in numbers]]
            for x, y in batches(engine, 3):
                engine.backward(engine(x, y))
                engine.step()
            each.append([float(scaler.cur_scale), optimizer.dynamic_loss_scale])
            if scaler.dynamic:
                each.append(optimizer.needs_scaler())
            seen[f"{name}: scale"] = each
    network = model()
    mine = torch.optim.AdamW(network.parameters(), lr=0.01)
    engine, optimizer, _, _ = deepspeed.initialize(model=network, optimizer=mine, config=without_optimizer(0))
    seen["mine"] = [optimizer is mine, engine.optimizer is mine, run(engine, 3)]
    return seen


def listed():
    """Only some parameters are in groups of the optimizer."""
    seen = {}
    for stage in STAGES:
        for how in ("optimizer", "model_parameters"):
            network = model()
            groups = [{"params": [network.linears[1].weight], "lr": 0.02}, {"params": [network.linears[0].bias]}]
            if how == "optimizer":
                more = {"optimizer": torch.optim.AdamW(groups, lr=0.01), "config": without_optimizer(stage)}
            else:
                more = {"model_parameters": groups, "config": config(stage)}
            engine, optimizer, _, _ = deepspeed.initialize(model=network, **more)
            each = run(engine, 4)
            each["norm"] = float(engine.get_global_grad_norm())
            each["rates"] = [group["lr"] for group in optimizer.param_groups]
            seen[f"{how}, {stage}"] = each
    return seen


def thawed():
    """requires_grad changes between the micro-batches of one step."""
    seen = {}
    for stage in STAGES:
        engine = start(stage, gradient_accumulation_steps=3)
        first = engine.module.linears[0]
        seen[str(stage)] = run(engine, 6, before=lambda number, first=first: first.requires_grad_(number % 3 != 1))
    return seen


# ---- states ----
def states_between():
    """Masters and moments set between backward() and step()."""
    seen = {}
    for stage, device in (*((stage, "none") for stage in STAGES), (2, "cpu"), (3, "cpu")):
        engine = start(stage, zero_optimization={"stage": stage, "offload_optimizer": {"device": device}})
        weight = engine.module.linears[0].weight
        for number, (x, y) in enumerate(batches(engine, 3)):
            engine.backward(engine(x, y))
            if number == 1:
                safe_set_full_fp32_param(weight, torch.full((HIDDEN, HIDDEN), 0.125))
                safe_set_full_optimizer_state(weight, torch.full((HIDDEN, HIDDEN), 0.01), "exp_avg_sq")
                found = float(safe_get_full_fp32_param(weight).sum())
            engine.step()
        moment = safe_get_full_optimizer_state(weight, "exp_avg_sq")
        seen[f"{stage}, {device}"] = [found, float(moment.sum()), sums(engine.module)]
    return seen


def offloads():
    """States to host memory and back between steps, which changes no number."""
    seen = {}
    for stage in STAGES:
        engine = start(stage)
        run(engine, 2)
        for include in (None, [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]):
            engine.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=False)
            engine.reload_states()
        nvme = refused(ValueError, engine.offload_states, device=OffloadDeviceEnum.nvme, pin_memory=False)
        seen[str(stage)] = [nvme, run(engine, 2)]
    return seen


def parts():
    """Of parameters at stage 3, before initialize()."""
    checked = {"stage": 3, "enable_sanity_checks": True}
    with deepspeed.zero.Init(config_dict_or_path=config(3, zero_optimization=checked)):
        network = model()
    weight = network.linears[0].weight
    seen = {"before": [weight.numel(), weight.ds_numel, list(weight.ds_shape)]}
    seen["part"] = [weight.ds_tensor.numel(), weight.ds_persist, weight.ds_status.name]
    with deepspeed.zero.GatheredParameters(weight):
        seen["whole"] = [weight.numel(), list(weight.shape), weight.ds_status.name]
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank() == 0:
            weight.copy_(torch.arange(256.0).view(HIDDEN, HIDDEN))
    part = weight.ds_tensor
    seen["own part"] = [float(part.sum()), float(part[0]), float(part[-1])]
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=None):
        seen["kept"] = float(weight.detach().sum())

    def write():
        with deepspeed.zero.GatheredParameters(weight), torch.no_grad():
            weight.fill_(1.0)

    seen["written"] = refused(RuntimeError, write)
    other = torch.nn.Parameter(torch.ones(6))
    network.linears[0].bias.convert_to_zero_parameters([other])
    seen["converted"] = [other.numel(), other.ds_numel, other.ds_tensor.numel()]
    return seen


# ---- checkpoints ----
def adapters():
    """A checkpoint without frozen parameters, loaded into a model that has others."""
    seen = {}
    with folder_of_rank_0() as folder:
        for stage in STAGES:
            path = os.path.join(folder, str(stage))
            engines = []
            for seed in (1, 2):
                network = model(seed)
                network.linears[0].requires_grad_(False)
                engines.append(start(stage, network=network))
            first, second = engines
            each = {"before": run(first, 2)}
            first.save_checkpoint(path, exclude_frozen_parameters=True)
            frozen = sums(second.module.linears[0])
            second.load_checkpoint(path, load_module_strict=False)
            each["frozen"] = [frozen, sums(second.module.linears[0])]
            each["after"] = run(second, 2)
            seen[str(stage)] = each
    return seen


def saves():
    """A save between two micro-batches of one step, and a second engine of the model."""
    seen = {}
    with folder_of_rank_0() as folder:
        for stage in STAGES:
            path = os.path.join(folder, str(stage))

            def save(number, path=path):
                if number == 3:
                    engine.save_checkpoint(path)

            engine = start(stage, gradient_accumulation_steps=2)  # noqa: F841
            each = {"first": run(engine, 6, before=save)}
            again = start(stage, seed=2, gradient_accumulation_steps=2)
            again.load_checkpoint(path)
            each["loaded"] = [again.global_steps, sums(again.module)]
            each["again"] = run(again, 4)
            seen[str(stage)] = each
    return seen


def second_engines():
    seen = {}
    for stage in STAGES:
        network = model()
        first = start(stage, network=network)
        each = [run(first, 2)]
        each.append(run(start(stage, network=network), 3))
        seen[str(stage)] = each
    return seen


def assertions():
    """Errors that programs expect as AssertionErrors."""
    plain = without_optimizer(2)
    zero = {"stage": 2, "ignore_unused_parameters": False, "offload_optimizer": {"device": "cpu"}}

    def unused_parameters():
        engine = start(2, network=model(layers=3), zero_optimization=zero)
        x, _ = next(batches(engine, 1))
        engine.backward(engine.module.linears[1](x).sum())  # of each rank's part some is unused
        engine.step()

    def tags(folder):
        engine = start(1, checkpoint={"tag_validation": "Fail"})
        engine.save_checkpoint(folder, tag=f"rank{deepspeed.comm.get_rank()}")

    unknown = {"type": "NoSuchOptimizer", "params": {"lr": 0.1}}
    evaluates, _, _, _ = deepspeed.initialize(model=model(), config=without_optimizer(0))
    seen = {
        "no model": refused(AssertionError, deepspeed.initialize, model=None, config=plain),
        "no configuration": refused(AssertionError, deepspeed.initialize, model=model()),
        "unknown optimizer": refused(AssertionError, deepspeed.initialize, model=model(), config=config(
            2, optimizer=unknown)),
        "unused parameters": refused(AssertionError, unused_parameters),
        "step": refused(AssertionError, evaluates.step),
    }
    with folder_of_rank_0() as folder:
        seen["tags"] = refused(AssertionError, tags, folder)
    return seen


CASES = [
    backwards, scaled, boundaries, caches, own_rules, optimizers, listed, thawed, states_between, offloads, parts,
    adapters, saves, second_engines, assertions,
]  # fmt: skip
