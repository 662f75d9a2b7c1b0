"""Fine-tuning with `zero train --model`: what transformers and PEFT make of its files, and it of theirs; and how well
small models from random weights learn to answer questions in SQuAD's format.

Needs the program `zero`, transformers, tokenizers and peft.
"""

import json
import os
import random
import re
import string
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, find_zero

pytestmark = pytest.mark.nightly
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

# Who, what and where: every fact has its own verb, so that the question tells which fact it is about, and values that
# are drawn again for every text, so that only the text tells the answer.
NAMES = "Anna Ben Carla David Emma Felix Grace Hugo Iris Jonas Klara Leon".split()
FACTS = [
    ("{} lives in {}.", "Where does {} live?", ["Oslo", "Rome", "Bern", "Lima", "Cairo", "New York", "Quito", "Riga"]),
    ("{} works as a {}.", "What is the job of {}?", ["baker", "nurse", "pilot", "judge", "taxi driver", "cook"]),
    ("{} owns a {}.", "Which pet does {} own?", ["cat", "dog", "horse", "parrot", "guinea pig", "snake", "goat"]),
    ("{} likes {}.", "What does {} like to eat?", ["bread", "soup", "rice", "apples", "ice cream", "cheese", "fish"]),
]
HELD_OUT = {("Anna", "Oslo"), ("Ben", "pilot"), ("Carla", "parrot"), ("David", "soup")}  # never together in training


def squad(path: Path, count: int, seed: int, held_out: bool) -> Path:
    """Questions in SQuAD's format. held_out: about pairs of a person and a value that training never has."""
    draw = random.Random(seed)
    paragraphs: list[dict[str, Any]] = []
    pairs = sorted(HELD_OUT)
    while len(paragraphs) < count:
        asked = None
        if held_out:
            person, wanted = draw.choice(pairs)
            asked = next(i for i, fact in enumerate(FACTS) if wanted in fact[2])
        else:
            person = draw.choice(NAMES)
        chosen = draw.sample(range(len(FACTS)), 3)
        if asked is not None and asked not in chosen:
            chosen[0] = asked
        draw.shuffle(chosen)
        context, values, starts = "", [], []
        for fact in chosen:
            value = wanted if held_out and fact == asked else draw.choice(FACTS[fact][2])
            sentence = FACTS[fact][0].format(person, value)
            starts.append(len(context) + sentence.rindex(value))
            values.append(value)
            context += sentence + " "
        if not held_out and any((person, value) in HELD_OUT for value in values):
            continue
        which = chosen.index(asked) if asked is not None else draw.randrange(3)
        answer = {"text": values[which], "answer_start": starts[which]}
        question = {"id": str(len(paragraphs)), "question": FACTS[chosen[which]][1].format(person), "answers": [answer]}
        paragraphs.append({"context": context.strip(), "qas": [question]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "people", "paragraphs": paragraphs}]}))
    return path


def words_of_facts() -> list[str]:
    texts = [text for fact in FACTS for text in (fact[0], fact[1], *fact[2])] + NAMES
    return [*texts, "Question: Answer: the"]


def wordpiece(folder: Path) -> None:
    """vocab.txt of whole words."""
    words = {word for text in words_of_facts() for word in text.lower().replace("{}", " ").replace(".", " ").split()}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", *sorted(word.strip("?:") for word in words)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(piece for piece in pieces if piece)) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def byte_pairs(folder: Path) -> None:
    """tokenizer.json of byte-level BPE, trained on the words."""
    made = tokenizers.ByteLevelBPETokenizer()
    texts = [f"{a} {b}" for a in words_of_facts() for b in words_of_facts()]
    end = "<|endoftext|>"
    made.train_from_iterator(texts, vocab_size=600, min_frequency=1, special_tokens=[end], show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token=end, eos_token=end, unk_token=end
    )
    fast.save_pretrained(str(folder))


def train(folder: Path, *words: str, ranks: int = 1, code: int = 0) -> dict[str, Any]:
    """Runs `zero train` and returns result.json."""
    program = find_zero()
    if program is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    command = [program, "run", "-n", str(ranks), program, "train", *words, "--out", str(folder / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other slow down other tests
    done = subprocess.run(
        [*command, "--sample", "8"], capture_output=True, text=True, timeout=600, cwd=folder, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code != 0:
        return {"error": done.stderr}
    return json.loads((folder / "out" / "result.json").read_text())


def configuration(folder: Path, **more: Any) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.98], "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3},
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def answers(model: str, folder: Path, *more: str) -> tuple[float, float]:
    """F1 on held-out questions before and after training from random weights."""
    training = squad(folder / "train.json", 4000, seed=1, held_out=False)
    held_out = squad(folder / "held-out.json", 120, seed=2, held_out=True)
    words = ["--model", model, "--task", "qa", "--data", str(training), "--eval-data", str(held_out)]
    words += ["--tokenizer", str(folder), "--stage", "0", "--seq-length", "64", *more]
    for size in ("layers=2", "hidden=64", "heads=4"):
        words += ["--set", "libzero.model." + size]
    before = train(folder, configuration(folder), *words, "--steps", "1", "--lr", "0")["metrics"]
    schedule = {"warmup_num_steps": 50, "warmup_type": "linear", "total_num_steps": "auto"}
    config = configuration(
        folder, train_micro_batch_size_per_gpu=32, scheduler={"type": "WarmupCosineLR", "params": schedule}
    )
    after = train(folder, config, *words, "--steps", "600", "--lr", "0.002", "--export", str(folder / "trained"))[
        "metrics"
    ]
    return before["f1"], after["f1"]


def answers_again(model: str, folder: Path) -> float:
    """F1 of exported weights on two ranks at stage 3, with other micro-batches."""
    config = configuration(folder, train_micro_batch_size_per_gpu=7)
    words = ["--model", model, "--task", "qa", "--data", str(folder / "train.json"), "--seq-length", "64"]
    words += ["--eval-data", str(folder / "held-out.json"), "--stage", "3", "--steps", "1", "--lr", "0"]
    return train(folder, config, *words, ranks=2)["metrics"]["f1"]


def test_a_small_bert_learns_to_answer(tmp_path: Path) -> None:
    wordpiece(tmp_path)
    before, after = answers("bert-base", tmp_path, "--set", "libzero.model.dropout=0")
    assert before < 40
    assert after > 80


def test_a_small_gpt2_learns_to_answer(tmp_path: Path) -> None:
    byte_pairs(tmp_path)
    before, after = answers("gpt2", tmp_path)
    assert before < 20
    assert after > 80
    assert abs(answers_again(str(tmp_path / "trained"), tmp_path) - after) < 1


END = 256  # of a text, for the tokenizer of bytes


def prompts(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    with path.open("w") as out:
        for _ in range(count):
            fact = draw.choice(FACTS)
            person, value = draw.choice(NAMES), draw.choice(fact[2])
            before, after = fact[0].format(person, "|" + value).split("|")
            out.write(json.dumps({"prompt": before.strip(), "completion": " " + after}) + "\n")
    return path


def loss_of(model: Any, path: Path) -> float:
    """Mean loss of the completions' bytes and of the end of the text, by transformers' logits."""
    total, count = 0.0, 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        prompt, completion = list(record["prompt"].encode()), [*record["completion"].encode(), END]
        tokens = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(input_ids=tokens[:, :-1]).logits[0].double()
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")[-len(completion) :]
        total += losses.sum().item()
        count += len(completion)
    return total / count


def llama(positions: int = 64) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=260, num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.2, **shape
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(positions: int = 64) -> Any:
    config = transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=positions)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


MAKE = {"llama": llama, "gpt2": gpt2}
TARGETS = {"llama": "q_proj+v_proj+down_proj", "gpt2": "c_attn+c_fc"}


@pytest.fixture
def base(tmp_path: Path, request: Any) -> tuple[Path, str]:
    torch.manual_seed(3)
    MAKE[request.param]().save_pretrained(tmp_path / "model")
    prompts(tmp_path / "train.jsonl", 60, 1)
    prompts(tmp_path / "held-out.jsonl", 20, 2)
    return tmp_path, request.param


def words(folder: Path, *more: str) -> list[str]:
    data = ["--data", str(folder / "train.jsonl"), "--eval-data", str(folder / "held-out.jsonl")]
    model = ["--model", str(folder / "model"), "--tokenizer", "bytes", "--task", "lm"]
    return [configuration(folder), *model, *data, "--seq-length", "64", *more]


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("base", list(MAKE), indirect=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_peft_loads_adapters(base: tuple[Path, str], stage: int) -> None:
    folder, name = base
    more = ["--stage", str(stage), "--lora", "rank=4,alpha=8,targets=" + TARGETS[name], "--steps", "6"]
    result = train(folder, *words(folder, *more, "--export", str(folder / "adapters")), ranks=2)
    adapted = peft.PeftModel.from_pretrained(load(folder / "model"), folder / "adapters").eval()
    assert abs(result["heldout_loss"] - loss_of(adapted, folder / "held-out.jsonl")) < 1e-5
    assert abs(result["heldout_loss"] - loss_of(load(folder / "model"), folder / "held-out.jsonl")) > 1e-3

    train(folder, *words(folder, *more, "--export", str(folder / "merged"), "--merge-lora"), ranks=2)
    merged = load(folder / "merged")
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        assert (merged(tokens).logits - adapted(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_merging_in_bf16_adds_the_masters_of_the_factors(base: tuple[Path, str]) -> None:
    folder, name = base
    more = ["--dtype", "bf16", "--lora", "rank=4,alpha=8,targets=" + TARGETS[name], "--steps", "4"]
    train(folder, *words(folder, *more, "--export", str(folder / "adapters")))
    merging = ["--stage", "3", "--export", str(folder / "merged"), "--merge-lora"]
    train(folder, *words(folder, *more, *merging), ranks=1)
    adapted = peft.PeftModel.from_pretrained(load(folder / "model").bfloat16().float(), folder / "adapters")
    merged, wanted = load(folder / "merged").state_dict(), adapted.merge_and_unload().state_dict()
    for key, value in wanted.items():
        assert (merged[key] - value).abs().max() < 1e-6, key


@pytest.mark.parametrize("base", list(MAKE), indirect=True)
def test_adapters_of_peft_are_loaded(base: tuple[Path, str]) -> None:
    folder, name = base
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=TARGETS[name].split("+"), task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2"
    )
    adapted = peft.get_peft_model(load(folder / "model"), config).eval()
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if "lora_" in key:
                value.normal_(0, 0.2)
    adapted.save_pretrained(folder / "adapters")
    more = ["--lora-from", str(folder / "adapters"), "--lr", "0", "--steps", "1", "--merge-lora"]
    result = train(folder, *words(folder, *more, "--export", str(folder / "merged")), ranks=2)
    assert abs(result["heldout_loss"] - loss_of(adapted, folder / "held-out.jsonl")) < 1e-5
    merged, wanted = load(folder / "merged").state_dict(), adapted.merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (merged[key] - value).abs().max() < 1e-6, key


@pytest.mark.parametrize("base", list(MAKE), indirect=True)
def test_transformers_load_what_was_trained(base: tuple[Path, str]) -> None:
    folder, _ = base
    result = train(folder, *words(folder, "--steps", "4", "--export", str(folder / "trained")), ranks=2)
    trained = load(folder / "trained")
    assert abs(result["heldout_loss"] - loss_of(trained, folder / "held-out.jsonl")) < 1e-5
    assert abs(result["metrics"]["perplexity"] - torch.tensor(result["heldout_loss"]).exp()) < 1e-2
    prompt = json.loads((folder / "held-out.jsonl").read_text().splitlines()[0])["prompt"]
    said = greedy(trained, list(prompt.encode()), 8)
    written = folder / "out" / "sample.txt"
    shown = written.read_text(errors="replace").strip("\n") if written.exists() else prompt
    assert shown.replace("\ufffd", "") == (prompt + said).replace("\ufffd", "").strip("\n")


def test_tied_tensors_are_counted_once(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=260, max_position_embeddings=64, tie_word_embeddings=True, **shape)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    prompts(tmp_path / "train.jsonl", 8, 1)
    prompts(tmp_path / "held-out.jsonl", 4, 2)
    train(tmp_path, *words(tmp_path, "--steps", "1"))
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["parameters"] == model.num_parameters()


def test_any_end_of_the_configuration_ends_a_text(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = llama()
    model.resize_token_embeddings(600)
    (tmp_path / "model").mkdir()
    byte_pairs(tmp_path / "model")
    prompts(tmp_path / "train.jsonl", 8, 1)
    prompts(tmp_path / "held-out.jsonl", 4, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = json.loads((tmp_path / "held-out.jsonl").read_text().splitlines()[0])["prompt"]
    tokens = torch.tensor([tokenizer(prompt).input_ids])
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    said = model.generate(tokens, eos_token_id=[tokenizer.eos_token_id], pad_token_id=0, **how)[0, tokens.shape[1] :]
    assert len(set(said.tolist())) > 2
    model.config.eos_token_id = [tokenizer.eos_token_id, int(said[2])]
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    options = words(tmp_path, "--lr", "0", "--steps", "1")
    del options[options.index("--tokenizer") : options.index("--tokenizer") + 2]
    train(tmp_path, *options)
    before = said[: said.tolist().index(int(said[2]))]
    assert (tmp_path / "out" / "sample.txt").read_text().strip("\n") == prompt + tokenizer.decode(before)


def test_adapters_are_of_weights_that_others_have(tmp_path: Path) -> None:
    """A BERT without a pooler, which is frozen under adapters, so that they cannot be without it."""
    wordpiece(tmp_path)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    vocabulary = len((tmp_path / "vocab.txt").read_text().splitlines())
    config = transformers.BertConfig(vocab_size=vocabulary, max_position_embeddings=64, **size)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": "anna lives in oslo.", "label": "a"}), json.dumps({"text": "ben?", "label": "b"})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines * 8) + "\n")
    options = [configuration(tmp_path), "--model", str(tmp_path / "model"), "--tokenizer", str(tmp_path)]
    options += ["--task", "classify", "--data", str(tmp_path / "train.jsonl"), "--seq-length", "32", "--steps", "1"]
    options += ["--lora", "rank=2"]
    train(tmp_path, *options, "--export", str(tmp_path / "whole"), "--merge-lora")
    assert "bert.pooler.dense.weight" in transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "whole"
    ).state_dict()
    failed = train(tmp_path, *options, "--export", str(tmp_path / "adapters"), code=2)
    assert "bert.pooler.dense.weight" in failed["error"]


def small_bert(folder: Path, kind: Any, **more: Any) -> Any:
    """Saves a BERT with large random weights and a tokenizer of words to folder/model."""
    (folder / "model").mkdir()
    wordpiece(folder / "model")
    vocabulary = len((folder / "model" / "vocab.txt").read_text().splitlines())
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=vocabulary, max_position_embeddings=64, initializer_range=0.3, **size, **dropout, **more
    )
    model = kind(config)
    model.save_pretrained(folder / "model")
    return model


@pytest.mark.parametrize("adapters", [True, False])
def test_scores_of_a_classifier(tmp_path: Path, adapters: bool) -> None:
    """Loss and accuracy by transformers' logits, with adapters and the head in PEFT's files, and of whole weights. 7
    held-out records on two ranks with micro-batches of 2: the last batch of the second rank is not whole."""
    torch.manual_seed(7)
    labels: dict[str, dict[Any, Any]] = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    small_bert(tmp_path, transformers.BertForSequenceClassification, **labels)
    draw = random.Random(3)
    for name, count in (("train", 40), ("held-out", 7)):
        with (tmp_path / (name + ".jsonl")).open("w") as out:
            for _ in range(count):
                value = draw.choice(FACTS[0][2])
                text = FACTS[0][0].format(draw.choice(NAMES), value)
                out.write(json.dumps({"text": text, "label": "yes" if value in FACTS[0][2][:4] else "no"}) + "\n")
    config = configuration(tmp_path, train_micro_batch_size_per_gpu=2)
    options = [config, "--model", str(tmp_path / "model"), "--task", "classify", "--seq-length", "32", "--steps", "6"]
    options += ["--data", str(tmp_path / "train.jsonl"), "--eval-data", str(tmp_path / "held-out.jsonl")]
    options += ["--lora", "rank=2"] if adapters else []
    result = train(tmp_path, *options, "--export", str(tmp_path / "trained"), ranks=2)
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(tmp_path / ("model" if adapters else "trained")).eval()
    if adapters:
        model = peft.PeftModel.from_pretrained(model, tmp_path / "trained").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    losses, right = [], []
    for line in (tmp_path / "held-out.jsonl").read_text().splitlines():
        record = json.loads(line)
        label = torch.tensor([labels["label2id"][record["label"]]])
        with torch.no_grad():
            logits = model(**tokenizer(record["text"], return_tensors="pt")).logits
        losses.append(torch.nn.functional.cross_entropy(logits.double(), label).item())
        right.append(int(logits.argmax()) == int(label))
    assert 0 < sum(right) < 7
    assert len(losses) == result["heldout_samples"] == 7
    assert abs(result["heldout_loss"] - sum(losses) / 7) < 1e-5
    assert abs(result["metrics"]["accuracy"] - sum(right) / 7) < 1e-9


def test_adapters_of_a_t5(tmp_path: Path) -> None:
    """Loss of the targets' bytes and their end, by PEFT's logits."""
    torch.manual_seed(8)
    t5().save_pretrained(tmp_path / "model")
    draw = random.Random(4)
    for name, count in (("train", 40), ("held-out", 7)):
        with (tmp_path / (name + ".jsonl")).open("w") as out:
            for _ in range(count):
                fact = draw.choice(FACTS)
                value = draw.choice(fact[2])
                out.write(json.dumps({"source": fact[0].format(draw.choice(NAMES), value), "target": value}) + "\n")
    config_file = configuration(tmp_path, train_micro_batch_size_per_gpu=2)
    options = [config_file, "--model", str(tmp_path / "model"), "--tokenizer", "bytes", "--task", "seq2seq"]
    options += ["--data", str(tmp_path / "train.jsonl"), "--eval-data", str(tmp_path / "held-out.jsonl")]
    options += ["--seq-length", "64", "--steps", "6", "--lora", "rank=2", "--export", str(tmp_path / "adapters")]
    result = train(tmp_path, *options, ranks=2)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "model")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
    total, count = 0.0, 0
    for line in (tmp_path / "held-out.jsonl").read_text().splitlines():
        record = json.loads(line)
        source = torch.tensor([list(record["source"].encode())])
        target = torch.tensor([[*record["target"].encode(), END]])
        with torch.no_grad():
            logits = adapted(input_ids=source, labels=target).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, target[0], reduction="sum").item()
        count += target.numel()
    assert abs(result["heldout_loss"] - total / count) < 1e-5


def words_of(answer: str) -> list[str]:
    """As SQuAD's script compares answers: in lower case, without punctuation and without articles."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_and_f1(said: str, references: list[str]) -> tuple[float, float]:
    """SQuAD's: the best of all references. F1 is the harmonic mean of the shares of the words said that are in the
    reference, and of the reference's that were said; without words on a side, whether there are none on both."""
    exact, f1 = 0.0, 0.0
    for reference in references:
        mine, theirs = words_of(said), words_of(reference)
        common = sum((Counter(mine) & Counter(theirs)).values())
        exact = max(exact, float(mine == theirs))
        if not mine or not theirs:
            f1 = max(f1, float(mine == theirs))
        elif common > 0:
            precision, recall = common / len(mine), common / len(theirs)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
    return exact, f1


def check_answers(result: dict[str, Any], scores: list[tuple[float, float]]) -> None:
    """Of a model that is neither always right nor always wrong."""
    exact, f1 = (100 * sum(part) / len(scores) for part in zip(*scores, strict=True))
    assert 0 < exact < f1 < 100
    assert abs(result["metrics"]["exact_match"] - exact) < 1e-6
    assert abs(result["metrics"]["f1"] - f1) < 1e-6


def test_chosen_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """Loss, exact match and F1 of 23 questions, some with two references or without an answer, in windows of 24 tokens,
    on two ranks with micro-batches of 2."""
    torch.manual_seed(9)
    small_bert(tmp_path, transformers.BertForQuestionAnswering)
    squad(tmp_path / "train.json", 400, seed=1, held_out=False)
    held_out = squad(tmp_path / "held-out.json", 23, seed=2, held_out=False)
    for name in ("train", "held-out"):
        whole = json.loads((tmp_path / f"{name}.json").read_text())
        for i, paragraph in enumerate(whole["data"][0]["paragraphs"]):
            question, context = paragraph["qas"][0], paragraph["context"]
            short = question["answers"][0]
            begin = context.rindex(" ", 0, short["answer_start"] - 1) + 1
            text = context[begin : short["answer_start"] + len(short["text"])]  # "in Oslo", "a baker"
            question["answers"] = [{"text": text, "answer_start": begin}]
            if i % 5 == 1:
                question |= {"is_impossible": True, "answers": []}
            elif i % 3 == 0 and name == "held-out":
                question["answers"].append(short)
        (tmp_path / f"{name}.json").write_text(json.dumps(whole))
    config = configuration(tmp_path, train_micro_batch_size_per_gpu=2)
    options = [config, "--model", str(tmp_path / "model"), "--task", "qa", "--seq-length", "24", "--steps", "200"]
    options += ["--predictions", str(tmp_path / "said.json"), "--lr", "0.003"]
    options += ["--data", str(tmp_path / "train.json"), "--eval-data", str(held_out)]
    result = train(tmp_path, *options, "--export", str(tmp_path / "trained"), ranks=2)
    model = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "trained").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    questions = json.loads(held_out.read_text())["data"][0]["paragraphs"]
    windows: list[dict[str, Any]] = []
    for number, paragraph in enumerate(questions):
        context, question = paragraph["context"], paragraph["qas"][0]
        cut = {"truncation": "only_second", "max_length": 24, "stride": 8, "return_overflowing_tokens": True}
        pairs = tokenizer(question["question"], context, return_offsets_mapping=True, **cut)
        for w, offsets in enumerate(pairs["offset_mapping"]):
            shown = [i for i, side in enumerate(pairs.sequence_ids(w)) if side == 1]
            place = (0, 0)  # the token [CLS]: not in this window
            for answer in question["answers"][:1]:
                begin, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
                within = [i for i in shown if begin <= offsets[i][0] < end]
                if within and offsets[within[0]][0] == begin and offsets[within[-1]][1] == end:
                    place = (within[0], within[-1])
            window = {key: pairs[key][w] for key in ("input_ids", "token_type_ids", "attention_mask")}
            windows.append({"number": number, "shown": shown, "offsets": offsets, "place": place, "inputs": window})
    chosen, empty, loss = [(-float("inf"), "")] * 23, [float("inf")] * 23, 0.0
    for at in range(0, len(windows), 2):
        # Padded as a micro-batch, because BERT's choice of an answer's tokens is among padding, too.
        inputs = tokenizer.pad([window["inputs"] for window in windows[at : at + 2]], return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs)
        for window, *logits in zip(windows[at : at + 2], out.start_logits, out.end_logits, strict=True):
            both = torch.stack(logits)
            loss += torch.nn.functional.cross_entropy(both.double(), torch.tensor(window["place"])).item()
            number, offsets = window["number"], window["offsets"]
            for i in window["shown"]:
                for k in window["shown"]:
                    if i <= k < i + 30 and (score := float(both[0, i] + both[1, k])) > chosen[number][0]:
                        chosen[number] = (score, questions[number]["context"][offsets[i][0] : offsets[k][1]])
            empty[number] = min(empty[number], float(both[0, 0] + both[1, 0]))
    predictions = json.loads((tmp_path / "said.json").read_text())
    scores, said_nothing = [], 0
    for paragraph, (score, text), least in zip(questions, chosen, empty, strict=True):
        said = "" if least > score else text
        assert predictions[paragraph["qas"][0]["id"]] == said
        said_nothing += said == ""
        scores.append(exact_and_f1(said, [answer["text"] for answer in paragraph["qas"][0]["answers"]] or [""]))
    assert len(windows) % 4 != 0 and len(windows) > 23 and 0 < said_nothing < 23
    assert result["heldout_samples"] == len(windows)
    assert abs(result["heldout_loss"] - loss / len(windows)) < 1e-5
    check_answers(result, scores)


def known_answers(path: Path, count: int, seed: int, changed: bool) -> list[dict[str, Any]]:
    """Questions that always have the same answer, of one word or two, some after a text of no use. changed: of some the
    reference is another, or there are two."""
    draw = random.Random(seed)
    pairs = [(fact, name) for fact in FACTS for name in NAMES[:6]]
    records: list[dict[str, Any]] = []
    for i in range(count):
        fact, name = pairs[i] if changed else draw.choice(pairs)
        answer = fact[2][(len(name) + len(fact[0])) % len(fact[2])]
        record: dict[str, Any] = {"question": fact[1].format(name), "answers": [answer]}
        if changed and i % 4 == 1:
            record["answers"] = [answer + " and " + draw.choice(fact[2])]
        if changed and i % 6 == 5:
            record["answers"] = [draw.choice(fact[2]), "the " + answer.upper() + "!"]
        if draw.random() < 0.3:
            # The last is too long and loses its end.
            record["context"] = " ".join(draw.choice(NAMES) for _ in range(draw.choice([1, 3, 30])))
        records.append(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def t5() -> Any:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=260, dropout_rate=0.0, decoder_start_token_id=0, **size)
    return transformers.T5ForConditionalGeneration(config)


def prompt_of(name: str, record: dict[str, Any], length: int) -> list[int]:
    """Of a context that is too long, the end is left out: docs/data.md."""
    question, context = record["question"].encode(), record.get("context", "").encode()
    if name == "t5":
        return list((b"question: " + question + (b" context: " + context if context else b""))[:length])
    question = (b"\n\nQuestion: " if context else b"Question: ") + question + b"\n\nAnswer:"
    return list(context[: length - len(question)] + question)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generated_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Loss, exact match and F1 of 23 questions on two ranks with micro-batches of 2, by transformers' generate() on
    bytes, a question at a time."""
    torch.manual_seed(10)
    made = t5() if name == "t5" else MAKE[name](128)
    made.save_pretrained(tmp_path / "model")
    known_answers(tmp_path / "train.jsonl", 400, 1, changed=False)
    records = known_answers(tmp_path / "held-out.jsonl", 23, 2, changed=True)
    length = 96 if name == "t5" else 128
    config = configuration(tmp_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=8)
    options = [config, "--model", str(tmp_path / "model"), "--tokenizer", "bytes", "--task", "qa"]
    options += ["--data", str(tmp_path / "train.jsonl"), "--eval-data", str(tmp_path / "held-out.jsonl")]
    options += ["--seq-length", str(length), "--steps", "80", "--predictions", str(tmp_path / "said.json")]
    result = train(tmp_path, *options, "--export", str(tmp_path / "trained"), ranks=2)
    kind = transformers.T5ForConditionalGeneration if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(tmp_path / "trained").eval()
    predictions = json.loads((tmp_path / "said.json").read_text())
    scores, total, count = [], 0.0, 0
    for number, record in enumerate(records):
        prompt = torch.tensor([prompt_of(name, record, length if name == "t5" else length - 32)])
        how = {"max_new_tokens": 32, "do_sample": False, "num_beams": 1, "attention_mask": torch.ones_like(prompt)}
        whole = model.generate(prompt, **how, eos_token_id=END, pad_token_id=END)[0].tolist()
        said = whole[1 if name == "t5" else prompt.shape[1] :]
        said = said[: said.index(END)] if END in said else said
        text = bytes(token for token in said if token < 256).decode(errors="replace")
        assert predictions[f"#{number}"] == text.lstrip(" ")
        scores.append(exact_and_f1(text, record["answers"]))
        answer = record["answers"][0]
        wanted = torch.tensor([[*(answer if name == "t5" else " " + answer).encode(), END]])
        with torch.no_grad():
            if name == "t5":
                logits = model(input_ids=prompt, labels=wanted).logits[0]
            else:
                # What does not fit is cut for the answer's length here.
                whole = prompt_of(name, record, length + 1 - wanted.numel()) + wanted[0].tolist()
                logits = model(input_ids=torch.tensor([whole[:-1]])).logits[0, -wanted.numel() :]
        total += torch.nn.functional.cross_entropy(logits.double(), wanted[0], reduction="sum").item()
        count += wanted.numel()
    assert result["heldout_samples"] == 23
    assert abs(result["heldout_loss"] - total / count) < 1e-5
    check_answers(result, scores)


def test_masked_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """The held-out loss of masked tokens on two ranks, whose last micro-batches are not whole. Which tokens are masked
    and what replaces them is told by tests/data/tokenizer_program; the others are those of transformers' tokenizer."""
    program = Path(os.environ.get("ZERO_BUILD", REPOSITORY / "build")) / "tests" / "tokenizer_program"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    torch.manual_seed(11)
    small_bert(tmp_path, transformers.BertForMaskedLM)
    draw = random.Random(5)
    texts: dict[str, list[str]] = {}
    for name, lines in (("train", 60), ("held-out", 25)):
        texts[name] = [
            " ".join(fact[0].format(draw.choice(NAMES), draw.choice(fact[2])) for fact in draw.sample(FACTS, 2))
            for _ in range(lines)
        ]
        (tmp_path / f"{name}.txt").write_text("\n".join(texts[name]) + "\n")
    config = configuration(tmp_path, train_micro_batch_size_per_gpu=2)
    options = [config, "--model", str(tmp_path / "model"), "--task", "mlm", "--seq-length", "32", "--steps", "6"]
    options += ["--data", str(tmp_path / "train.txt"), "--eval-data", str(tmp_path / "held-out.txt")]
    result = train(tmp_path, *options, "--export", str(tmp_path / "trained"), ranks=2)
    told = subprocess.run(
        [program, "samples", str(tmp_path / "model"), str(tmp_path / "held-out.txt"), "mlm", "32"],
        capture_output=True,
        text=True,
        check=True,
    )
    samples = [json.loads(line) for line in told.stdout.splitlines()]
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path / "trained").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    stream = [token for text in texts["held-out"] for token in [*tokenizer.encode(text)[1:-1], tokenizer.sep_token_id]]
    total, chosen, masks, count = 0.0, 0, 0, 0
    for i, sample in enumerate(samples):
        plain = [tokenizer.cls_token_id, *stream[30 * i : 30 * (i + 1)], tokenizer.sep_token_id]
        ids, labels = torch.tensor(sample["ids"]), torch.tensor(sample["labels"])
        assert torch.where(labels == -100, ids, labels).tolist() == plain
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        chosen += int((labels != -100).sum())
        masks += int((ids == tokenizer.mask_token_id).sum())
        count += len(plain) - plain.count(tokenizer.sep_token_id) - 1
    assert 0.1 < chosen / count < 0.2
    assert 0.6 < masks / chosen < 1
    assert len(samples) == result["heldout_samples"] == len(stream) // 30
    assert len(samples) % 4 != 0
    assert abs(result["heldout_loss"] - total / chosen) < 1e-5


def greedy(model: Any, tokens: list[int], count: int) -> str:
    """What follows, up to the end of the text, without kept keys and values. Ids that are no bytes have no text."""
    said: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([tokens + said])).logits[0, -1].argmax())
        if token == END:
            break
        said.append(token)
    return bytes(token for token in said if token < 256).decode(errors="replace")
