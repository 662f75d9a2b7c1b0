"""Programs of TRL's trainers. frameworks_program.py runs them."""

import os

import accelerate
import datasets
import tokenizers
import torch
import transformers
import trl
from trainer_program import configuration, llama, log_of, sum_of

datasets.disable_progress_bars()
WORDS = [f"w{i}" for i in range(36)]


def tokenizer():
    """One token for each of WORDS."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS, "<pad>"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special)


def text(seed, length):
    chosen = torch.randint(0, len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in chosen)


def arguments(kind, words, stage, **more):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "output_dir": f"{words.folder}/{kind.__name__}-{stage}",
        "deepspeed": None if stage is None else configuration(stage),
        "per_device_train_batch_size": 4 // ranks,
        "per_device_eval_batch_size": 4 // ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "seed": 5,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        **more,
    }
    return kind(**settings)


def seen_of(trainer):
    trainer.train()
    out = trainer.args.output_dir + "/model"
    seen = {"log": log_of(trainer)}
    trainer.save_model(out)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return seen, out


def sft(words, stage):
    """Prompts with completions, of which only the completions count; checkpoints, and a resume."""
    rows = [{"prompt": text(i, 4) + " ", "completion": text(100 + i, 5)} for i in range(40)]
    data = datasets.Dataset.from_list(rows)

    def trainer(stop, **more):
        settings = arguments(trl.SFTConfig, words, stage, save_strategy="steps", save_steps=2, eval_strategy="steps",
                             eval_steps=2, max_length=32, **more)  # fmt: skip
        made = trl.SFTTrainer(
            model=llama(), args=settings, train_dataset=data, eval_dataset=data.select(range(8)),
            processing_class=tokenizer(),
        )  # fmt: skip
        if stop:
            made.add_callback(Stops())
        return made

    seen, out = seen_of(trainer(False))
    parts = f"{words.folder}/sft-parts-{stage}"
    first = trainer(True)
    first.args.output_dir = parts
    first.train()
    first.accelerator.free_memory()
    again = trainer(False)
    again.args.output_dir = parts
    again.train(resume_from_checkpoint=True)
    seen["again"] = log_of(again)
    again.accelerator.free_memory()
    del again, first
    seen["sum"] = sum_of(transformers.LlamaForCausalLM.from_pretrained(out))
    return seen


class Stops(transformers.TrainerCallback):
    def on_save(self, args, state, control, **_):
        control.should_training_stop = True


def dpo(words, stage):
    """Preferences with a frozen copy as the reference."""
    rows = [{"prompt": text(i, 4) + " ", "chosen": text(100 + i, 5), "rejected": text(200 + i, 5)} for i in range(32)]
    settings = arguments(trl.DPOConfig, words, stage, beta=0.5)
    trainer = trl.DPOTrainer(
        model=llama(), ref_model=llama(), args=settings, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )  # fmt: skip
    seen, out = seen_of(trainer)
    del trainer
    seen["sum"] = sum_of(transformers.LlamaForCausalLM.from_pretrained(out))
    return seen


def reward(completions, **_):
    """Early words are good."""
    return [sum(1.0 - WORDS.index(word) / 36 for word in text.split() if word in WORDS) for text in completions]


def grpo(words, stage):
    """Texts that the model writes, with rewards; both models from a folder, sharded as they are loaded at stage 3.

    Ranks draw their texts with seeds of their own: the plain program has as many ranks.
    """
    settings = arguments(
        trl.GRPOConfig, words, stage, num_generations=2, max_completion_length=5, beta=0.1,
        gradient_accumulation_steps=1, scale_rewards="none",
    )  # fmt: skip
    start = f"{words.folder}/start"
    if accelerate.PartialState().is_main_process:
        llama().save_pretrained(start)
    accelerate.PartialState().wait_for_everyone()
    trainer = trl.GRPOTrainer(
        model=start, args=settings, reward_funcs=reward, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(i, 4)} for i in range(32)]),
    )  # fmt: skip
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    seen = {"rewards": [row["reward"] for row in rows], "losses": [row["loss"] for row in rows]}
    trainer.accelerator.free_memory()
    return seen
