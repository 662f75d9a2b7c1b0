"""Programs of Transformers' Trainer, and what programs of other frameworks share. frameworks_program.py runs them."""

import contextlib
import os

import torch
import transformers

transformers.utils.logging.set_verbosity_error()


class Texts(torch.utils.data.Dataset):
    def __init__(self, count, seed=0):
        self.seeds = range(1000 * seed, 1000 * seed + count)

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, i):
        ids = torch.randint(2, 40, (12,), generator=torch.Generator().manual_seed(self.seeds[i]))
        return {"input_ids": ids, "labels": ids.clone()}


def llama(seed=4):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes, **tokens))


def configuration(stage):
    """As the documentation of Transformers writes it."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


class Stops(transformers.TrainerCallback):
    def __init__(self, after):
        self.after = after

    def on_save(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == self.after


def trainer_of(words, stage, out, model=None, stop=0, **more):
    """stage: None without DeepSpeed."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "output_dir": out,
        "deepspeed": None if stage is None else configuration(stage),
        "per_device_train_batch_size": 4 // ranks,
        "per_device_eval_batch_size": 4 // ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "seed": 5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **more,
    }
    arguments = transformers.TrainingArguments(**settings)
    return transformers.Trainer(
        model=llama() if model is None else model(),
        args=arguments,
        train_dataset=Texts(40),
        eval_dataset=Texts(8, 1),
        callbacks=[Stops(stop)] if stop else [],
    )


def log_of(trainer):
    """By step: the loss, rate and norm of training, and the loss of evaluation."""
    seen = {}
    for row in trainer.state.log_history:
        at = seen.setdefault(str(row["step"]), {})
        at.update({key: row[key] for key in ("loss", "learning_rate", "grad_norm", "eval_loss") if key in row})
    return seen


def sum_of(model):
    parameters = list(model.parameters())
    with contextlib.ExitStack() as scope:
        if any(hasattr(p, "ds_tensor") for p in parameters):  # from_pretrained() makes it for stage 3
            import deepspeed

            scope.enter_context(deepspeed.zero.GatheredParameters(parameters))
        return sum(float(p.detach().double().abs().sum()) for p in parameters)


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,  # the first: the evaluation has other texts, drawn at random
    "save_total_limit": 6,
}


def whole(words, stage):
    """Evaluation and a checkpoint at every step, the best model at the end, predictions of it."""
    out = f"{words.folder}/whole-{stage}"
    trainer = trainer_of(words, stage, out, **BEST)
    trainer.train()
    seen = {"log": log_of(trainer), "best": os.path.basename(trainer.state.best_model_checkpoint)}
    predicted = trainer.predict(Texts(6, 2))
    seen["predicted"] = [list(predicted.predictions.shape), float(predicted.metrics["test_loss"])]
    seen["scores"] = predicted.predictions[-1, -1, :8].tolist()
    seen["eval"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(out + "/model")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    del trainer  # and its configuration: from_pretrained() does not shard
    again = transformers.LlamaForCausalLM.from_pretrained(out + "/model")
    seen["sum"] = sum_of(again)
    return seen


def resumed(words, stage):
    """Stopped after two steps, then a new Trainer resumes; `part`: one of them, in this process."""
    out = f"{words.folder}/parts-{stage}"
    seen = {}
    if words.part in ("", "first"):
        trainer = trainer_of(words, stage, out, stop=2, **BEST | {"load_best_model_at_end": False})
        trainer.train()
        seen["first"] = log_of(trainer)
        trainer.accelerator.free_memory()
    if words.part in ("", "again"):
        trainer = trainer_of(words, stage, out, **BEST | {"load_best_model_at_end": False})
        trainer.train(resume_from_checkpoint=True)
        seen["again"] = log_of(trainer)
        trainer.accelerator.free_memory()
    return seen


def lora():
    import peft

    base = llama()
    torch.manual_seed(6)
    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def resized(words, stage):
    """`part` FROM:STOP: a Trainer of 6 texts per micro-batch, of all ranks, with a checkpoint at every step.

    It resumes from the checkpoint of step FROM, which ranks of another number may have written, and stops after STOP.
    """
    begin, end = map(int, words.part.split(":")) if words.part else (0, 5)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {f"per_device_{of}_batch_size": 6 // ranks for of in ("train", "eval")}
    seen = {}
    for name, model in (("whole", None), ("adapter", lora)):
        out = f"{words.folder}/resized-{name}-{stage}"
        trainer = trainer_of(
            words, stage, out, model, stop=end, **BEST | sizes | {"load_best_model_at_end": False, "eval_steps": 5}
        )
        trainer.train_dataset, trainer.eval_dataset = Texts(36), Texts(12, 1)
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{begin}" if begin else None)
        seen[name] = {"log": log_of(trainer), "epoch": trainer.state.epoch}
        trainer.accelerator.free_memory()
    return seen


def adapted(words, stage):
    """An adapter of PEFT with a checkpoint at every step, stopped and resumed, the best at the end, merged."""
    import peft

    out = f"{words.folder}/adapted-{stage}"
    seen = {}
    trainer = trainer_of(words, stage, out + "-whole", lora, **BEST)
    trainer.train()
    seen["log"] = log_of(trainer)
    seen["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    seen["eval"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(out + "-model")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    trainer = trainer_of(words, stage, out, lora, stop=2, **BEST | {"load_best_model_at_end": False})
    trainer.train()
    trainer.accelerator.free_memory()
    trainer = trainer_of(words, stage, out, lora, **BEST | {"load_best_model_at_end": False})
    trainer.train(resume_from_checkpoint=True)
    seen["again"] = log_of(trainer)
    trainer.accelerator.free_memory()
    del trainer
    merged = peft.PeftModel.from_pretrained(llama(), out + "-model").merge_and_unload()
    seen["sum"] = sum_of(merged)
    return seen


def optimizers(words, stage):
    """Every name of `optim=`: its losses, or its error."""
    seen = {}
    for name in (each.value for each in transformers.training_args.OptimizerNames):
        try:
            trainer = trainer_of(words, stage, f"{words.folder}/optim", optim=name, max_steps=3)
            trainer.train()
            seen[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            trainer.accelerator.free_memory()
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
    return seen
