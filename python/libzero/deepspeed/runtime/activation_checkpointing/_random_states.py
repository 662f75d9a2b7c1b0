"""Named states of the random number generator of the rank's device, as Megatron's programs fork them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from libzero.deepspeed.accelerator import get_accelerator

PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """States by name. Within fork() the device's generator continues one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """[local] No states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """[local] By name, for set_states()."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """[local] Those that get_states() gave."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """[local] A state that begins from a seed. ValueError for a name or a seed that it has."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"CudaRNGStatesTracker.add: got {name!r} and the seed {seed}, expected new ones")
        before = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(before)
        self.seeds_.add(seed)

    @contextmanager
    def fork(self, name: str = PARALLEL) -> Iterator[None]:
        """[local] The generator continues this state, and its own one afterwards. ValueError for an unknown name."""
        if name not in self.states_:
            known = ", ".join(sorted(self.states_)) or "no names: model_parallel_cuda_manual_seed() adds one"
            raise ValueError(f"CudaRNGStatesTracker.fork: got {name!r}, expected one of {known}")
        before = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_accelerator().get_rng_state()
            get_accelerator().set_rng_state(before)

    @contextmanager
    def again(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """[local] These states, and those of now afterwards: for a segment that is computed again."""
        now = self.states_
        self.states_ = dict(states)
        try:
            yield
        finally:
            self.states_ = now


TRACKER = CudaRNGStatesTracker()
