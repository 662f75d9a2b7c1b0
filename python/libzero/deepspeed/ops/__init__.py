"""deepspeed.ops: optimizers of torch. One that initialize() was given is the engine's, which does its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.errors import ConfigError

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class EngineOptimizer(torch.optim.Optimizer):
    """Parameter groups and numbers of one rule, which the engine has too, for initialize(optimizer=) or alone.

    Computes in fp32 whatever the parameters have (fp64 for fp64). States have the names that torch gives them.
    """

    kind: str = ""
    """The engine's name of the rule: "Adam"; "": it has none, and runs this step()."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """The tensors of a parameter's states."""
    takes_sparse: ClassVar[bool] = False
    """Sparse gradients update the rows that they have."""
    fp32_optimizer_states: bool = True
    """States are fp32; else they have the dtype of their parameter."""
    owned: bool = False
    """An engine does the updates."""

    def refuse_unless(self, accepted: bool, argument: str, reason: str) -> None:
        """NotImplementedError that names an argument whose value there is no rule for."""
        if not accepted:
            raise NotImplementedError(f"cannot make {type(self).__name__}: {argument} is not built: {reason}")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """[local] One update. NotImplementedError after initialize(optimizer=), where the engine updates."""
        if self.owned:
            raise NotImplementedError(
                f"cannot call {type(self).__name__}.step(): the engine updates the parameters. Hint: engine.step()."
            )
        loss = self._loss(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(group, p, self.state[p])
        return loss

    @staticmethod
    def _loss(closure: Callable[[], float] | None) -> float | None:
        with torch.enable_grad():
            return None if closure is None else closure()

    def _state_dtype(self, p: torch.Tensor) -> torch.dtype:
        return torch.promote_types(p.dtype, torch.float32) if self.fp32_optimizer_states else p.dtype

    def _update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            for name in self.state_names:
                state[name] = torch.zeros_like(p, dtype=self._state_dtype(p))
        state["step"] += 1
        held = [p.detach(), *(state[name] for name in self.state_names)]
        exact = torch.promote_types(p.dtype, torch.float32)
        grad = p.grad
        assert grad is not None  # step() has looked
        if not grad.is_sparse:
            parts = [each.to(exact) for each in held]  # of this dtype: the same tensor
            self._rule(group, state["step"], grad.to(exact), *parts)
            for each, part in zip(held, parts, strict=True):
                if part is not each:
                    each.copy_(part)
            return
        if not self.takes_sparse:
            raise NotImplementedError(
                f"{type(self).__name__} does not support sparse gradients. Hint: sparse=False of the layer."
            )
        grad = grad.coalesce()
        rows = tuple(grad.indices())
        parts = [each[rows].to(exact) for each in held]
        self._rule(group, state["step"], grad.values().to(exact), *parts)
        for each, part in zip(held, parts, strict=True):
            each[rows] = part.to(each.dtype)

    def _rule(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        """Update `step`, from 1, of the parameter and its states, in place; not of grad."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch, which rounds states to their parameter's dtype; here they keep that of this optimizer."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, number in zip(group["params"], saved["params"], strict=True):
                for name in self.state_names:
                    value = state_dict["state"].get(number, {}).get(name)
                    if value is not None:
                        self.state[p][name] = value.to(p.device, self._state_dtype(p), copy=True)


    def __getstate__(self) -> dict[str, Any]:
        # torch copies groups and states only, and a copy would have another rule.
        own = ("adam_w_mode", "fp32_optimizer_states")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own if name in vars(self)}}


class SubgroupOptimizer(EngineOptimizer):
    """One that can also update the parameter of a subgroup, whose states go by its number."""

    def _parameter(
        self, call: str, closure: Callable[[], float] | None
    ) -> tuple[float | None, tuple[dict[str, Any], torch.Tensor] | None]:
        """The closure's loss; the parameter that has a gradient, after its group, or None.

        NotImplementedError where an engine updates. ConfigError for several: one subgroup has the states of one.
        """
        if self.owned:
            raise NotImplementedError(f"cannot call {type(self).__name__}.{call}: the engine updates the parameters.")
        loss = self._loss(closure)
        found = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(found) > 1:
            raise ConfigError(
                f"[{type(self).__name__}::{call}] got gradients of {len(found)} parameters, expected one: a subgroup "
                "has the states of one. Hint: step(), or grad = None of the others."
            )
        return loss, found[0] if found else None

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], float] | None = None) -> float | None:
        """[local] One update of the parameter that has a gradient, with the states of this subgroup."""
        loss, found = self._parameter("step_subgroup", closure)
        if found is not None:
            group, p = found
            with torch.no_grad():
                self._update(group, p, self.state[subgroup_id])  # type: ignore[index]
        return loss

    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], float] | None = None) -> float | None:
        """[local] Takes the last step_subgroup() back, up to rounding, while the gradient is still that of the update.

        RuntimeError for a subgroup without an update.
        """
        loss, found = self._parameter("rollback_subgroup", closure)
        state: Any = self.state.get(sub_group_id)  # type: ignore[call-overload]
        if not state or state["step"] <= 0:
            raise RuntimeError(
                f"[{type(self).__name__}::rollback_subgroup] got subgroup {sub_group_id}, expected one with an update: "
                + ("its step count is 0." if state else "it has not been initialized.")
            )
        if found is not None:
            group, p = found
            assert p.grad is not None  # _parameter() has looked
            held = [p.detach(), *(state[name] for name in self.state_names)]
            exact = torch.promote_types(p.dtype, torch.float32)
            parts = [each.to(exact) for each in held]
            with torch.no_grad():
                self._take_back(group, state["step"], p.grad.to(exact), *parts)
                for each, part in zip(held, parts, strict=True):
                    if part is not each:
                        each.copy_(part)
            state["step"] -= 1
        return loss

    def _take_back(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        """The inverse of _rule()."""
        raise NotImplementedError


from libzero.deepspeed.ops import adagrad, adam, lamb, lion, op_builder  # noqa: E402

__all__ = ["EngineOptimizer", "Params", "adagrad", "adam", "lamb", "lion", "op_builder"]

__compatible_ops__ = op_builder.compatible()

__getattr__ = module_getattr("deepspeed.ops")
