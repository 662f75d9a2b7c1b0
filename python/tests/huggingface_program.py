"""A program of Hugging Face's Trainer with a DeepSpeed configuration; rank 0 writes what it observes as JSON."""

import argparse
import json
import os

import deepspeed
import torch
import transformers
from torch.utils.data import Dataset


class Texts(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def sizes():
    return transformers.GPT2Config(
        vocab_size=100, n_layer=2, n_embd=32, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def config(stage, own):
    """own: the file's optimizer and scheduler, else the Trainer's."""
    blocks = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                       "warmup_num_steps": "auto", "warmup_type": "linear"},
        },
    }  # fmt: skip
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **(blocks if own else {}),
    }


def trained(folder, stage, own):
    arguments = transformers.TrainingArguments(
        output_dir=folder, deepspeed=config(stage, own), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        num_train_epochs=2, learning_rate=1e-2, warmup_steps=2, logging_steps=1, save_strategy="no", seed=3,
        use_cpu=True, report_to=[], disable_tqdm=True, dataloader_num_workers=0, weight_decay=0.01,
    )  # fmt: skip
    torch.distributed.barrier()
    model = transformers.GPT2LMHeadModel.from_pretrained(folder + "/start")
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    return trainer


def observed(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    engine = trainer.model_wrapped
    return {
        "class": type(engine).__name__,
        "loss": [row["loss"] for row in rows],
        "lr": [row["learning_rate"] for row in rows],
        "norm": [row["grad_norm"] for row in rows],
        "steps": engine.global_steps,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    words = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        torch.manual_seed(1)
        transformers.GPT2LMHeadModel(sizes()).save_pretrained(words.folder + "/start")
    seen = {}
    for own in (True, False):
        for stage in (2, 3):
            trainer = trained(words.folder, stage, own)
            seen[f"stage {stage}, {'file' if own else 'trainer'}"] = observed(trainer)
    path = os.path.join(words.folder, "model")
    trainer.save_model(path)  # stage 3: gathered
    engine = trainer.model_wrapped
    assert engine.save_16bit_model(path, "weights.bin")
    prompt = torch.tensor([[1, 2, 3]])
    text = engine.module.generate(prompt, max_new_tokens=5, do_sample=False, synced_gpus=True, pad_token_id=0)
    seen["text"] = text[0].tolist()
    checkpoint = os.path.join(words.folder, "checkpoint")
    engine.save_checkpoint(checkpoint)
    if rank == 0:
        weights = torch.load(os.path.join(path, "weights.bin"), weights_only=True)
        seen["weights"] = {name: list(value.shape) for name, value in weights.items() if "h.0" in name}
    torch.distributed.barrier()
    # zero.Init around from_pretrained, as the last TrainingArguments say.
    again = transformers.GPT2LMHeadModel.from_pretrained(path)
    with deepspeed.zero.GatheredParameters(list(again.parameters())):
        seen["again"] = again.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
    seen["sharded"] = all(hasattr(p, "ds_id") for p in again.parameters())
    if rank == 0:
        with open(words.out, "w") as file:
            json.dump(seen, file, indent=1)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
