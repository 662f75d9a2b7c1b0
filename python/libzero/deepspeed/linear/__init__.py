"""deepspeed.linear: a linear layer with a low-rank adapter. Its base weight is frozen; stage 3 shards it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch.nn import functional

from libzero.deepspeed._refuse import module_getattr

__all__ = ["LoRAConfig", "LoRAOptimizedLinear", "OptimizedLinear", "QuantizationConfig", "init_lora"]


@dataclass
class LoRAConfig:
    """Numbers of the adapter. base_weight_sharding above 1 and offload are refused: they are the engine's."""

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class QuantizationConfig:
    """Numbers of a quantized weight, which is refused where a layer is made."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8


class LoRAOptimizedLinear(torch.nn.Module):
    """input @ weight.T + lora_alpha / lora_r * lora_weight_2(lora_weight_1(input)); no bias. lora_weight_2 begins as 0.

    A state that is loaded under a name without one of target_mods makes it a plain layer of that weight, as in
    DeepSpeed.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[torch.nn.Module] = torch.nn.Linear,
    ) -> None:
        super().__init__()
        if lora_config is None or bias:
            raise AssertionError("LoRAOptimizedLinear: got no lora_config, or bias=True; expected one without a bias")
        if quantization_config is not None or lora_config.base_weight_sharding > 1 or lora_config.offload:
            raise NotImplementedError(
                "cannot make LoRAOptimizedLinear with quantization_config, base_weight_sharding or offload: they are "
                "not built. Hint: zero_optimization.stage 3 shards the frozen weight, offload_param keeps it in host "
                "memory."
            )
        self.input_dim, self.output_dim, self.bias = input_dim, output_dim, bias
        self.lora_config, self.quantization_config = lora_config, quantization_config
        self.device, self.dtype, self.linear_cls = device, dtype, linear_cls
        self.disabled = False
        weight = torch.empty(output_dim, input_dim, dtype=dtype, device=device)
        torch.nn.init.xavier_uniform_(weight)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if not lora_config.delay_lora_init:
            self.init_lora()

    def init_lora(self) -> None:
        """Makes the adapter, where delay_lora_init has left it out."""
        if self.disabled:
            return
        rank, words = self.lora_config.lora_r, {"bias": False, "device": self.device, "dtype": self.dtype}
        self.lora_scaling_factor = self.lora_config.lora_alpha / rank
        self.lora_weight_1 = self.linear_cls(self.input_dim, rank, **words)
        self.lora_weight_2 = self.linear_cls(rank, self.output_dim, **words)
        torch.nn.init.kaiming_uniform_(self.lora_weight_1.get_parameter("weight"), a=math.sqrt(5))
        torch.nn.init.zeros_(self.lora_weight_2.get_parameter("weight"))

    def disable(self) -> None:
        """From now on it is a plain layer; its weight is undefined until one is loaded."""
        self.disabled = True
        self._modules.clear()

    def full_weight(self) -> torch.Tensor:
        """The base weight."""
        return self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *words: Any) -> None:
        if not any(target in prefix for target in self.lora_config.target_mods):
            self.disable()
        super()._load_from_state_dict(state_dict, prefix, *words)

    def forward(self, input_tensor: torch.Tensor) -> torch.Tensor:
        """AssertionError before the adapter is made."""
        output = functional.linear(input_tensor, self.weight)
        if self.disabled:
            return output
        if "lora_weight_1" not in self._modules:
            raise AssertionError("LoRAOptimizedLinear: got no adapter, expected init_lora() before the first forward")
        adapted: torch.Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return output + self.lora_scaling_factor * adapted


class OptimizedLinear(torch.nn.Module):
    """OptimizedLinear(...) is a LoRAOptimizedLinear with lora_config, else linear_cls. ValueError for other configs.

    NotImplementedError for quantization_config.
    """

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[torch.nn.Module] = torch.nn.Linear,
    ) -> torch.nn.Module:
        for name, given in (("lora_config", lora_config), ("quantization_config", quantization_config)):
            if given is not None and not is_dataclass(given):
                raise ValueError(f"OptimizedLinear: {name}: got {type(given).__name__}, expected the dataclass")
        if lora_config is None and quantization_config is None:
            return linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        if lora_config is None:
            raise NotImplementedError(
                "cannot make OptimizedLinear with quantization_config: quantized weights are not built. "
                "Hint: zero_optimization.zero_quantized_weights quantizes what is sent."
            )
        return LoRAOptimizedLinear(
            input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
        )


def init_lora(model: torch.nn.Module) -> None:
    """[local] init_lora() of all such layers in a model."""
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()


__getattr__ = module_getattr("deepspeed.linear")
