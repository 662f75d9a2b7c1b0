"""The order in which a stage of a pipeline computes and communicates, as lists of instructions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.utils import call_to_str

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One action, with its numbers as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """The update."""


class ReduceGrads(PipeInstruction):
    """The sums of gradients over the stage's data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """The sums of gradients of layers that stages share."""


class BufferOpInstruction(PipeInstruction):
    """An action on the buffer of one micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Takes the next samples."""


class ForwardPass(BufferOpInstruction):
    """Computes the stage's outputs."""


class BackwardPass(BufferOpInstruction):
    """Computes the stage's gradients."""


class SendActivation(BufferOpInstruction):
    """Outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Gradients of inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Gradients of outputs from the next stage."""


class PipeSchedule(ABC):
    """The instructions of stage `stage_id` of `stages`, for the micro-batches of one step; iterates over steps()."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """A list of instructions for each point of time; between two, all stages may wait for each other."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches whose buffers are in use at once."""
        return self.micro_batches

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        if not self._valid_micro_batch(micro_batch_id):
            raise AssertionError(f"got micro-batch {micro_batch_id}, expected 0 to {self.micro_batches - 1}")
        return micro_batch_id % self.num_pipe_buffers()

    @property
    def stage(self) -> int:
        """The stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """How many a step has."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether it takes the samples."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes the loss."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class InferenceSchedule(PipeSchedule):
    """Forward passes: stage s computes micro-batch m at time m + s, with two buffers in turn."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See PipeSchedule."""
        for time in range(self.micro_batches + self.stages - 1):
            now = time - self.stage_id
            mine = (time + self.stage_id) % 2
            works = self._valid_micro_batch(now)
            found: list[PipeInstruction] = []
            if works and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(mine))
            exchange: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(now - 1):
                exchange.append(SendActivation(1 - mine))
            if self._valid_stage(self.prev_stage) and works:
                exchange.append(RecvActivation(mine))
            # Neighbours do the two in opposite order, so that one sends while the other receives.
            found += exchange if self.stage_id % 2 == 0 else exchange[::-1]
            if works:
                found.append(ForwardPass(mine))
            yield found

    def num_pipe_buffers(self) -> int:
        """Two."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward: of micro-batch m, stage s computes the first at time 2m + s.

    The second is at time 2m + 2 * stages - 1 - s. The two never meet, as one time is even and the other odd.
    """

    def _at(self, time: int) -> tuple[int, bool]:
        """The micro-batch at a time, which may be none of this step, and whether it is its forward pass."""
        if (time - self.stage_id) % 2 == 0:
            return (time - self.stage_id) // 2, True
        return (time - 2 * self.stages + 1 + self.stage_id) // 2, False

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See PipeSchedule."""
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for time in range(last + 1):
            (now, is_forward), (before, _) = self._at(time), self._at(time - 1)
            works, worked = self._valid_micro_batch(now), self._valid_micro_batch(before)
            found: list[PipeInstruction] = []
            if is_forward and self._valid_stage(self.prev_stage):
                found += [SendGrad(self._buffer_idx(before))] if worked else []
                found += [RecvActivation(self._buffer_idx(now))] if works else []
            elif not is_forward and self._valid_stage(self.next_stage):
                found += [RecvGrad(self._buffer_idx(now))] if works else []
                found += [SendActivation(self._buffer_idx(before))] if worked else []
            if works:
                buffer = self._buffer_idx(now)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    found.append(LoadMicroBatch(buffer))
                found.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if time == last:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield found

    def num_pipe_buffers(self) -> int:
        """The forward passes that wait for their backward pass: those of the stages from here to the last."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """One stage: forward and backward of each micro-batch, and the update after the last."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See PipeSchedule."""
        for micro_batch in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield found + ([ReduceGrads(), OptimizerStep()] if micro_batch == self.micro_batches - 1 else [])

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1


__getattr__ = module_getattr("deepspeed.runtime.pipe.schedule")
