"""Loops around models of Hugging Face, on two ranks: the texts, losses and parameters of plain torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Programs, config, under_the_runner
from test_loops import RANKS, by_engine, by_loop, every_stage, mean_of, require_close, require_moved

import libzero
from libzero import deepspeed

transformers = pytest.importorskip("transformers")
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def llama(seed: int = 4) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes, **TOKENS)).eval()


def words_of(seed: int, length: int, rows: int = 1, below: int = 40) -> torch.Tensor:
    return torch.randint(2, below, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- texts ----------------------------------------------------------------------------------------


def written(model: Any, prompt: torch.Tensor, end: int | None, **more: Any) -> list[int]:
    with torch.no_grad():
        words = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
        text: list[int] = model.generate(prompt, **words, **more)[0].tolist()
    return text


def texts() -> tuple[list[torch.Tensor], list[list[int]], int]:
    """Prompts of both ranks and what the plain model writes; rank 0's text ends before rank 1's."""
    model, prompts = llama(), [words_of(3, 3), words_of(8, 8)]
    end = written(model, prompts[0], None)[4]
    wanted = [written(model, prompt, end) for prompt in prompts]
    assert len(wanted[0]) == 5 and len(wanted[1]) == 14
    return prompts, wanted, end


@every_stage
def test_a_text_that_ends_early_is_that_of_the_plain_model_or_an_error(stage: int) -> None:
    """Within gathered_parameters() ranks may end at any time. Without it stage 3 may say that their calls differ."""
    prompts, wanted, end = texts()
    models = [llama() for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> str:
        prompt, text = prompts[comm.rank], wanted[comm.rank]
        still = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
        engine = libzero.Engine(models[comm.rank], config(stage, optimizer=still))
        for _ in range(2):
            with engine.gathered_parameters():
                assert written(engine.module, prompt, end) == text
            engine.backward(engine(input_ids=prompt, labels=prompt).loss)
            assert engine.step().updated
        try:
            assert written(engine.module, prompt, end) == text
            engine.backward(engine(input_ids=prompt, labels=prompt).loss)
            assert engine.step().updated
        except (libzero.CommError, RuntimeError) as error:
            return str(error)
        return ""

    errors = libzero.run_ranks(RANKS, body)
    assert errors == ["", ""] or (stage == 3 and all("got different calls" in error for error in errors)), errors


GENERATES = """
import os
import deepspeed
import torch
from conftest import config
from test_hf_loops import llama, texts, written

torch.set_num_threads(1)
prompts, wanted, end = texts()
still = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
for stage in STAGES:
    engine, *_ = deepspeed.initialize(model=llama(), config=config(stage, optimizer=still))
    rank = engine.global_rank
    for how in ("alone", "synced", "unwrapped"):
        if how == "alone" and stage == 3 and os.environ.get("ZERO_TRANSPORT"):
            continue  # over TCP ranks have to make the same calls
        if how == "unwrapped":
            with deepspeed.zero.unwrap_model_for_generation(engine) as model:
                text = written(model, prompts[rank], end)
        else:
            text = written(engine.module, prompts[rank], end, synced_gpus=how == "synced")
        assert text[:len(wanted[rank])] == wanted[rank], (stage, how, text, wanted[rank])
        engine.backward(engine(input_ids=prompts[rank], labels=prompts[rank]).loss)
        engine.step()
    engine.destroy()
    print("texts at stage", stage, "of rank", rank, flush=True)
"""


def of_deepspeed(programs: Programs, text: str, *words: str) -> str:
    """What two ranks of a program for DeepSpeed print."""
    path = programs.folder / "program.py"
    path.write_text(text)
    return under_the_runner(programs.folder, str(path), *words)


@pytest.mark.nightly
@pytest.mark.parametrize(("transport", "stages"), [("", (3,)), ("", (0, 1, 2)), ("gloo", range(4))])
def test_processes_generate_between_steps(
    transport: str, stages: Sequence[int], programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over shared memory also where ranks make different numbers of calls."""
    if transport:
        monkeypatch.setenv("ZERO_TRANSPORT", transport)
    found = of_deepspeed(programs, GENERATES.replace("STAGES", str(list(stages))))
    assert found.count("texts at stage") == 2 * len(stages)


# ---- experts --------------------------------------------------------------------------------------


@every_stage
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_that_get_no_token_on_a_rank_or_on_any(experts: str, stage: int) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    routes = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    torch.manual_seed(3)
    settings = transformers.MixtralConfig(vocab_size=40, num_key_value_heads=1, **sizes, **routes, **TOKENS)
    settings._experts_implementation = experts
    start = transformers.MixtralForCausalLM(settings)
    deepspeed.utils.set_z3_leaf_modules(start, [type(start.model.layers[0].mlp)])
    used: set[int] = set()
    gate = start.model.layers[0].mlp.gate

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        tokens = words_of(10 * step + rank, 2)
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    def note(_: Any, __: Any, out: Any) -> None:
        used.update(out[-1].flatten().tolist())

    handle = gate.register_forward_hook(note)
    loss_of(start, 0, 0)
    handle.remove()
    assert len(used) < 8  # some have no token
    wanted = by_loop(start, loss_of, 3)
    require_moved(start, wanted, "lm_head.weight")
    require_close(by_engine(start, loss_of, stage, 3), wanted, 1e-4)


# ---- preferences ----------------------------------------------------------------------------------


def likelihood(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).sum((1, 2))  # type: ignore[no-any-return]


def preference(policy: Any, reference: Any, rank: int, step: int) -> torch.Tensor:
    """The loss of direct preference optimization."""
    seed = 100 + 20 * step + 2 * rank
    chosen, rejected = words_of(seed, 6, rows=2), words_of(seed + 1, 6, rows=2)
    with torch.no_grad():
        base = likelihood(reference, chosen) - likelihood(reference, rejected)
    gain = likelihood(policy, chosen) - likelihood(policy, rejected) - base
    return -torch.nn.functional.logsigmoid(2.0 * gain).mean()


@every_stage
def test_preferences_are_learned_with_a_frozen_reference(stage: int) -> None:
    """The reference's engine gets the configuration of the training, as TRL gives it, without an optimizer."""
    plain, base, losses = llama(), llama(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_of(preference(plain, base, rank, step) for rank in range(RANKS))
        losses.append(loss.item())
        torch.autograd.backward(loss)
        optimizer.step()
    assert abs(losses[-1] - losses[0]) > 1e-3
    pairs = [(llama(), llama()) for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> list[float]:
        settings = config(stage)
        policy, *_ = deepspeed.initialize(model=pairs[comm.rank][0], config=settings)
        del settings["optimizer"]
        reference, *_ = deepspeed.initialize(model=pairs[comm.rank][1], config=settings)
        seen = []
        for step in range(3):
            loss = preference(policy, reference.eval(), comm.rank, step)
            policy.backward(loss)
            policy.step()
            seen.append(loss.item())
        require_close(policy._engine.state_dict(), plain.state_dict(), 1e-4)
        require_close(reference._engine.state_dict(), base.state_dict(), 0.0)
        return seen

    found = libzero.run_ranks(RANKS, body)
    assert [sum(pair) / RANKS for pair in zip(*found, strict=True)] == pytest.approx(losses, abs=1e-5)


# ---- adapters -------------------------------------------------------------------------------------

ADAPTERS = """
import json
import os
import sys

import peft
import torch
import transformers
from test_hf_loops import llama, words_of

torch.set_num_threads(1)
_, folder, part, *stages = sys.argv[1:]  # after --local_rank
stages = [int(stage) for stage in stages]
transformers.utils.logging.set_verbosity_error()


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = words_of(i, 10)[0]
        return {"input_ids": tokens, "labels": tokens.clone()}


class Stops(transformers.TrainerCallback):
    def on_save(self, args, state, control, **_):
        control.should_training_stop = part == "first"


def losses_of(stage, out):
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    arguments = transformers.TrainingArguments(
        output_dir=out, deepspeed={**dict.fromkeys(keys, "auto"), "zero_optimization": {"stage": stage}},
        per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2, logging_steps=1, save_strategy="steps",
        save_steps=100 if part == "whole" else 2, seed=5, use_cpu=True, report_to=[], disable_tqdm=True,
    )
    base = llama()
    torch.manual_seed(6)
    adapter = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = transformers.Trainer(
        model=peft.get_peft_model(base, adapter), args=arguments, train_dataset=Texts(), callbacks=[Stops()]
    )
    trainer.train(resume_from_checkpoint=part == "again")
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


for stage in stages:
    out = f"{folder}/{'whole' if part == 'whole' else 'parts'}-{stage}"
    losses = losses_of(stage, out)
    if os.environ["RANK"] != "0":
        continue
    if part == "again":  # the file of the adapter loads
        peft.PeftModel.from_pretrained(llama(), f"{out}/checkpoint-4")
    with open(f"{folder}/{part}-{stage}.json", "w") as file:
        json.dump(losses, file)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("stages", ["0 3", "1 2"])
def test_a_trainer_resumes_with_an_adapter_in_a_new_process(
    stages: str, programs: Programs, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    for part in ("whole", "first", "again"):
        of_deepspeed(programs, ADAPTERS, str(tmp_path), part, *stages.split())
    for stage in stages.split():
        whole, first, again = (
            json.loads((tmp_path / f"{part}-{stage}.json").read_text()) for part in ("whole", "first", "again")
        )
        assert list(whole) == ["1", "2", "3", "4"] and list(first) == ["1", "2"]
        for step in ("3", "4"):
            assert again[step] == pytest.approx(whole[step], abs=1e-6), (stage, again, whole)
        assert abs(whole["4"] - whole["1"]) > 1e-3
