"""Transformers' Trainer with Accelerate's sequence-parallel ranks; with one rank, without DeepSpeed.

    python -m libzero.deepspeed.run --num_gpus N ulysses_trainer_program.py --out FILE [--stage S]
"""

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from trainer_program import configuration

transformers.utils.logging.set_verbosity_error()
KEYS = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 40, (12,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[:3] = -100  # in all samples: without DeepSpeed, transformers weighs micro-batches by their labels
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(12)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int)
    words = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    more: dict[str, Any] = {}
    if ranks > 1:
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        more["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, sp_handler=handler)
        more["deepspeed"] = configuration(words.stage)
    arguments = transformers.TrainingArguments(
        output_dir=str(words.out.parent / "out"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        learning_rate=1e-2,
        warmup_steps=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        seed=5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **more,
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, num_key_value_heads=2, pad_token_id=1, attn_implementation="sdpa", **sizes
        )
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    parameters = list(model.parameters())
    with contextlib.ExitStack() as scope:
        if ranks > 1:
            import deepspeed

            scope.enter_context(deepspeed.zero.GatheredParameters(parameters))
        total = sum(float(p.detach().double().abs().sum()) for p in parameters)
    rows = [{key: row[key] for key in KEYS if key in row} for row in trainer.state.log_history]
    if trainer.is_world_process_zero():
        words.out.write_text(json.dumps({"log": rows[:-1], "sum": total}))  # the last one: of the whole run


if __name__ == "__main__":
    main()
