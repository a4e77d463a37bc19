"""What a ticket becomes on its way: a flight, then something landed.

Covers: the values that the scheduler keeps of each ticket, and what it is told. Does not
cover: moving a ticket from one to the next (scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, final

from forebay.flow.order import Ticket
from forebay.transport.lease import Draft, Ready
from forebay.transport.spill import Spilled
from forebay.units import MIB
from forebay.workers.crew import WorkerProcess
from forebay.workers.messages import Failed


@dataclass(frozen=True, slots=True)
class Settings:
    """What one iterator's scheduler is told.

    Attributes:
        num_streams: torch's `num_workers`.
        lead: Batches that torch draws ahead of the consumer.
        most_ahead: Batches that may be in flight or waiting.
        may_run_ahead: Whether small batches may be more, since the sampler draws from
            nothing shared and workers do not outlive the epoch.
        draws_strictly: Draw from the sampler at exactly torch's moments.
        in_order: torch's `in_order`.
        batch_size: For messages; None when batches are the sampler's.
        tokens: Fetches at once.
        may_move: Whether streams can go on in another process.
        may_merge: Whether several may share one, to save memory.
        may_share: Whether several may share one that could not be started otherwise.
        most_workers: Processes that may carry the streams.
        keep_bytes: Freed heap that each worker may keep.
        may_replay: Whether workers that died are replaced.
    """

    num_streams: int
    lead: int
    most_ahead: int
    may_run_ahead: bool
    draws_strictly: bool
    in_order: bool
    batch_size: int | None
    tokens: int
    may_move: bool = False
    may_merge: bool = False
    may_share: bool = False
    most_workers: int = 1
    keep_bytes: int = 16 * MIB
    may_replay: bool = False


@final
class Flight:
    """A ticket that a worker has."""

    __slots__ = (
        "draft",
        "given_back",
        "is_again",
        "need_bytes",
        "origin",
        "poured_bytes",
        "spare",
        "started_s",
        "stream",
        "ticket",
        "worker",
    )

    def __init__(
        self, ticket: Ticket, worker: WorkerProcess, draft: Draft | None, stream: int
    ) -> None:
        self.stream = stream  # who makes it, also where any may
        self.origin = ticket.serial  # the batch that it is, when it is made once more
        self.is_again = False  # made once more for nobody, after its worker died
        self.started_s = 0.0  # when it was handed to an idle worker; 0 behind another
        self.ticket = ticket
        self.worker = worker
        self.draft = draft
        self.spare: Draft | None = None  # the first draft, when a larger one replaced it
        self.given_back = 0  # the arena's count when it was handed out
        self.need_bytes = 0  # above 0: the worker waits for so much
        self.poured_bytes = 0  # of it, what it has already and gives up for it

    @property
    def drafts(self) -> list[Draft]:
        """Blocks that are its own."""
        return [draft for draft in (self.draft, self.spare) if draft is not None]

    @property
    def pouring(self) -> tuple[int, int]:
        """Which worker gives up how much of what it was promised."""
        return self.worker.number, self.poured_bytes


@final
@dataclass(frozen=True, slots=True)
class Inline:
    """A small batch that came in its message."""

    head: bytes
    buffers: tuple[bytearray, ...]


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """A batch that cannot be had."""

    error: BaseException


@final
class Skipped:
    """A ticket of a stream that had ended: nothing to deliver."""


@final
class End:
    """The epoch is over."""


Landed: TypeAlias = Ready | Spilled | Inline | Failed | Refused | Skipped
Delivered: TypeAlias = Ready | Spilled | Inline | Failed | Refused | End


def count_samples(indices: Any) -> int:
    """How many samples a ticket asks for: a list of indices, or one alone."""
    return len(indices) if isinstance(indices, (list, tuple)) else 1
