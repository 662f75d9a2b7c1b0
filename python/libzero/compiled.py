"""torch.compile: a graph that Inductor compiled reads its parameters as one operator does.

Inductor's kernels take addresses, which the engine cannot intercept. So the call of a compiled graph is wrapped: before
it runs, forward or backward, the parameters among its inputs are unsharded. The size of a graph decides how much is
unsharded at once: `libzero.compile` makes one graph a unit, `torch.compile(model)` one of the whole model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from libzero import _native
from libzero.engine import Engine, engine_of
from libzero.errors import ConfigError

__all__ = ["compile"]

E = TypeVar("E", Engine, torch.nn.Module)

_OUTPUT_CODE = "torch._inductor.output_code"
_KERNEL = "a compiled graph"


def compile(model: E, **options: Any) -> E:
    """[local] Compiles the modules that are units, each by torch.compile(module, **options); returns `model`.

    model: an Engine, or a module that an Engine holds. At most as many units are unsharded at once as without
    compilation. What is outside of units is not compiled. torch.compile(model) works as well; at stage 3 it unshards
    all parameters of a graph at once.

    Results are bit-identical at all stages. They differ from those of the module that is not compiled, because Inductor
    fuses operators. ConfigError if no Engine holds `model`.
    """
    engine = model if isinstance(model, Engine) else engine_of(next(model.parameters(), torch.empty(0)))
    if engine is None or (engine is not model and model not in (engine.module, engine._original)):
        raise ConfigError("[compile] got a module, expected an Engine or the module that one holds.")
    for path in engine._native.unit_modules():
        engine._original.get_submodule(path).compile(**options)
    return model


def _wrap(graph_class: Any) -> None:
    run, post_compile = graph_class.__call__, graph_class.post_compile

    def note_grad_mode(self: Any, *args: Any, **kwargs: Any) -> None:
        # Dynamo compiles a graph for each grad mode. When the graph runs, AOTAutograd has switched it off.
        context = torch._guards.TracingContext.try_get()
        state = context.global_context.global_state if context is not None else {}
        mode = state.get("grad_enabled")
        self._libzero_training = mode[1] if mode is not None else torch.is_grad_enabled()
        post_compile(self, *args, **kwargs)

    def run_unsharded(self: Any, inputs: Sequence[Any]) -> Any:
        if self.mutated_input_idxs:
            _native.ReadScope.check_write([inputs[i] for i in self.mutated_input_idxs], _KERNEL)
        # A graph from before libzero was imported has no note.
        training = getattr(self, "_libzero_training", not self.fx_kwargs.get("is_inference"))
        scope = _native.ReadScope(inputs, _KERNEL, training)
        try:
            return run(self, inputs)
        finally:
            scope.close()

    graph_class.__call__, graph_class.post_compile = run_unsharded, note_grad_mode


class _AfterImport(importlib.abc.MetaPathFinder):
    """Wraps the class when torch imports its module, at the first compilation: the import takes a second."""

    _looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _OUTPUT_CODE or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _wrap(module.CompiledFxGraph)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if _OUTPUT_CODE in sys.modules:
    _wrap(sys.modules[_OUTPUT_CODE].CompiledFxGraph)
else:
    sys.meta_path.insert(0, _AfterImport())
