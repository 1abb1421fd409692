"""What the rank of `opd teachers report` is given."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.work.model import WeightPrecision


@dataclass(frozen=True)
class ReportModel:
    """model: its name in the report. folder: on this node. precision: the configured one. contexts: token ids that it
    reads, one list a prompt."""

    model: str
    folder: str
    precision: WeightPrecision
    contexts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ReportWork:
    """vocab_size: rows of every head that count."""

    models: tuple[ReportModel, ...]
    vocab_size: int
    threads: int
