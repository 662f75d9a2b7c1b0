"""Our tokenizers against the packages `tokenizers` and `sentencepiece`, on lines that neither was trained on.

The text is what the system's gettext catalogs and iso-codes say in some 80 languages. No vocabulary is downloaded: each
case trains one on a part of the lines, saves it in the formats of its kind, and compares ids, types, offsets and
decoded text on 10,000 other lines and on lines with special tokens, white space, emoji and combining marks.

    python -m pytest tests/data/tokenizers_test.py     ZERO_TOKENIZER_PROGRAM: build/tests/tokenizer_program
"""

import gettext
import json
import os
import random
import re
import string
import subprocess
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

PROGRAM = Path(os.environ.get("ZERO_TOKENIZER_PROGRAM", Path(__file__).parents[2] / "build/tests/tokenizer_program"))
LINES, TRAINING_LINES, VOCABULARY, SCRIPTS = 10_000, 6_000, 4_000, 20

HARD = [
    "",
    " ",
    "   ",
    "\n",
    "a",
    " a",
    "a ",
    "  two  spaces  ",
    "tab\tand\r\nline ends\n\n\nthree",
    "trailing   ",
    "\u00a0no-break\u2003em\u3000ideographic\u200bzero\ufeffbom\u0085next\u2028line\u180emongolian",
    "I'm you're we'll they've he'd it's DON'T don’t ſ K",
    "123 4567,89 ٣٤٥ ½ ² Ⅻ ⓐ",
    "e\u0301 \u00e9 e\u0301\u0323 \u1e69 s\u0323\u0307 s\u0307\u0323 A\u030a \u212b Å",
    "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8 ﾊﾟ ｶﾞ ＡＢＣ ﬁ ﬀ ㎏ ㍿ ™ …",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 1️⃣ 🤩🫠 👩🏿‍🚀",
    "नमस्ते क्षत्रिय தமிழ் ภาษาไทย မြန်မာ ខ្មែរ བོད་ཡིག",
    "İstanbul IŞIK ΣΑΣ ΌΣΟΣ ß ẞ ǅ Ǆ",
    "\u202eright\u202c to \u2066left\u2069 \u0627\u0644\u0644\u0651\u064e\u0647",
    "\x01control\x7f\x1b[31m \ufffd",
    "中文字符混合english和日本語テキスト、句読点。",
    "a" * 300,
    "word" * 40 + " " + "字" * 150,
    "!!!???...,,,---___***###$$$%%%^^^&&&",
    "http://example.org/a?b=c&d=%20#e <tag attr='x'>text</tag> {\"k\": [1, 2]}",
    "x=1;\n    if (x) {\n\t\treturn  x;\n    }\n",
    "\U00020000\U0002a6df\U0002f800 \U0001d400\U0001d7ce \U000e0041",
    "<s> </s> <unk> <pad> [CLS] [SEP] [MASK][UNK] <mask>  <mask> x",
    "  [MASK]  [MASK]  ",
    "text<|endoftext|>more <|endoftext|> <|endoftext|>",
    "<extra_id_0> a <extra_id_1>b<extra_id_99>",
    "NewWord newword NEWWORD xNewWordx NewWord, aNewWord",
    "▁▁ a▁b ▁",
    "Ġ Ċ Ā ĀĀ",
    "<0x0A> <0xFF>",
]


def catalogs() -> list[str]:
    """Lines of all languages in turn, each once."""
    by_language: dict[str, dict[str, None]] = {}
    for path in sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/*.mo")):
        lines = by_language.setdefault(path.parts[4], {})
        if len(lines) > 2000:
            continue
        try:
            with path.open("rb") as file:
                values = gettext.GNUTranslations(file)._catalog.values()  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError, ValueError, LookupError):
            continue
        for value in values:
            if isinstance(value, str) and value != "":
                lines.update(dict.fromkeys(line for line in value.splitlines() if len(line) > 8))
    draw = random.Random(20261126)
    lists = [draw.sample(sorted(lines), min(len(lines), 1500)) for _, lines in sorted(by_language.items())]
    chosen: dict[str, None] = {}
    for i in range(1500):
        chosen.update(dict.fromkeys(lines[i] for lines in lists if i < len(lines)))
    return list(chosen)


@pytest.fixture(scope="module")
def text() -> tuple[list[str], list[str]]:
    """For training and for the comparison."""
    lines = catalogs()
    if len(lines) < LINES + TRAINING_LINES:
        pytest.skip(f"{len(lines)} lines in the gettext catalogs of this system, {LINES + TRAINING_LINES} are needed: iso-codes")
    compared = lines[TRAINING_LINES : TRAINING_LINES + LINES]
    # The first word of a letter's name: LATIN, CYRILLIC, CJK.
    scripts = {unicodedata.name(letter, "?").split()[0] for letter in set("".join(compared)) if letter.isalpha()}
    assert len(scripts) >= SCRIPTS, scripts
    return lines[:TRAINING_LINES], compared


def ask(folder: Path, questions: list[Any]) -> list[Any]:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run([PROGRAM, "encode", folder], input=lines, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def byte_offsets(text: str, offsets: list[tuple[int, int]]) -> list[list[int]]:
    places = [0]
    for character in text:
        places.append(places[-1] + len(character.encode()))
    return [[places[begin], places[end]] for begin, end in offsets]


def trained(tokenizer: Tokenizer, trainer: Any, lines: list[str]) -> Tokenizer:
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def byte_level_bpe(lines: list[str], **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options.pop("model", {})))
    tokenizer.pre_tokenizer = options.get("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=options.get("special", ["<|endoftext|>"]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return trained(tokenizer, trainer, lines)


def save_config(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


# Each case saves files into the folder and returns the reference.
def gpt2(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = byte_level_bpe(lines)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens(["NewWord", AddedToken("newword", single_word=True, normalized=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def gpt2_files(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = byte_level_bpe(lines)
    tokenizer.model.save(str(folder))
    save_config(folder, tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    return tokenizer


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama3(folder: Path, lines: list[str]) -> Tokenizer:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = byte_level_bpe(
        lines, pre_tokenizer=split, special=["<|begin_of_text|>", "<|end_of_text|>"], model={"ignore_merges": True}
    )
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", begin)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def roberta(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = byte_level_bpe(
        lines, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True), special=["<s>", "<pad>", "</s>", "<unk>"]
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ids, trim_offsets=True, add_prefix_space=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def llama2(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, limit_alphabet=500, max_token_length=16, show_progress=False
    )
    trained(tokenizer, trainer, lines[:2000])
    # The tokens of bytes are no special ones in Llama's file.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def metaspace_bpe(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", "<mask>"], limit_alphabet=400, show_progress=False
    )
    trained(tokenizer, trainer, lines)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def suffix_bpe(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.CharDelimiterSplit("_")]
    )
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>"], end_of_word_suffix="</w>", limit_alphabet=400, show_progress=False
    )
    trained(tokenizer, trainer, lines)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece(lines: list[str], **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=BERT, limit_alphabet=1200, show_progress=False)
    trained(tokenizer, trainer, lines)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ids)
    return tokenizer


def bert(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = wordpiece(lines, lowercase=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def bert_text(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = wordpiece(lines, lowercase=True)
    tokenizer.model.save(str(folder))
    return tokenizer


def bert_cased_text(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = wordpiece(lines, lowercase=False, strip_accents=False)
    tokenizer.model.save(str(folder))
    save_config(folder, tokenizer_class="BertTokenizer", do_lower_case=False)
    return tokenizer


def split_wordpiece(folder: Path, lines: list[str]) -> Tokenizer:
    tokenizer = wordpiece(lines, lowercase=False, strip_accents=False, clean_text=False, handle_chinese_chars=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Nmt()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.Digits(),
            pre_tokenizers.Split(Regex(r"[aeiou]{2,}|[\d\w]z"), behavior="merged_with_previous"),
            pre_tokenizers.Split("o", behavior="merged_with_next", invert=False),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def sentencepiece_model(folder: Path, lines: list[str], **options: Any) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir(exist_ok=True)
    common = {"vocab_size": VOCABULARY, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "character_coverage": 0.995}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), minloglevel=2, num_threads=2, **(common | options)
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


def unigram(folder: Path, lines: list[str]) -> Tokenizer:
    """As transformers writes T5's."""
    import base64

    model = sentencepiece_model(folder / "model", lines)
    scores = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = Tokenizer(models.Unigram(scores, 2))
    content = json.loads(tokenizer.to_str())
    charsmap = base64.b64encode(charsmap_of((folder / "model" / "spiece.model").read_bytes())).decode()
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": charsmap},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ],
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    extra = [AddedToken(f"<extra_id_{i}>", lstrip=True, rstrip=True) for i in range(99, -1, -1)]
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", *extra])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def charsmap_of(model: bytes) -> bytes:
    """Field 2 of field 3."""

    def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
        at = 0

        def varint() -> int:
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while at < len(data):
            tag = varint()
            size = {0: 0, 1: 8, 5: 4}.get(tag & 7, -1)
            if size == 0:
                varint()
                continue
            if size < 0:
                size = varint()
            yield tag >> 3, data[at : at + size]
            at += size

    normalizer = next(value for number, value in fields(model) if number == 3)
    return next(value for number, value in fields(normalizer) if number == 2)


CASES = [
    gpt2,
    gpt2_files,
    llama3,
    roberta,
    llama2,
    metaspace_bpe,
    suffix_bpe,
    bert,
    bert_text,
    bert_cased_text,
    split_wordpiece,
    unigram,
]
# Their normalisers replace several characters by one: tokenizers says that it comes from one of them, we from all.
COARSE = {metaspace_bpe, suffix_bpe, unigram, split_wordpiece, bert, bert_text}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_line_has_equal_tokens(case: Callable[[Path, list[str]], Tokenizer], text: Any, tmp_path: Path) -> None:
    training, lines = text
    reference = case(tmp_path, training)
    lines = lines + HARD
    ours = ask(tmp_path, lines)
    theirs = reference.encode_batch(lines)
    plain = reference.encode_batch(lines, add_special_tokens=False)
    different = [
        (line, mine["ids"], their.ids)
        for line, mine, their, bare in zip(lines, ours, theirs, plain)
        if mine["ids"] != their.ids or mine["types"] != their.type_ids or mine["plain"] != bare.ids
    ]
    assert different[:3] == [] and len(different) == 0
    moved = [
        (line, mine["offsets"], byte_offsets(line, their.offsets))
        for line, mine, their in zip(lines, ours, theirs)
        if mine["offsets"] != byte_offsets(line, their.offsets)
    ]
    if case in COARSE:
        moved = [item for item in moved if item[0].isascii() and item[0].isprintable() and " ".join(item[0].split()) == item[0]]
    assert moved[:3] == [] and len(moved) == 0
    pairs = [[lines[i], lines[i + 1]] for i in range(0, 400, 2)]
    for (first, second), mine in zip(pairs, ask(tmp_path, pairs)):
        their = reference.encode(first, second)
        assert (mine["ids"], mine["types"]) == (their.ids, their.type_ids)
    for skip in (False, True):
        ids = [their.ids for their in theirs[::5]]
        texts = ask(tmp_path, [{"ids": one, "skip": skip} for one in ids])
        for one, mine in zip(ids, texts):
            assert mine == reference.decode(one, skip_special_tokens=skip)


def test_a_sentencepiece_model_encodes_as_its_library(text: Any, tmp_path: Path) -> None:
    training, lines = text
    lines = [line for line in lines + HARD if "\x00" not in line]
    for name, options in {"t5": {}, "bytes": {"byte_fallback": True}, "plain": PLAIN, "llama": LLAMA}.items():
        folder = tmp_path / name
        model = sentencepiece_model(folder, training, **options)
        ours = ask(folder, lines)
        # Special tokens are found in the text as in transformers, which the library does not do.
        special = [f"<extra_id_{i}>" for i in range(100)] + ["<pad>", "<s>", "</s>", "<unk>"]
        different = [
            (line, mine["ids"], theirs)
            for line, mine, theirs in zip(lines, ours, (model.encode(line) for line in lines))
            if mine["plain"] != theirs and not any(token in line for token in special)
        ]
        assert different[:3] == [] and len(different) == 0
        ids = [model.encode(line) for line in lines[:500]]
        decoded = ask(folder, [{"ids": one, "skip": False} for one in ids if 2 not in one])
        assert decoded == [model.decode(one) for one in ids if 2 not in one]


LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "bos_id": 3,
}
PLAIN = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_by_whitespace": False,
}


def test_a_completion_has_the_tokens_that_it_has_after_its_prompt(text: Any, tmp_path: Path) -> None:
    """The rule of TRL with the packages' tokens of the whole text; where the texts join in one token, each by itself."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    training, lines = text
    draw = random.Random(5)
    records = []
    for line in [line for line in lines if 30 < len(line) < 100 and "<" not in line][:2000]:
        # Between two words with the blank on either side, and anywhere.
        blanks = [place for place, character in enumerate(line) if character == " " and place > 0]
        cut = draw.choice(blanks) + draw.randrange(2) if blanks and draw.random() < 0.8 else draw.randrange(1, len(line))
        records.append({"prompt": line[:cut], "completion": line[cut:]})
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "llama2").mkdir()
    (tmp_path / "gpt2").mkdir()
    bpe, byte_level = llama2(tmp_path / "llama2", training), gpt2_files(tmp_path / "gpt2", training)
    save_config(tmp_path / "llama2", bos_token="<s>", eos_token="</s>")
    model = sentencepiece_model(tmp_path / "spiece", training, **LLAMA)
    references: dict[str, tuple[Callable[[str], list[int]], list[int], int]] = {
        "llama2": (lambda line: bpe.encode(line, add_special_tokens=False).ids, [1], 2),
        "gpt2": (lambda line: byte_level.encode(line).ids, [], byte_level.token_to_id("<|endoftext|>")),
        "spiece": (model.encode, [3], 1),
    }
    for name, (encode, begin, end) in references.items():
        command = [PROGRAM, "samples", tmp_path / name, tmp_path / "records.jsonl", "prompt", "512"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        together, apart = 0, 0
        for record, answer in zip(records, done.stdout.splitlines(), strict=True):
            prompt, both = encode(record["prompt"]), encode(record["prompt"] + record["completion"])
            starts = both[: len(prompt)] == prompt
            completion = both[len(prompt) :] if starts else encode(record["completion"])
            together, apart = together + starts, apart + (starts and completion != encode(record["completion"]))
            sample = json.loads(answer)
            learned = [label for label in sample["labels"] if label != -100]
            assert learned == [*completion, end], record
            first = sample["labels"].index(learned[0])
            assert sample["ids"][: first + 1] == begin + prompt, record
        print(f"{name}: {together} of {len(records)} as one text, {apart} of these unlike the completion by itself")
        assert together > len(records) // 3
        # What the rule is for: without it a completion would begin with one more space.
        assert (apart > len(records) // 3) == (name != "gpt2")


def test_special_tokens_are_those_of_transformers(text: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    training, lines = text
    lines = lines[:1000] + HARD
    model = sentencepiece_model(tmp_path / "t5", training)
    # As transformers reads the file where Python's protobuf is installed.
    scores = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    scores += [(f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1)]
    charsmap = charsmap_of((tmp_path / "t5" / "spiece.model").read_bytes())
    (tmp_path / "bert").mkdir()
    bert_text(tmp_path / "bert", training)
    (tmp_path / "gpt2").mkdir()
    gpt2_files(tmp_path / "gpt2", training)
    references = {
        "t5": transformers.T5Tokenizer(vocab=scores, _spm_precompiled_charsmap=charsmap),
        "bert": transformers.BertTokenizer.from_pretrained(str(tmp_path / "bert")),
        "gpt2": transformers.GPT2Tokenizer.from_pretrained(str(tmp_path / "gpt2")),
    }
    for name, reference in references.items():
        # transformers replaces SentencePiece's library by parts that differ from it on unusual text.
        own = [line for line in lines if name != "t5" or line not in HARD or "extra_id" in line]
        ours = ask(tmp_path / name, own)
        different = [
            (line, mine["ids"], reference(line)["input_ids"])
            for line, mine in zip(own, ours)
            if mine["ids"] != reference(line)["input_ids"]
        ]
        assert (name, different[:3], len(different)) == (name, [], 0)


def test_every_character_has_the_same_class(text: Any, tmp_path: Path) -> None:
    """White space, control characters, punctuation, letters and numbers: where each character splits a text."""
    codes = [*range(1, 0x3400), *range(0x3400, 0xD800, 64), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]
    characters = [chr(code) for code in codes if not 0xE000 < code < 0xF8FF and not 0x17000 < code < 0x18D00]
    lines = [f"a{character}b" for character in characters]
    bert = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "##b": 5}, unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for name, reference in {"bert": bert, "gpt2": byte_level_bpe(["x"])}.items():
        (tmp_path / name).mkdir()
        reference.save(str(tmp_path / name / "tokenizer.json"))
        different = [
            (line, mine["ids"], their.ids)
            for line, mine, their in zip(lines, ask(tmp_path / name, lines), reference.encode_batch(lines))
            if mine["ids"] != their.ids or mine["offsets"] != byte_offsets(line, their.offsets)
        ]
        assert (name, different[:3], len(different)) == (name, [], 0)


def squad_words(text: str) -> list[str]:
    """SQuAD's rules in the order of its script: lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def squad_f1(prediction: list[str], reference: list[str]) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference))  # the harmonic mean of precision and recall


def test_answers_are_scored_as_squad_does() -> None:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    draw = random.Random(1)
    words = "the|a|an|The|cat|Cat's|dog,|(dog)|9|élan|a-b|an.|U.S.|—|the\u00a0x||\tb|“the”|ÉCOLE|नमस्ते|x²|the²|aⅧ|the‿a|Ⓐ|ΟΔΟΣ|ΑΣ'Α|ΑΣ.|Σ|ΣΑΣ|aΣ\u0301|ᾼΣb".split("|")
    pairs = [[" ".join(draw.choices(words, k=draw.randint(0, 5))) for _ in range(2)] for _ in range(3000)]
    asked = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = subprocess.run([PROGRAM, "score", "-"], input=asked, capture_output=True, text=True, check=True)
    for (prediction, reference), line in zip(pairs, done.stdout.split("\n")):
        ours, theirs = squad_words(prediction), squad_words(reference)
        assert json.loads(line) == [float(ours == theirs), pytest.approx(squad_f1(ours, theirs))], (prediction, reference)


def measure_speed() -> None:
    """Megabytes a second of CPU time, one thread: the median of five rounds of both in turn."""
    import statistics
    import tempfile
    import time

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lines = catalogs()
    training, lines = lines[:TRAINING_LINES], lines[TRAINING_LINES:]
    size = sum(len(line.encode()) for line in lines) / 1e6
    for case in (gpt2, llama3, llama2, bert, unigram):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            reference = case(folder, training)
            (folder / "text").write_text("\n".join(lines), newline="\n")
            ours, theirs = [], []
            for _ in range(5):
                done = subprocess.run([PROGRAM, "speed", folder, folder / "text"], capture_output=True, check=True)
                told = json.loads(done.stdout)
                ours.append(told["bytes"] / 1e6 / told["seconds"])
                begin = time.process_time()
                reference.encode_batch(lines)
                theirs.append(size / (time.process_time() - begin))
            mine, their = statistics.median(ours), statistics.median(theirs)
            print(f"| {case.__name__} | {mine:.1f} | {their:.1f} | {mine / their:.1f} |")


if __name__ == "__main__":
    measure_speed()
