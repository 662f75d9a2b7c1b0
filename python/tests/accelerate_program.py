"""Programs of Accelerate with DeepSpeed's plugin. frameworks_program.py runs them.

`accelerate launch --use_deepspeed ...` and a DeepSpeedPlugin of the program's own run the same loop.
"""

import os

import accelerate
import torch
from trainer_program import Texts, llama, sum_of


def accelerator_of(stage, plugin, **more):
    """cpu=True would leave DeepSpeed out, and without a backend there is one process where there is no GPU."""
    accelerate.state.AcceleratorState._reset_state()
    backend = [] if stage is None else [accelerate.InitProcessGroupKwargs(backend="gloo")]
    return accelerate.Accelerator(cpu=stage is None, deepspeed_plugin=plugin, kwargs_handlers=backend, **more)


def prepared(words, stage):
    """The Accelerator with what it prepared; `--own` makes the plugin, else the launcher's variables do."""
    plugin = None
    if words.own and stage is not None:
        plugin = accelerate.DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0, zero3_save_16bit_model=True
        )
    accelerator = accelerator_of(stage, plugin, gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step // accelerator.num_processes))
    batch = 4 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(Texts(40), batch_size=batch)
    ready = accelerator.prepare(model, optimizer, loader, schedule)
    assert (type(ready[0]).__name__ == "DeepSpeedEngine") == (stage is not None)
    return accelerator, *ready


def trained(parts, begin, end, seen):
    """Updates begin to end of an epoch of 5."""
    accelerator, model, optimizer, loader, schedule = parts
    model.train()
    for number, batch in enumerate(loader):
        if not begin <= number // 2 < end:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.setdefault("losses", []).append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if number % 2:
            seen.setdefault("rates", []).append(schedule.get_last_lr()[0])
            seen.setdefault("norms", []).append(None if norm is None else float(norm))


def loop(words, stage):
    """Accumulation, clipping, a schedule, a saved state, evaluation, weights by each of Accelerate's ways."""
    seen = {}
    parts = prepared(words, stage)
    accelerator, model, _, loader, _ = parts
    folder = f"{words.folder}/state-{stage}"
    trained(parts, 0, 3, seen)
    accelerator.save_state(folder)
    trained(parts, 3, 5, seen)
    model.eval()
    with torch.no_grad():
        scores = [model(**batch).loss.reshape(1) for batch in loader]
    seen["eval"] = accelerator.gather_for_metrics(torch.cat(scores)).mean().item()
    whole = accelerator.get_state_dict(model)
    plain = accelerator.unwrap_model(model)
    seen["class"] = type(plain).__name__
    if accelerator.is_main_process:
        plain.save_pretrained(f"{words.folder}/model-{stage}", save_function=accelerator.save, state_dict=whole)
    accelerator.save_model(model, f"{words.folder}/saved-{stage}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        seen["state"] = {name: float(value.double().abs().sum()) for name, value in whole.items()}
    accelerator.free_memory()
    seen["again"] = {}
    parts = prepared(words, stage)
    accelerator, *_ = parts
    accelerator.load_state(folder)
    trained(parts, 3, 5, seen["again"])
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state()
    again = type(llama()).from_pretrained(f"{words.folder}/model-{stage}")
    seen["sum"] = sum_of(again)
    saved = [f for f in os.listdir(f"{words.folder}/saved-{stage}") if f.endswith(".safetensors")]
    seen["saved"] = len(saved)
    return seen
