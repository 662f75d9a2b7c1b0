"""Programs in the manner of those that are published for DeepSpeed, of own making. frameworks_program.py runs them."""

import argparse
import json
import os
import random

import numpy
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from trainer_program import Texts, configuration, sum_of

RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def settings(stage, **more):
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def rate(step):
    """Of the schedule above, by the number of updates before: the first two have none."""
    return 0.0 if step == 0 else min((step - 1) / 2, (8 - (step - 1)) / 6)


def plain_loop(model, batches, loss_of, groups=None):
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss / 2)
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


def mean_of(losses):
    values = torch.tensor(losses, dtype=torch.float64)
    if RANKS > 1:
        import deepspeed

        deepspeed.comm.all_reduce(values)
    return (values / RANKS).tolist()


def parts(batches):
    """Of each batch the rank's rows."""
    for batch in batches:
        yield {key: value[RANK::RANKS].contiguous() for key, value in batch.items()}


def weights_of(engine, stage):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        return sum_of(engine.module)


# ---- a masked language model, as HelloDeepSpeed trains it ----
def masked(seed):
    """A batch of BERT: a tenth and more of the words masked, and the same number of them in each row."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, 40, (4, 12), generator=generator)
    places = torch.rand(4, 12, generator=generator).argsort(1)[:, :2]
    labels = torch.full_like(words, -100).scatter(1, places, words.gather(1, places))
    return {"input_ids": words.scatter(1, places, 4), "labels": labels, "attention_mask": torch.ones_like(words)}


def bert(words, stage):
    """An epoch, a checkpoint with a client state, a new engine that loads it and trains the rest."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def model():
        torch.manual_seed(2)
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **sizes, **dropped))

    def loss_of(model, batch):
        return model(**batch).loss

    batches = [masked(seed) for seed in range(12)]
    if stage is None:
        start = model()
        losses = plain_loop(start, batches, loss_of)
        return {"losses": losses, "sum": sum_of(start), "again": losses[6:]}
    import deepspeed

    def train(engine, begin, end):
        losses = []
        for batch in list(parts(batches))[begin:end]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return mean_of(losses)

    def engine():
        start = model()
        return deepspeed.initialize(model=start, model_parameters=start.parameters(), config=settings(stage))[0]

    first = engine()
    losses = train(first, 0, 6)
    first.save_checkpoint(words.folder, f"bert-{stage}", client_state={"checkpoint_step": 6})
    losses += train(first, 6, 12)
    total = weights_of(first, stage)
    first.destroy()
    again = engine()
    _, state = again.load_checkpoint(words.folder, f"bert-{stage}")
    rest = train(again, state["checkpoint_step"], 12)
    again.destroy()
    return {"losses": losses, "sum": total, "again": rest}


# ---- GPT, as Megatron-DeepSpeed trains it without model parallelism ----
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """The words' table is also that of the scores; the loss is its own module's, as there."""

    def __init__(self, width=16, layers=2, words=40, length=12, checkpoint=None):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.last, self.checkpoint = nn.LayerNorm(width), checkpoint
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.05)

    def forward(self, tokens, places, labels):
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        scores = F.linear(self.last(x), self.words.weight)
        return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def decay_groups(model):
    """Megatron's: no decay of biases and norms."""
    every = list(model.named_parameters())
    return [
        {"params": [p for _, p in every if p.ndim > 1]},
        {"params": [p for _, p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]


def gpt_batch(seed):
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(12) < 10).float().expand(4, 12)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}


class Annealed:
    """A schedule of the program, moved by so many samples."""

    def __init__(self, optimizer):
        self.optimizer, self.samples = optimizer, 0
        self.step(0)

    def step(self, increment):
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * rate(self.samples // 8)

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


class Parallel:
    """What such programs call an mpu: here all ranks are data-parallel."""

    def __init__(self):
        import deepspeed

        self.world = deepspeed.comm.new_group(list(range(RANKS)))
        self.own = [deepspeed.comm.new_group([rank]) for rank in range(RANKS)][RANK]
        for kind in ("model", "tensor_model", "pipeline_model", "sequence"):
            setattr(self, f"get_{kind}_parallel_rank", lambda: 0)
            setattr(self, f"get_{kind}_parallel_world_size", lambda: 1)
            setattr(self, f"get_{kind}_parallel_group", lambda: self.own)

    def get_data_parallel_rank(self):
        return RANK

    def get_data_parallel_world_size(self):
        return RANKS

    def get_data_parallel_group(self):
        return self.world


def megatron(words, stage):
    """The program's optimizer and schedule, an mpu, seeds, activations checkpointed, a checkpoint with its state."""

    def loss_of(model, batch):
        places = torch.arange(12).expand_as(batch["tokens"])
        losses = model(batch["tokens"], places, batch["labels"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    batches = [gpt_batch(seed) for seed in range(12)]
    torch.manual_seed(4)
    if stage is None:
        start = GPT()
        losses = plain_loop(start, batches, loss_of, decay_groups(start))
        with torch.no_grad():
            found = loss_of(start, gpt_batch(99)).item()
        return {"losses": losses, "eval": found, "sum": sum_of(start), "again": losses[6:]}
    import deepspeed

    mpu = Parallel()
    config = {key: value for key, value in settings(stage).items() if key not in ("optimizer", "scheduler")}
    deepspeed.checkpointing.configure(
        mpu, deepspeed_config=config, partition_activations=True, contiguous_checkpointing=False, num_checkpoints=2,
        checkpoint_in_cpu=False, synchronize=False, profile=False,
    )  # fmt: skip

    def parts_of():
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(4)
        with deepspeed.zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(), remote_device=None, config_dict_or_path=config,
            enabled=stage == 3, mpu=mpu,
        ):  # fmt: skip
            model = GPT(checkpoint=deepspeed.checkpointing.checkpoint)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            torch.rand(3)
        adam = torch.optim.AdamW(decay_groups(model), lr=1e-2, weight_decay=0.01)
        engine, optimizer, _, schedule = deepspeed.initialize(
            args=words, model=model, optimizer=adam, lr_scheduler=Annealed(adam), mpu=mpu, config=config,
            dist_init_required=False,
        )  # fmt: skip
        return engine, optimizer, schedule

    def train(engine, begin, end):
        losses = []
        for number, batch in list(enumerate(parts(batches)))[begin:end]:
            engine.train()
            engine.set_train_batch_size(8)
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step(lr_kwargs={"increment": 8})
            losses.append(loss.item())
            assert engine.was_step_applied() == bool(number % 2)
        return mean_of(losses)

    engine, optimizer, schedule = parts_of()
    losses = train(engine, 0, 6)
    random_states = {"numpy": numpy.random.get_state(), "random": random.getstate(), "torch": torch.get_rng_state(),
                     "tracker": deepspeed.checkpointing.get_cuda_rng_tracker().get_states()}  # fmt: skip
    state = {"iteration": 3, "args": argparse.Namespace(lr=1e-2), "rng": [random_states]}
    engine.save_checkpoint(f"{words.folder}/megatron-{stage}", "global_step3", client_state=state)
    losses += train(engine, 6, 12)
    engine.eval()
    with torch.no_grad():
        found = [loss_of(engine, batch).item() for batch in parts([gpt_batch(99)])]
    assert engine.global_steps == 6 and optimizer.param_groups[1]["weight_decay"] == 0.0
    assert schedule.samples == 48 and engine.global_samples == 48
    seen = {"losses": losses, "eval": mean_of(found)[0], "sum": weights_of(engine, stage)}
    engine.destroy()

    engine, _, schedule = parts_of()
    _, state = engine.load_checkpoint(f"{words.folder}/megatron-{stage}")
    numpy.random.set_state(state["rng"][0]["numpy"])
    deepspeed.checkpointing.get_cuda_rng_tracker().set_states(state["rng"][0]["tracker"])
    assert (state["iteration"], state["args"].lr, schedule.samples) == (3, 1e-2, 24)
    seen["again"] = train(engine, 6, 12)
    engine.destroy()
    return seen


# ---- a causal model by Trainer, as run_clm.py with --deepspeed FILE ----
def clm(words, stage):
    """Arguments from a command line, a model from a folder, metrics of the evaluation, the model saved."""
    out = f"{words.folder}/clm-{stage}"
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(8)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, **sizes, **dropped)).save_pretrained(out)
    command = [
        "--output_dir", out, "--do_train", "--do_eval", "--per_device_train_batch_size", str(4 // RANKS),
        "--per_device_eval_batch_size", str(4 // RANKS), "--num_train_epochs", "1", "--learning_rate", "1e-2",
        "--logging_steps", "1", "--save_strategy", "no", "--seed", "5", "--use_cpu", "--report_to", "none",
        "--disable_tqdm", "true", "--gradient_accumulation_steps", "2",
    ]  # fmt: skip
    if stage is not None:
        file = f"{words.folder}/ds-{stage}-{RANK}.json"
        with open(file, "w") as written:
            json.dump(configuration(stage), written)
        command += ["--deepspeed", file]
    (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(command)
    transformers.set_seed(arguments.seed)
    arguments.distributed_state.wait_for_everyone()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Texts(32), eval_dataset=Texts(8, 1),
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trained = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.accelerator.wait_for_everyone()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.accelerator.free_memory()
    del trainer, arguments
    again = transformers.GPT2LMHeadModel.from_pretrained(out)
    return {"losses": losses, "eval": metrics["eval_loss"], "sum": sum_of(again)}


# ---- pictures by diffusion, as the training scripts of diffusers ----
def pictures(words, stage):
    """Accelerate's loop with an average of the weights, a scheduler of diffusers, and a pipeline that is saved."""
    import accelerate
    import diffusers
    from accelerate_program import accelerator_of
    from diffusers.training_utils import EMAModel

    plugin = None if stage is None else accelerate.DeepSpeedPlugin(
        zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True
    )
    accelerator = accelerator_of(stage, plugin)
    torch.manual_seed(7)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    model = diffusers.UNet2DModel(in_channels=3, out_channels=3, attention_head_dim=8, **sizes, **blocks)
    average = EMAModel(model.parameters(), decay=0.9, model_cls=diffusers.UNet2DModel, model_config=model.config)
    noises = diffusers.DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = diffusers.optimization.get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=RANKS, num_training_steps=6 * RANKS
    )
    generator = torch.Generator().manual_seed(3)
    shape = (24, 3, 8, 8)
    clean, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    rows = torch.utils.data.TensorDataset(clean, noise, torch.randint(0, 20, shape[:1], generator=generator))
    loader = torch.utils.data.DataLoader(rows, batch_size=4 // RANKS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert (type(model).__name__ == "DeepSpeedEngine") == (stage is not None)
    losses = []
    for clean, noise, times in loader:
        with accelerator.accumulate(model):
            found = model(noises.add_noise(clean, noise, times), times).sample
            loss = F.mse_loss(found.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if stage != 3:
            average.step(model.parameters())
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    whole = accelerator.get_state_dict(model)
    seen = {"losses": losses, "rate": schedule.get_last_lr()[0]}
    out = f"{words.folder}/pictures-{stage}"
    if accelerator.is_main_process:
        net = diffusers.UNet2DModel.from_config(accelerator.unwrap_model(model).config)
        net.load_state_dict(whole)
        diffusers.DDPMPipeline(unet=net, scheduler=noises).save_pretrained(out)
        seen["sum"] = sum_of(diffusers.DDPMPipeline.from_pretrained(out).unet)
        seen["average"] = None if stage == 3 else sum(float(p.double().abs().sum()) for p in average.shadow_params)
    accelerator.free_memory()
    return seen
