"""Bytes of one rank by tier and purpose."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from libzero import _native


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one purpose in one tier, now and at the peak."""

    tier: str
    """"device", "host" or "file" """
    purpose: str
    current: int
    peak: int


@dataclass(frozen=True)
class Allocator:
    """Counters of torch's caching allocator on this process's GPU, in bytes."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    retries: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. A peak of `totals` is the highest sum at one moment, not the sum of the rows' peaks."""

    rows: tuple[MemoryRow, ...]
    totals: tuple[MemoryRow, ...]
    allocator: Allocator | None
    text: str

    @classmethod
    def of(cls, report: _native.MemoryReport) -> Memory:
        rows = tuple(MemoryRow(*row) for row in report.rows)
        allocator = report.allocator
        return cls(
            rows=tuple(row for row in rows if row.purpose != "total"),
            totals=tuple(row for row in rows if row.purpose == "total"),
            allocator=Allocator(**allocator) if allocator is not None else None,
            text=report.table(),
        )

    def __iter__(self) -> Iterator[MemoryRow]:
        return iter(self.rows)

    def current(self, tier: str = "device", purpose: str = "total") -> int:
        """Current bytes; 0 if there is no such row."""
        return next((r.current for r in self.rows + self.totals if (r.tier, r.purpose) == (tier, purpose)), 0)

    def peak(self, tier: str = "device", purpose: str = "total") -> int:
        """Peak bytes; 0 if there is no such row."""
        return next((r.peak for r in self.rows + self.totals if (r.tier, r.purpose) == (tier, purpose)), 0)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        cells = "".join(
            f"<tr><td>{html.escape(r.tier)}</td><td>{html.escape(r.purpose)}</td>"
            f'<td style="text-align:right">{r.current:,}</td><td style="text-align:right">{r.peak:,}</td></tr>'
            for r in self.rows + self.totals
        )
        return f"<table><thead><tr><th>tier</th><th>purpose</th><th>bytes</th><th>peak</th></tr></thead>{cells}</table>"
