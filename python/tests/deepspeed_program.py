"""A program written for DeepSpeed: two ranks run every case, and rank 0 writes what they observe as JSON.

record_deepspeed.py runs it with DeepSpeed itself, test_deepspeed.py under libzero.deepspeed.run. It is the same file.
deepspeed_program_loops.py and deepspeed_program_names.py have the other cases.
"""

import argparse
import importlib
import inspect
import json
import os
import shutil
import tempfile

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import utils as moe_utils
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime import lr_schedules, torch_autocast
from deepspeed.utils import groups as groups_of_ranks
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

HIDDEN = 16


class SimpleModel(torch.nn.Module):
    def __init__(self, hidden=HIDDEN, layers=2, scale=1.0):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers))
        self.loss = torch.nn.CrossEntropyLoss()
        self.scale = scale

    def forward(self, x, y):
        for linear in self.linears:
            x = linear(x)
        return self.loss(x.float(), y) * self.scale


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i


def model(seed=1, **more):
    torch.manual_seed(seed)
    return SimpleModel(**more)


def batches(engine, count, size=4):
    rank = deepspeed.comm.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    dtype = engine.get_data_types()[0]
    for _ in range(count):
        x = torch.randn(size, HIDDEN, generator=generator).to(dtype)
        yield x, torch.randint(0, HIDDEN, (size,), generator=generator)


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def start(stage, seed=1, network=None, **more):
    engine, _, _, _ = deepspeed.initialize(model=network or model(seed), config=config(stage, **more))
    return engine


def train(engine, count):
    """Losses, and what the engine says after each micro-batch."""
    seen = {"loss": [], "lr": [], "norm": [], "boundary": [], "steps": []}
    for x, y in batches(engine, count):
        loss = engine(x, y)
        engine.backward(loss)
        seen["boundary"].append(engine.is_gradient_accumulation_boundary())
        engine.step()
        seen["loss"].append(loss.item())
        seen["lr"].append(list(engine.get_lr()))
        seen["steps"].append([engine.global_steps, engine.micro_steps, engine.skipped_steps])
        norm = engine.get_global_grad_norm()
        seen["norm"].append(None if norm is None else float(norm))
    return seen


def stages():
    return {str(stage): train(start(stage), 5) for stage in (1, 2, 3)}


def bf16():
    return {str(stage): train(start(stage, bf16={"enabled": True}), 5) for stage in (1, 3)}


class Normed(SimpleModel):
    """Has parameters whose gradients autocast leaves in fp32."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x, y):
        return super().forward(self.norm(x), y)


AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def autocast():
    return {str(stage): train(start(stage, torch_autocast=AUTOCAST), 5) for stage in (1, 2, 3)}


def autocast_to_half():
    half = {"torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 0.0}
    seen = {}
    for stage in (1, 2, 3):
        engine = start(stage, **half)
        seen[str(stage)] = [engine.optimizer.needs_scaler(), engine.fp16_enabled(), train(engine, 5)]
        del seen[str(stage)][-1]["norm"]  # DeepSpeed's is that of the scaled gradients
    return seen


def autocast_of_some():
    seen = {}
    for stage in (1, 2, 3):
        torch.manual_seed(1)
        engine = start(stage, network=Normed(), torch_autocast=AUTOCAST)
        seen[str(stage)] = train(engine, 5)
    seen["enabled"] = engine.torch_autocast_enabled()
    seen["dtype"] = str(engine.torch_autocast_dtype())
    seen["modules"] = engine.torch_autocast_lower_precision_safe_modules()
    parameters = dict(engine.module.named_parameters())
    seen["reduced in"] = {name: str(torch_autocast.get_comm_dtype(p)) for name, p in parameters.items()}
    seen["parameters"] = sorted({str(p.dtype) for p in parameters.values()})
    return seen


def narrow_states():
    """No fp32 masters, with states in bf16 or fp32. Rounding to the nearest is DeepSpeed's, which ignores "libzero"."""
    masters = {"enabled": True, "bf16_master_weights_and_grads": True}
    both = {**masters, "bf16_optimizer_states": True}
    nearest = {"libzero": {"stochastic_rounding": False}}
    seen = {}
    for stage in (1, 2, 3):
        seen[f"both at {stage}"] = train(start(stage, bf16=both, **nearest), 5)
        offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        seen[f"masters at {stage}"] = train(start(stage, bf16=masters, zero_optimization=offload, **nearest), 5)
    for wrong in ({"enabled": True, "bf16_optimizer_states": True},):
        try:
            start(1, bf16=wrong)
        except (AssertionError, ValueError) as error:
            seen["refused"] = isinstance(error, AssertionError)
    return seen


def accumulation():
    return {str(stage): train(start(stage, gradient_accumulation_steps=2), 6) for stage in (1, 2, 3)}


def boundary():
    engine = start(2, gradient_accumulation_steps=3)
    losses = []
    for i, (x, y) in enumerate(batches(engine, 4)):
        engine.set_gradient_accumulation_boundary(i % 2 == 1)
        loss = engine(x, y)
        engine.backward(loss)
        if i % 2 == 1:
            engine.step()
        losses.append(loss.item())
    return {"loss": losses, "steps": engine.global_steps}


def schedules():
    warmup = {"warmup_num_steps": 3, "warmup_max_lr": 0.05}
    cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2, "cycle_momentum": False}
    blocks = {
        "WarmupLR": {**warmup, "warmup_min_lr": 0.001},
        "WarmupDecayLR": {**warmup, "total_num_steps": 6, "warmup_type": "linear"},
        "WarmupCosineLR": {"total_num_steps": 6, "warmup_num_steps": 2},
        "OneCycle": cycle,
        "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    }
    seen = {}
    for name, params in blocks.items():
        engine, _, _, scheduler = deepspeed.initialize(
            model=model(), config=config(2, scheduler={"type": name, "params": params})
        )
        seen[name] = train(engine, 5)
        seen[name]["last"] = list(scheduler.get_last_lr())
        seen[name]["class"] = type(scheduler).__name__
    return seen


def free_schedules():
    """Over an optimizer that no engine owns."""
    made = {
        "warm up": lambda o: lr_schedules.WarmupLR(o, warmup_num_steps=3),
        "decay": lambda o: lr_schedules.WarmupDecayLR(o, 6.5, [0.0, 0.1], [0.5, 1.0], 2, "linear"),
        "cosine": lambda o: lr_schedules.WarmupCosineLR(o, 6, 0.1, 2),
        "range": lambda o: lr_schedules.LRRangeTest(o, 0.1, 2, 0.5, True),
        "cycle": lambda o: lr_schedules.OneCycle(
            o, [0.01, 0.02], 0.3, 0.5, 3, 2, 2, decay_step_size=2, decay_mom_rate=0.1
        ),
        "resumed": lambda o: lr_schedules.WarmupLR(o, 0.0, 0.3, 4, last_batch_iteration=1),
    }
    seen = {}
    for name, make in made.items():
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.2, 0.4)]
        groups[1]["lr"] = torch.tensor(0.4) if name == "cosine" else 0.4
        optimizer = torch.optim.AdamW(groups)
        schedule = make(optimizer)
        seen[name] = []
        for place in [None] * 8 + [1, None]:
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            seen[name].append([rates, optimizer.param_groups[0]["betas"][0], schedule.last_batch_iteration])
            schedule.step(place)
        seen[name].append([float(rate) for rate in schedule.get_last_lr()])
    return seen


def client_objects():
    network = model()
    weights = [p for name, p in network.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    seen = {}
    more = config(2)
    del more["optimizer"]
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        config=more,
    )
    seen["torch"] = train(engine, 5)
    seen["groups"] = len(optimizer.param_groups)
    for name, make in {
        "callable": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }.items():
        network = model()
        more["zero_allow_untested_optimizer"] = True
        engine, _, _, _ = deepspeed.initialize(
            model=network, optimizer=make, model_parameters=list(network.parameters()), config=more
        )
        seen[name] = train(engine, 4)
    return seen


def overflow():
    """The loss scale begins where gradients overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
    seen = {}
    for stage in (1, 2, 3):
        engine = start(stage, network=model(scale=8.0), fp16=fp16, scheduler=schedule)
        each = {"skipped": [], "scale": [], "lr": [], "overflow": []}
        for x, y in batches(engine, 10):
            engine.backward(engine(x, y))
            engine.step()
            each["skipped"].append(engine.skipped_steps)
            each["scale"].append(float(engine.optimizer.cur_scale if stage < 3 else engine.optimizer.loss_scale))
            each["lr"].append(engine.get_lr()[0])
            each["overflow"].append(bool(engine.optimizer.overflow))
        seen[str(stage)] = each
    return seen


def checkpoint():
    folder = [tempfile.mkdtemp()] if deepspeed.comm.get_rank() == 0 else [None]
    deepspeed.comm.broadcast_object_list(folder, src=0)
    seen = {}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05}}
    for stage in (2, 3):
        path = os.path.join(folder[0], str(stage))
        first = start(stage, scheduler=schedule)
        before = train(first, 3)
        first.save_checkpoint(path, client_state={"epoch": 7, "best": (0.5, "x")})
        first.save_checkpoint(path, tag="aside", client_state={"epoch": 8}, save_latest=False)
        after = train(first, 2)
        second = start(stage, seed=2, scheduler=schedule)
        loaded, client = second.load_checkpoint(path)
        again = train(second, 2)
        third = start(stage, seed=2, scheduler=schedule)
        third.load_checkpoint(path, tag="aside", load_module_only=True)
        seen[str(stage)] = {
            "before": before,
            "after": after,
            "again": again,
            "loaded": os.path.relpath(loaded, path) if os.path.isdir(loaded) else os.path.dirname(
                os.path.relpath(loaded, path)
            ),
            "client": {"epoch": client["epoch"], "best": list(client["best"])},
            "weights only": train(third, 2),
        }
        nothing, none = third.load_checkpoint(os.path.join(folder[0], "nothing"))
        assert nothing is None and not none
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        shutil.rmtree(folder[0])
    return seen


def loader():
    data = Numbers()
    engine, _, batches, _ = deepspeed.initialize(
        model=model(), config=config(1, dataloader_drop_last=False), training_data=data
    )
    first = [batch[1].tolist() for batch in batches]
    second = [batch[1].tolist() for batch in batches]
    ordered = [batch[1].tolist() for batch in engine.deepspeed_io(data, batch_size=3, route="eval")]
    return {"first": first, "second": second, "ordered": ordered, "length": len(batches)}


def whole_parameters():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        network = model()
    first = network.linears[0]
    with deepspeed.zero.GatheredParameters(list(network.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            with torch.no_grad():
                for i, p in enumerate(network.parameters()):
                    p.copy_(torch.linspace(-0.5, 0.5 + i, p.numel()).view(p.shape))
    engine = start(3, network=network)
    seen = {"first": train(engine, 2)}
    with deepspeed.zero.GatheredParameters(first.bias, modifier_rank=0):
        with torch.no_grad():
            if deepspeed.comm.get_rank() == 0:
                first.bias.fill_(0.25)
    x, y = next(batches(engine, 1))
    loss = engine(x, y)
    engine.backward(loss)
    gradient = safe_get_full_grad(first.weight)
    seen["gradient"] = [list(gradient.shape), float(gradient.float().norm())]
    engine.step()
    master = safe_get_full_fp32_param(first.weight)
    seen["master"] = [list(master.shape), str(master.dtype), float(master.norm())]
    seen["loss"] = loss.item()
    seen["size"] = [first.weight.ds_numel, list(first.weight.ds_shape)]
    return seen


def sizes():
    world = deepspeed.comm.get_world_size()
    seen = []
    for given in (
        {"train_batch_size": 8},
        {"train_batch_size": 16, "gradient_accumulation_steps": 4},
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2},
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
    ):
        rest = {key: value for key, value in config(1).items() if "batch" not in key}
        engine, _, _, _ = deepspeed.initialize(model=model(), config={**rest, **given})
        seen.append([engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
                     engine.gradient_accumulation_steps(), engine.dp_world_size == world])  # fmt: skip
    return seen


class Experts(torch.nn.Module):
    def __init__(self, **words):
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        expert = torch.nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, expert, num_experts=4, min_capacity=0, **words)
        self.last = torch.nn.Linear(HIDDEN, HIDDEN)
        self.counts = None

    def forward(self, x, y):
        x, aux, self.counts = self.moe(torch.tanh(self.first(x)))
        return torch.nn.functional.cross_entropy(self.last(x), y) + 0.1 * aux


def inside(layer, engine):
    """What programs read of a layer and of its engine."""
    part = layer.deepspeed_moe
    weight = part.gate.wg.weight
    return {
        "weight": [list(weight.shape), weight.norm().item()],
        "experts": [[list(p.shape) for p in expert.parameters()] for expert in part.experts.deepspeed_experts],
        "words": [part.gate.k, part.gate.min_capacity, part.gate.noisy_gate_policy, part.gate.drop_tokens],
        "layer": [part.ep_size, part.ep_group_name, part.num_local_experts, layer.enable_expert_tensor_parallelism],
        "engine": [len(engine.moe_layers), len(engine.gate_modules), engine.num_experts],
        "model parallel": groups_of_ranks._get_expert_model_parallel_world_size(),
        "largest": [groups_of_ranks._get_max_expert_size(), groups_of_ranks._get_max_expert_size_name()]
        if part.ep_size > 1
        else None,
    }


def expert_groups():
    """What the functions for groups of an optimizer do with what they are given."""
    layers = torch.nn.Sequential(*(MoE(HIDDEN, torch.nn.Linear(HIDDEN, HIDDEN), n, ep_size=ep) for n, ep in
                                   ((2, 1), (4, 1))), torch.nn.Linear(HIDDEN, 2))  # fmt: skip
    named = dict(layers.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]

    def seen(groups):
        return [[group.get("name"), moe_utils.is_moe_param_group(group), group.get("lr"), len(group["params"]),
                 sum(p.numel() for p in group["params"])] for group in groups]  # fmt: skip

    def given():
        return [{"params": list(weights), "name": "weights", "lr": 0.1}, {"params": list(biases), "name": "biases"}]

    found = {}
    for most in (None, 300, 178956971):
        some = given()
        returned = split_params_into_different_moe_groups_for_optimizer(some, most)
        found[str(most)] = {"returned": seen(returned), "given": seen(some), "same": returned is some}
    several = tuple(given())
    returned = split_params_into_different_moe_groups_for_optimizer(several)
    found["tuple"] = {"returned": seen(returned), "given": seen(several)}
    one = given()[0]
    returned = split_params_into_different_moe_groups_for_optimizer(one)
    found["dict"] = {"returned": seen(returned), "given": seen([one])}
    found["configured"] = {
        "parameters": seen(moe_utils.configure_moe_param_groups(list(named.values()))),
        "groups": seen(moe_utils.configure_moe_param_groups(given())),
        "apart": seen(moe_utils.configure_moe_param_groups([{**given()[0], "moe": True}])),
    }
    torch.manual_seed(3)
    layers[2](layers[0](torch.randn(6, HIDDEN))[0]).sum().backward()
    shared, experts = moe_utils.split_params_grads_into_shared_and_expert_params(list(named.values()))
    found["gradients"] = [[list(g.shape) for g in shared], [list(g.shape) for g in experts]]
    for wrong in ("text", {1: 2}, [1]):
        for function in (moe_utils.configure_moe_param_groups, split_params_into_different_moe_groups_for_optimizer):
            try:
                function(wrong)
            except Exception:
                found.setdefault("refused", []).append([str(wrong), function.__name__])
    return found


def signatures():
    functions = [MoE.__init__, MoE.forward, MoE.set_deepspeed_parallelism, has_moe_layers, is_moe_param]
    functions += [getattr(moe_utils, name) for name in (
        "is_moe_param_group", "split_params_into_shared_and_expert_params", "configure_moe_param_groups",
        "split_params_grads_into_shared_and_expert_params", "split_params_into_different_moe_groups_for_optimizer",
    )]  # fmt: skip
    functions += [getattr(groups_of_ranks, name) for name in (
        "_get_expert_model_parallel_world_size", "_get_max_expert_size", "_get_max_expert_size_name",
        "_get_expert_parallel_rank", "_get_expert_parallel_world_size", "_get_expert_data_parallel_rank",
        "_get_expert_data_parallel_world_size",
    )]  # fmt: skip
    return {
        function.__qualname__: [[p.name, "" if p.default is p.empty else repr(p.default)]
                                for p in inspect.signature(function).parameters.values()]
        for function in functions
    }  # fmt: skip


def experts():
    """Layers of experts draw from the generator: with one seed, choices and losses are those of DeepSpeed."""
    seen = {}
    for name, words in {
        "top 1": {},
        "top 1, clipped": {},
        "top 1, noise on logits": {"noisy_gate_policy": "RSample", "capacity_factor": 1.5},
        "top 1, noise on inputs": {"noisy_gate_policy": "Jitter", "use_residual": True},
        "top 2": {"k": 2},
        "top 3, all tokens": {"k": 3, "drop_tokens": False},
    }.items():
        for ranks in (1, 2):
            torch.manual_seed(5)
            network = Experts(ep_size=ranks, **words)
            groups = split_params_into_different_moe_groups_for_optimizer(
                {"params": list(network.parameters()), "name": "all"}
            )
            assert [is_moe_param(group["params"][0]) for group in groups] == [False, True]
            assert has_moe_layers(network) == (True, 4)
            clipping = 0.1 if "clipped" in name else 0.0
            settings = config(2, gradient_clipping=clipping, optimizer={"type": "SGD", "params": {"lr": 0.05}})
            settings["zero_allow_untested_optimizer"] = True
            engine, _, _, _ = deepspeed.initialize(model=network, model_parameters=groups, config=settings)
            torch.manual_seed(9 + deepspeed.comm.get_rank())
            each = {"loss": [], "counts": [], "norm": [], "aux": [], "inside": inside(network.moe, engine)}
            for x, y in batches(engine, 5, size=24):
                loss = engine(x, y)
                each["aux"].append(network.moe.deepspeed_moe.l_aux.item())
                assert network.moe.deepspeed_moe.exp_counts.tolist() == network.counts.tolist()
                engine.backward(loss)
                engine.step()
                each["loss"].append(loss.item())
                each["counts"].append(network.counts.tolist())
                each["norm"].append(float(engine.get_global_grad_norm()))
            seen[f"{name}, {ranks} ranks"] = each
    return seen


CASES = [
    stages, bf16, autocast, autocast_of_some, autocast_to_half, accumulation, boundary, schedules, free_schedules,
    client_objects, overflow, checkpoint, loader, whole_parameters, narrow_states, sizes, experts, expert_groups,
    signatures,
]  # fmt: skip


def main():
    others = [importlib.import_module(f"deepspeed_program_{name}") for name in ("loops", "names")]
    cases = [*CASES, *(case for other in others for case in other.CASES)]
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", default=[case.__name__ for case in cases])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    assert get_accelerator().device_name() == "cpu"
    seen = {}
    for case in cases:
        if case.__name__ in arguments.only:
            seen[case.__name__] = case()
    if deepspeed.comm.get_rank() == 0:
        with open(arguments.out, "w") as file:
            json.dump(seen, file, indent=1)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    importlib.import_module("deepspeed_program").main()  # the one that the others import
