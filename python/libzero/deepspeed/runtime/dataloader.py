"""Batches of this rank: a DataLoader with a DistributedSampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from libzero.deepspeed._refuse import module_getattr

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

T = TypeVar("T")


class RepeatingLoader(Generic[T]):
    """[local] Begins `loader` again whenever it ends."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """[local] Each iteration over it is one epoch of this rank's samples, in batches of `batch_size`.

    Without data_sampler the samples are shuffled and dealt out by a DistributedSampler. Its order is the same in every
    epoch unless the program calls data_sampler.set_epoch(). next(loader) continues where the last call was. What the
    program changes of its attributes counts from the next iteration on.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        pin_memory: bool,
        world_size: int,
        rank: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        dataloader_drop_last: bool = False,
    ) -> None:
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.num_local_io_workers = 2 if num_local_io_workers is None else num_local_io_workers
        """The processes that read; 0: this one does."""
        self.dataloader_drop_last = dataloader_drop_last
        self.data: Iterator[Any] | None = None
        self._made: tuple[dict[str, Any], DataLoader[Any]] | None = None

    @property
    def dataloader(self) -> DataLoader[Any]:
        """The loader of torch, with the attributes as they are now."""
        words: dict[str, Any] = {
            "batch_size": self.batch_size,
            "sampler": self.data_sampler,
            "pin_memory": self.pin_memory,
            "collate_fn": self.collate_fn,
            "num_workers": self.num_local_io_workers,
            "drop_last": self.dataloader_drop_last,
        }
        if self._made is None or self._made[1].dataset is not self.dataset or self._made[0] != words:
            self._made = words, DataLoader(self.dataset, **words)
        return self._made[1]

    def __iter__(self) -> DeepSpeedDataLoader:
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self.data is None:
            raise TypeError("cannot take a batch: iter(loader) comes before next(loader)")
        return next(self.data)

    def __len__(self) -> int:
        return len(self.dataloader)


__getattr__ = module_getattr("deepspeed.runtime.dataloader")
