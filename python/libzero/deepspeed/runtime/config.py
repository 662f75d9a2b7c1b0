"""What a program gives as its configuration, and what the engine reads of it."""

from __future__ import annotations

import base64
import binascii
import copy
import importlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from libzero._native import Options
from libzero.config import as_options
from libzero.deepspeed import comm
from libzero.deepspeed._held import sequence_degree
from libzero.deepspeed._refuse import AssertedConfigError, module_getattr
from libzero.deepspeed.monitor.monitor import services
from libzero.deepspeed.utils.logging import log_dist
from libzero.errors import ConfigError

__all__ = [
    "NOT_CHECKPOINTED",
    "DeepSpeedConfigError",
    "KeptFp32",
    "accumulates",
    "native_config",
    "options_of",
    "read_config",
    "recipe_of",
    "stage_of",
]

DeepSpeedConfigError = ConfigError

_GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"

NOT_CHECKPOINTED = ("contiguous_memory_optimization", "cpu_checkpointing", "profile")
"""Keys of the block activation_checkpointing that are not built for Python models; configure() refuses them."""


class FileConfig(dict[str, Any]):
    """A configuration that was read from a file."""

    def __init__(self, values: Mapping[str, Any], path: str, text: str) -> None:
        super().__init__(values)
        self.path, self.text = path, text


def read_config(config: Any) -> dict[str, Any]:
    """[local] The dict of a path, a dict, or base64 text, of JSON or Hjson. ConfigError for anything else.

    0 and 1 for a key that is true or false are these, as in DeepSpeed.
    """
    if isinstance(config, FileConfig):
        return FileConfig(copy.deepcopy(dict(config)), config.path, config.text)
    if isinstance(config, Mapping):
        return _with_booleans(copy.deepcopy(dict(config)))
    if isinstance(config, str | os.PathLike):
        text, path = os.fspath(config), ""
        if os.path.exists(text):
            path = text
            with open(text, encoding="utf-8") as file:
                text = file.read()
        else:
            try:
                text = base64.urlsafe_b64decode(text).decode("utf-8")
            except (binascii.Error, UnicodeDecodeError):
                raise ConfigError(
                    f"[deepspeed] cannot read the configuration: {text} is neither a file nor base64 text of one"
                ) from None
        try:
            found, is_json = _parsed(text, path or "<text>")
        except _Duplicate as fault:
            raise ConfigError(
                f"[deepspeed] cannot read the configuration: {path or '<text>'}: got the key {fault} twice in one "
                "block. Hint: keep one of the two."
            ) from None
        if isinstance(found, dict):
            found = _with_booleans(found)
            return FileConfig(found, path, text if is_json else "") if path else found
    raise ConfigError(f"[deepspeed] config: got {config!r}, expected a path or a dict")


def _parsed(text: str, where: str) -> tuple[Any, bool]:
    """The value of JSON, or of Hjson where the package of this name is installed, and whether it is JSON."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates), True
    except json.JSONDecodeError as fault:
        told = f"{where}:{fault.lineno}:{fault.colno}: {fault.msg}"
    try:
        hjson = importlib.import_module("hjson")
    except ModuleNotFoundError:
        told += ". Hint: comments and keys without quotes are Hjson, which needs `pip install hjson`."
    else:
        try:
            return hjson.loads(text, object_pairs_hook=_without_duplicates), False
        except hjson.HjsonDecodeError as fault:
            told += f"; as Hjson {fault.lineno}:{fault.colno}: {fault.msg}"
    raise ConfigError(f"[deepspeed] cannot read the configuration: {told}")


_NUMBER_FOR_BOOLEAN = re.compile(r"error: (\S+): got a number \((0|1)\), expected true or false")


def _with_booleans(config: dict[str, Any]) -> dict[str, Any]:
    """The same, with true and false in place of 1 and 0 where the reader expects them. It knows the keys."""
    try:
        as_options({key: value for key, value in config.items() if not _is_infinite(value)})
    except ConfigError as fault:
        for pointer, _ in _NUMBER_FOR_BOOLEAN.findall(str(fault)):
            block: Any = config
            *path, key = pointer[1:].split("/")
            for name in path:
                block = block[int(name) if isinstance(block, list) else name]
            block[key] = bool(block[key])
    except (TypeError, ValueError):  # a value that JSON has not, which initialize() tells
        pass
    return config


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


class _Duplicate(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Duplicate(json.dumps(key))
        found[key] = value
    return found


_SPACE = re.compile(r"\s*")
_FAULT = re.compile(
    r"^<dict>:\d+:\d+: (?P<kind>error|notice): (?P<pointer>\S*): (?P<text>.*)\n(?:\s*\d+ \| .*\n\s*\| .*\n)?", re.M
)


def _places(text: str) -> dict[str, tuple[int, int]]:
    """Where the keys of a JSON object are and how long, in characters, by JSON pointer. text: valid JSON."""
    found: dict[str, tuple[int, int]] = {}

    def after(at: int) -> int:
        space = _SPACE.match(text, at)
        return space.end() if space else at

    def value(at: int, pointer: str) -> int:
        """The end of the value that begins at `at`."""
        if text[at] not in "{[":
            return json.JSONDecoder().raw_decode(text, at)[1]
        is_object, at, item = text[at] == "{", after(at + 1), 0
        while text[at] not in "}]":
            name = str(item)
            if is_object:
                name, end = json.JSONDecoder().raw_decode(text, at)
                found[f"{pointer}/{name}"] = at, end - at
                at = after(after(end) + 1)  # the colon
            at = after(value(at, f"{pointer}/{name}"))
            at = after(at + 1) if text[at] == "," else at
            item += 1
        return at + 1

    value(after(0), "")
    return found


def located(message: str, config: Mapping[str, Any]) -> str:
    """The text about faults of a dict with the file and line that the program gave, or without a line."""
    path, text = (config.path, config.text) if isinstance(config, FileConfig) else ("", "")
    places = _places(text) if text else {}

    def rewritten(fault: re.Match[str]) -> str:
        rest = f"{fault['kind']}: {fault['pointer']}: {fault['text']}\n"
        if fault["pointer"] not in places:
            return f"{path or '<dict>'}: {rest}"
        at, length = places[fault["pointer"]]
        first = text.rfind("\n", 0, at) + 1
        line, column = text.count("\n", 0, at) + 1, at - first + 1
        shown = "".join(c if c.isprintable() or c == "\t" else "?" for c in text[first:].split("\n", 1)[0])
        marks = re.sub(r"[^\t]", " ", shown[: column - 1]) + "^" + "~" * (length - 1)
        marked = f"{line:6} | {shown}\n       | {marks}\n" if len(shown) <= 160 else ""
        return f"{path}:{line}:{column}: {rest}{marked}"

    return _FAULT.sub(rewritten, message).replace(" in <dict>", f" in {path or '<dict>'}")


def options_of(native: Mapping[str, Any], config: Mapping[str, Any]) -> Options:
    """[local] native: what native_config() made of `config`. AssertedConfigError names file and line of each fault."""
    try:
        return as_options(native)
    except ConfigError as fault:
        told = AssertedConfigError(located(str(fault), config))
        told.code = fault.code
        raise told from None


def with_groups(native: Mapping[str, Any], count: int) -> dict[str, Any]:
    """[local] The same, to be checked before the engine's groups are known, for `count` groups of the program.

    With one group, lists of the scheduler's numbers by group are their first number.
    """
    checked = copy.deepcopy(dict(native))
    params = _block(_block(checked, "scheduler"), "params")
    if count == 1 and isinstance(params, dict):
        params.update({key: value[0] for key, value in params.items() if isinstance(value, list) and len(value) > 1})
    elif count > 1:
        patterns = [{"pattern": f"group {g}"} for g in range(1, count)]
        checked["libzero"] = {**_block(checked, "libzero"), "parameter_groups": patterns}
    return checked


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A block of the configuration; empty where it is not one, which is an error later."""
    block = config.get(name)
    return block if isinstance(block, Mapping) else {}


def tell_left_over(native: Mapping[str, Any], effective: Mapping[str, str]) -> None:
    """[local] Names each "auto" that Hugging Face's Trainer would have filled, and the value that is taken instead."""

    def walk(values: Mapping[str, Any], path: str) -> None:
        for key, value in values.items():
            name = f"{path}{key}"
            if isinstance(value, Mapping):
                walk(value, f"{name}.")
            elif value == "auto" and effective.get(name, '"auto"') != '"auto"':
                log_dist(
                    f'{name}: "auto" was left in the configuration, {effective[name]} is taken. Hint: Trainer of '
                    "Hugging Face fills it in; give the value where initialize() is called otherwise.",
                    ranks=[0],
                    level=logging.WARNING,
                )

    walk(native, "")


def recipe_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """[local] The dtype of parameters that a block fp16 or bf16 asks for."""
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if _block(config, key).get("enabled") is True:
            return dtype
    return None


class KeptFp32:
    """The parameters that libzero.keep_fp32 names, which the recipe does not cast."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        given = _block(config, "libzero").get("keep_fp32", [])
        patterns = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        self._tokens = [re.findall(r"\\.|.", str(pattern), re.DOTALL) for pattern in patterns]
        parts = {"*": ".*", "?": "."}
        texts = ("".join(parts.get(token, re.escape(token[-1])) for token in tokens) for tokens in self._tokens)
        self._expressions = [re.compile(text, re.DOTALL) for text in texts]

    def named(self, name: str) -> bool:
        """[local] Whether it names this parameter."""
        return any(each.fullmatch(name) for each in self._expressions)

    def of(self, module: torch.nn.Module) -> set[int]:
        """[local] The ids of those of a model."""
        return {id(p) for name, p in module.named_parameters(remove_duplicate=False) if self.named(name)}

    def may_name(self, end: str) -> bool:
        """[local] Whether a name that ends like this may be one: of a module that others are going to hold."""
        return any(self._may_end(tokens[::-1], end) for tokens in self._tokens)

    @staticmethod
    def _may_end(tokens: list[str], end: str) -> bool:
        places = {0}  # of the tokens, in reverse, that may match the next character
        for character in reversed(end):
            for i, token in enumerate(tokens):  # * may match nothing
                if i in places and token == "*":
                    places.add(i + 1)
            places = {
                i if token == "*" else i + 1
                for i, token in enumerate(tokens)
                if i in places and (token in ("*", "?") or token[-1] == character)
            }
        return bool(places)


def data_parallel_ranks(config: Mapping[str, Any], world: int) -> int:
    """[local] Ranks with different samples: not the tensor- and sequence-parallel ranks of one group."""
    degrees = (_block(config, "tensor_parallel").get("autotp_size", 1), config.get("sequence_parallel_size", 1))
    return max(1, world // math.prod(max(1, degree) for degree in degrees if isinstance(degree, int)))


def with_sequence_ranks(config: dict[str, Any], mpu: Any, mesh_param: Any) -> dict[str, Any]:
    """[local] The same, with the degrees that mesh_param, (data-parallel, sequence-parallel), or an mpu says.

    ConfigError where the configuration says another one, and for an mpu whose sequence-parallel ranks do not follow
    one another.
    """
    degrees = {}
    if mesh_param is not None:
        if not (isinstance(mesh_param, Sequence) and len(mesh_param) == 2 and all(type(n) is int for n in mesh_param)):
            raise ConfigError(
                f"[deepspeed] mesh_param: got {mesh_param!r}, expected two numbers: data-parallel and "
                "sequence-parallel ranks"
            )
        degrees = dict(zip(("data_parallel_size", "sequence_parallel_size"), mesh_param, strict=True))
    ranks = sequence_degree(mpu)
    if ranks > 1:
        if mpu.get_sequence_parallel_rank() != comm.get_rank() % ranks:
            raise ConfigError(
                f"[deepspeed] mpu: got sequence-parallel rank {mpu.get_sequence_parallel_rank()} of {ranks} on rank "
                f"{comm.get_rank()}, expected {comm.get_rank() % ranks}. Hint: groups of ranks that follow one another."
            )
        if _block(config, "tensor_parallel").get("autotp_size", 1) not in (0, 1):
            raise ConfigError(
                "[deepspeed] mpu: got sequence-parallel ranks of an mpu and tensor_parallel.autotp_size, expected one "
                "of them. Hint: sequence_parallel_size of the configuration in place of the mpu."
            )
        degrees.setdefault("sequence_parallel_size", ranks)
        if degrees["sequence_parallel_size"] != ranks:
            raise ConfigError(f"[deepspeed] got mesh_param {tuple(mesh_param)} and an mpu of {ranks} sequence-parallel "
                              "ranks, expected the same. Hint: leave mesh_param out.")  # fmt: skip
    for key, value in degrees.items():
        if config.setdefault(key, value) != value:
            raise ConfigError(
                f"[deepspeed] {key}: got {config[key]} in the configuration, and {value} of mesh_param or the mpu. "
                "Hint: leave it out of the configuration."
            )
    return config


def accumulates(config: Mapping[str, Any], world: int) -> bool:
    """[local] More than one micro-batch makes a step."""
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        return steps > 1
    total, micro = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    return isinstance(total, int) and isinstance(micro, int) and total > micro * data_parallel_ranks(config, world)


def stage_of(config: Mapping[str, Any]) -> int:
    """[local] The stage that the configuration asks for; 0 where it is wrong, which is an error later."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else zero
    return stage if stage in (1, 2, 3) else 0


def gathers_on_save(config: Mapping[str, Any]) -> bool:
    """[local] save_16bit_model() may gather stage 3's parameters."""
    return bool(_block(config, "zero_optimization").get(_GATHER_ON_SAVE, False))


def native_config(config: Mapping[str, Any], world: int) -> dict[str, Any]:
    """[local] The same for libzero.Engine: keys that this package acts on itself are left out."""
    native = copy.deepcopy(dict(config))
    for key in [key for key in native if "." in str(key)]:
        # TRL writes such keys, which DeepSpeed ignores: a run with them is that without them.
        del native[key]
        log_dist(
            f"{key}: a dotted key at the top of the configuration has no effect, as in DeepSpeed. "
            f'Hint: write it in its block, {{"{key.split(".")[0]}": {{...}}}}.',
            ranks=[0],
        )
    native.pop("torch_autocast", None)
    if _block(native, "comms_logger").get("enabled") is True:
        del native["comms_logger"]  # initialize() configures deepspeed.comm
    for name in services(native):  # the engine's monitor writes to them
        del native[name]
    zero = native.get("zero_optimization")
    if isinstance(zero, dict):
        zero.pop(_GATHER_ON_SAVE, None)
        zero.pop("leaf_module", None)  # marks change nothing
    block = native.get("activation_checkpointing")
    if isinstance(block, dict):
        left_out = [key for key in NOT_CHECKPOINTED if block.pop(key, False)]
        if left_out:
            names = ", ".join(left_out)
            log_dist(f"activation_checkpointing.{names}: not built for Python models, no effect", ranks=[0])
    block = native.get("optimizer")
    if isinstance(block, dict):
        if "torch_adam" in block:
            del block["torch_adam"]
            log_dist(
                'optimizer.torch_adam: no effect, as in DeepSpeed. Hint: write it in params, {"torch_adam": true}.',
                ranks=[0],
            )
        kind, params = str(block.get("type")).lower(), block.get("params")
        if kind in ("adam", "adamw") and isinstance(params, dict):
            if kind == "adamw" and params.get("adam_w_mode") is False:  # the type decides, as in DeepSpeed
                del params["adam_w_mode"]
            if params.get("torch_adam") is True and params.get("adam_w_mode", True) is True:
                params.setdefault("weight_decay", 0.01)  # torch.optim.AdamW's own, as in DeepSpeed
    interval = native.get("steps_per_print")
    if _is_infinite(interval):  # accelerate: never
        native["steps_per_print"] = None
    if accumulates(native, world):
        # The engine here counts, so that set_gradient_accumulation_boundary() works.
        native["managed_gradient_accumulation"] = False
    if stage_of(native) > 0:
        native.setdefault("prescale_gradients", True)  # as ZeRO of DeepSpeed: it decides what overflows
    return native


__getattr__ = module_getattr("deepspeed.runtime.config")
