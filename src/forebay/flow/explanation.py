"""The words of `explain()`: where every byte is, why it runs as it runs, what to change.

Covers: turning a situation into sentences. Does not cover: taking stock (engine.py). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.events import Decided, LoaderStats
from forebay.memory.growth import Growth
from forebay.units import MIB, format_bytes


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is to say of one iterator.

    Attributes:
        stats: The counters.
        limit_source: Where the budget comes from; empty when it was given in bytes.
        num_streams, tokens, start_method: How batches are made.
        plan_reason: Why there are fewer workers or fetches than asked for, or empty.
        found_unpickling: What kept workers from sharing the unpickled dataset.
        lent_bytes, copied_bytes, lost_bytes: Views, heap copies, and blocks given up to forks.
        batch_bytes, making_bytes: A usual batch, and what making it takes beside.
        objects_bytes: Of a batch, what its Python objects took on their way.
        kept_by_fork_bytes: Of the workers' and their template's, pages that main has rewritten
            or freed since they were forked.
        growth: How workers grow, if that has not slowed.
        unshared_bytes: What workers shared at the fork, and each has a copy of now.
        tables: Large tables of Python objects in the dataset.
        width, most: The window, in batches.
        evictions: Ready batches that went to disk.
        moves: How often streams changed their process.
        events: The latest decisions on memory.
        is_short: Whether memory is what holds the next fetch back.
        unmeasured: Readings that this system does not give.
    """

    stats: LoaderStats
    limit_source: str
    num_streams: int
    tokens: int
    start_method: str
    plan_reason: str
    found_unpickling: tuple[str, ...]
    lent_bytes: int
    copied_bytes: int
    lost_bytes: int
    batch_bytes: int
    making_bytes: int
    objects_bytes: int
    kept_by_fork_bytes: int
    growth: Growth | None
    unshared_bytes: int
    tables: tuple[str, ...]
    width: int
    most: int
    evictions: int
    is_short: bool
    moves: int
    events: tuple[Decided, ...]
    unmeasured: tuple[str, ...]


def explain(now: Situation) -> list[str]:
    """One sentence a line."""
    parts = (_say_bytes, _say_growth, _say_flow, _say_decisions, _say_deaths, _say_oddities)
    return [line for say in parts for line in say(now)]


_KEPT_LEAST_BYTES = 2 * MIB
"""Below it the difference may as well be the template's own."""


def _say_bytes(now: Situation) -> Iterator[str]:
    stats = now.stats
    source = f" ({now.limit_source})" if now.limit_source else ""
    yield (
        f"budget {format_bytes(stats.budget_bytes)}{source}; footprint "
        f"{format_bytes(stats.footprint_bytes)}, peak {format_bytes(stats.peak_footprint_bytes)}"
    )
    yield _say_workers(now)
    if now.kept_by_fork_bytes >= _KEPT_LEAST_BYTES:
        yield (
            f"  of it {format_bytes(now.kept_by_fork_bytes)} kept by fork: pages that this process "
            "has rewritten or freed since it was forked. With "
            "multiprocessing_context='forkserver' none are"
        )
    yield (
        f"  arena: {format_bytes(stats.arena_bytes)} resident, of it "
        f"{format_bytes(stats.in_flight_bytes)} in flight or waiting, "
        f"{format_bytes(now.lent_bytes)} lent to the consumer"
    )


def _say_workers(now: Situation) -> str:
    size = format_bytes(now.stats.workers_private_bytes)
    how = f"for {now.num_streams} stream(s), {now.tokens} fetch(es) at once"
    if now.start_method == "thread":
        return (
            f"  {now.stats.workers} thread(s) of this process {how}: about {size}. What they "
            "allocate while they make a batch lies on this process's heap and cannot be told "
            "apart from the training code's: promised for it is the size of the batch where its "
            "samples are listed before they are collated, and nothing where they are not"
        )
    return (
        f"  workers and their template: {size} ({now.stats.workers} worker(s) {how}, start "
        f"method {now.start_method})"
    )


_GROWN_OF: dict[str, str] = {
    "native": "memory below Python, since the number of Python's own memory blocks stays. A "
    "library keeps it: files or decoders that are not closed, or a cache",
    "python": "Python objects, since the number of Python's own memory blocks grows along. "
    "Something keeps what each batch makes: a list, or a cache without a bound",
    "unknown": "whether in Python's objects or in memory below them could not be told",
}

_UNSHARED_LEAST_BYTES = 4 * MIB
"""Less is what any worker copies of the interpreter's own modules."""


def _say_growth(now: Situation) -> Iterator[str]:
    if now.growth is not None:
        yield (
            f"a worker grows by {format_bytes(now.growth.bytes_a_batch)} with each batch, and has "
            f"not slowed over {now.growth.batches} batches: {_GROWN_OF[now.growth.kind]}. Workers "
            "that outgrow their share are replaced between two batches"
        )
    if now.unshared_bytes >= _UNSHARED_LEAST_BYTES:
        owners = f" It has {', '.join(now.tables)}:" if now.tables else ""
        yield (
            f"workers have copied {format_bytes(now.unshared_bytes)} of pages that they shared at "
            "first, since reading a Python object of the dataset writes its reference count. That "
            f"is no leak: it ends when all is copied.{owners} forebay.PackedList holds such "
            "records once for all workers"
        )


_OBJECTS_FRAC = 0.1
_OBJECTS_LEAST_BYTES = 64 * 1024
"""From where Python objects in batches are worth a word; every batch has a few hundred bytes."""


def _say_flow(now: Situation) -> Iterator[str]:
    stats = now.stats
    yield (
        f"window: {now.width} batch(es) of about {format_bytes(now.batch_bytes)}, at most "
        f"{now.most}; it widens only while the consumer waits and a worker idles"
    )
    yield (f"making a batch takes {format_bytes(now.making_bytes)} beside its result at its peak")
    total = max(now.batch_bytes, now.objects_bytes)
    if now.objects_bytes >= _OBJECTS_LEAST_BYTES and now.objects_bytes >= _OBJECTS_FRAC * total:
        yield (
            f"{now.objects_bytes / total:.0%} of a batch is Python objects rather than tensors or "
            "arrays: they are pickled, and take several times as much once rebuilt. Keep what "
            "does not change in the dataset and send its index, or use arrays"
        )
    yield (
        f"delivered {stats.batches:,} batch(es), {format_bytes(stats.delivered_bytes)}; the "
        f"consumer waited {stats.consumer_wait_s:.1f} s"
    )
    if now.is_short:
        more = now.batch_bytes + now.making_bytes
        yield (
            "memory holds the next fetch back: "
            f"{format_bytes(more)} more budget would let another run"
        )


_LAST = 3
"""Decisions that are told in words; the log has them all."""


def _say_decisions(now: Situation) -> Iterator[str]:
    for event in now.events[-_LAST:]:
        acts = f" ({', '.join(event.acts)})" if event.acts else ""
        yield f"at {event.t_s:.1f} s: {event.stance}{acts}, since {event.because}"
    if now.moves:
        yield (
            f"streams went on in another process {now.moves} time(s), to keep the budget: order "
            "and the global generators went along, what the dataset object had kept did not"
        )


_LAST_DEATHS = 5


def _say_deaths(now: Situation) -> Iterator[str]:
    stats = now.stats
    if not stats.worker_restarts:
        return
    yield (
        f"{stats.worker_restarts} worker(s) died and were replaced; the batches that they had in "
        "hand were made again, the same ones. What the dataset object had kept in them is lost"
    )
    for reason in stats.restart_reasons[-_LAST_DEATHS:]:
        yield f"  {reason}"


def _say_oddities(now: Situation) -> Iterator[str]:
    over = now.stats.peak_footprint_bytes - now.stats.budget_bytes
    if over > 0:
        yield (
            f"the budget was exceeded by {format_bytes(over)}: by a first batch of its kind, or by "
            "Python objects of the dataset, which each worker that touches them copies. Keep "
            "records in arrays or tensors, or use fewer workers"
        )
    if now.plan_reason:
        yield now.plan_reason
    if now.found_unpickling:
        yield (
            "each worker unpickled the dataset for itself, since unpickling made what forked "
            f"workers would share: {'; '.join(now.found_unpickling)}. Open files and start "
            "threads at first use, and the dataset is held once for all workers"
        )
    if now.evictions:
        yield (
            f"{now.evictions} ready batch(es) went to disk and back, so that the next one always "
            "had room: raise the budget, or lower batch_size"
        )
    if now.copied_bytes:
        yield (
            f"the consumer keeps {format_bytes(now.copied_bytes)} of batches that were copied to "
            "the heap of this process: clone the parts that you need"
        )
    if now.lost_bytes:
        yield (
            f"{format_bytes(now.lost_bytes)} are never used again: the training code forked while "
            "batches were in its hands, and the child may still read them"
        )
    for reason in now.unmeasured:
        yield f"not measured: {reason}"
