"""`forebay.DataLoader`: torch's loader, holding a byte budget.

Covers: the signature, what is checked when a loader is made, choosing the engine, and what
a loader tells of itself. Does not cover: running (flow/).

The contract with frameworks: every keyword of ours is a plain instance attribute of the
same name that holds the raw argument (they rebuild loaders from those); everything else
begins with an underscore; torch's `__init__`, `__iter__`, `__len__`, `__setattr__` stay.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch.multiprocessing
import torch.utils.data
from typing_extensions import Self

from forebay import torch_compat
from forebay.errors import BudgetWarning, StateMismatch
from forebay.events import LoaderStats
from forebay.flow.checkpoint import Checkpoint
from forebay.flow.engine import Engine, Legacy
from forebay.flow.indices import make_compact
from forebay.flow.iterator import InProcessIterator, LoaderIterator
from forebay.flow.plan import Plan
from forebay.flow.progress import LocalProgress, Progress, compose_unstarted
from forebay.memory.budget import Budget
from forebay.memory.planner import Lessons
from forebay.options import (
    OffBudget,
    parse_backend,
    parse_budget,
    parse_on_death,
    parse_seeding,
    parse_stall_report,
    resolve_budget,
)
from forebay.workers.job import Job
from forebay.workers.snapshot import Start

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader` that holds a byte budget.

    Yields the very batches that torch's would, bit for bit, for the same seeds. All of
    torch's parameters keep their meaning and position; those below are forebay's.

    Args:
        dataset: As torch.
        batch_size: As torch, like all up to `in_order`.
        shuffle: As torch.
        sampler: As torch.
        batch_sampler: As torch.
        num_workers: As torch. It is the number of *streams* (random states, dataset
            copies), and the most processes; the budget may allow fewer processes.
        collate_fn: As torch. With torch's default, samples are written straight into the
            batch, row by row, and no list of them exists.
        pin_memory: As torch.
        drop_last: As torch.
        timeout: As torch.
        worker_init_fn: As torch. With one, streams never share a process.
        multiprocessing_context: As torch.
        generator: As torch.
        prefetch_factor: As torch, an upper bound: batches in flight may be fewer.
        persistent_workers: As torch.
        pin_memory_device: As torch.
        in_order: As torch.
        memory_budget: The most bytes that may exist because of this loader (its worker
            processes' private memory, the batches in its arena). Bytes as an int, a size
            ("2GiB"), a share of the tightest limit that binds ("25%"), "auto" (four fifths
            of what is free below that limit, followed up and down), a `forebay.Budget`
            that several loaders share, or "off" (torch's own engine, to tell faults
            apart). None takes `set_default_budget`'s, else the
            environment's `FOREBAY_MEMORY_BUDGET`, else "auto".
        worker_backend: Who carries the streams. "process": worker processes, as torch.
            "thread": threads of this process: no copies of the dataset, no start-up, and
            nothing to send; but the interpreter lock is shared, so is the dataset object,
            and the global generators are not a stream's own (see `forebay.rng`). "auto":
            processes, or threads where the budget cannot carry one process.
        seeding: "torch": batch i is made by stream i mod num_workers, whose random state
            runs on, as torch does. "batch": the global generators are seeded before each
            batch from (base seed, epoch, number), so batches of map-style datasets do not
            depend on `num_workers`, and any worker may make any batch.
        on_worker_death: "replay": a worker that is killed, crashes or exits is replaced, and the
            batches that it had in hand are made again, each delivered once, in order, and the
            same as without the death. What the dataset object itself had kept in that worker
            is lost; an iterable dataset without a `state_dict` is run again from its start.
            After three deaths on one batch there is a `PoisonSample` in its place. "raise": a
            death ends the epoch with `WorkerDied`, as in torch. Threads do not die.
        worker_exit_fn: Called with the worker's id on every orderly end of a worker.
        refresh_dataset: With `persistent_workers`: at each further epoch the workers take the
            dataset anew, as it is in this process then (`set_epoch`, changed attributes), and
            run `worker_init_fn` on it. It is pickled for each of them; their random state runs
            on.
        stall_report_s: When the loop has waited so many seconds for a batch, one `Stalled` warning
            says which batch that is, which worker has it, its memory, and where in its Python
            code it is. None for never. Nothing is ended: that is `timeout`'s.
        snapshot_every_n_steps: A dataset or sampler that has a `state_dict` of its own is asked
            for it after every so many batches. A resumed loader makes those after the last
            one again, so it is exact with any number; above 1 it costs less while running.
        **kwargs: Keywords that a newer torch has.

    Raises:
        InvalidBudget: `memory_budget` is text or a number that names no budget.
        InvalidBudgetType: `memory_budget` is of another type.
        InvalidOption: `worker_backend`, `seeding`, `on_worker_death` or `stall_report_s` is none of
            those above.
        ValueError: What torch refuses.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory_budget: int | str | Budget | None = None,
        worker_backend: str = "process",
        seeding: str = "torch",
        on_worker_death: str = "replay",
        worker_exit_fn: Callable[[int], None] | None = None,
        refresh_dataset: bool = False,
        stall_report_s: float | None = 60.0,
        snapshot_every_n_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        if memory_budget is not None:
            parse_budget(memory_budget)
        parse_backend(worker_backend)
        parse_seeding(seeding)
        parse_on_death(on_worker_death)
        parse_stall_report(stall_report_s)
        self.memory_budget = memory_budget
        self.worker_backend = worker_backend
        self.seeding = seeding
        self.on_worker_death = on_worker_death
        self.worker_exit_fn = worker_exit_fn
        self.refresh_dataset = refresh_dataset
        self.stall_report_s = stall_report_s
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._loaded: dict[str, Any] | None = None
        self._has_prefetch_bound = prefetch_factor is not None
        self._past = _Past()
        # Upper bounds for tests, which must see few fetches at once and shared processes.
        self._max_tokens: int | None = None
        self._max_workers: int | None = None
        if torch_compat.accepts_keyword("in_order"):
            kwargs["in_order"] = in_order
        else:
            self.in_order = in_order
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **kwargs,
        )

    def _get_iterator(self) -> Any:
        if self._loaded is None:
            return self._make_iterator(None)
        checkpoint = Checkpoint.read(self._loaded)
        checkpoint.check(self)
        with checkpoint.entered(self):
            iterator = self._make_iterator(checkpoint)
        self._loaded = None
        return iterator

    @property
    def _index_sampler(self) -> Any:
        """torch's name for what gives a batch its indices."""
        return make_compact(super()._index_sampler)

    def _is_torchs(self, budget: object) -> bool:
        """Whether torch's own engine makes the batches."""
        return isinstance(budget, OffBudget) or torch_compat.is_datapipe(self.dataset)

    def _make_iterator(self, checkpoint: Checkpoint | None) -> Any:
        budget = resolve_budget(self.memory_budget)
        if self._is_torchs(budget):
            if checkpoint is not None:
                raise StateMismatch.about("the engine", "forebay's", "torch's")
            self._past.note_torchs_engine()
            return super()._get_iterator()
        if self.num_workers == 0:
            local = InProcessIterator(self, self._past.note_batch, checkpoint)
            self._past.progress = local._progress  # noqa: SLF001 - our own iterator
            return local
        self.check_worker_number_rationality()
        context = self.multiprocessing_context or torch.multiprocessing.get_context()
        assert not isinstance(budget, OffBudget)
        plan, legacy = self._make_plan(Budget.of(budget)), Legacy()
        lessons = self._past.lessons
        iterator = LoaderIterator(self, plan, self._make_job, context, legacy, lessons, checkpoint)
        self._past.progress = iterator._progress  # noqa: SLF001 - our own iterator
        self._past.note_engine(iterator._engine, legacy)  # noqa: SLF001 - our own iterator
        self._past.warn_once(iterator._engine.crew_plan.because)  # noqa: SLF001
        return iterator

    def _make_plan(self, budget: Budget) -> Plan:
        is_iterable = torch_compat.is_iterable_kind(self._dataset_kind)
        is_quiet = is_iterable or torch_compat.draws_nothing_shared(super()._index_sampler)
        lead = (self.prefetch_factor or 2) * self.num_workers
        return Plan(
            budget=budget,
            lead=lead,
            most_ahead=lead,
            may_run_ahead=is_quiet and not self._has_prefetch_bound and not self.persistent_workers,
            draws_strictly=not is_quiet,
            in_order=self.in_order,
            batch_size=self.batch_size,
            may_merge=not is_iterable and self.worker_init_fn is None,
            may_move=not is_iterable,
            is_bound=self.in_order and (is_iterable or self.seeding == "torch"),
            backend=parse_backend(self.worker_backend),
            stall_report_s=parse_stall_report(self.stall_report_s),
            may_replay=parse_on_death(self.on_worker_death) == "replay",
            max_workers=self._max_workers,
            max_tokens=self._max_tokens,
        )

    def _make_job(self, base_seed: int, starts: tuple[Start, ...]) -> Job:
        return Job(
            dataset=self.dataset,
            kind=self._dataset_kind,
            auto_collation=self._auto_collation,
            collate_fn=self.collate_fn,
            has_default_collate=self.collate_fn is torch.utils.data.default_collate,
            drop_last=self.drop_last,
            num_streams=self.num_workers,
            base_seed=base_seed,
            init_fn=self.worker_init_fn,
            exit_fn=self.worker_exit_fn,
            seeding=parse_seeding(self.seeding),
            snapshot_every=max(1, self.snapshot_every_n_steps),
            starts=starts,
        )

    # -- where it stands -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: after the batch that `next` gave last, or between epochs.

        Changes nothing. Before the first `iter` and in the middle of an epoch it takes about
        0.1 ms a worker. It waits for workers in two cases: at the begin of an epoch until a
        dataset that has a `state_dict` has told it, and between epochs of persistent workers.
        Call it in the thread that iterates.

        Returns:
            Plain values, which JSON can hold if it can hold what the dataset and the sampler
            tell of themselves. The keys are those of torchdata's StatefulDataLoader, and one
            of ours. Empty under `memory_budget="off"` and for DataPipes.

        Raises:
            StateUnavailable: The dataset's own `state_dict` failed.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        if self._is_torchs(resolve_budget(self.memory_budget)):
            return {}
        self._past.wait_for_streams()
        progress = self._past.progress
        checkpoint = progress.compose(self) if progress is not None else None
        return (checkpoint or compose_unstarted(self)).write()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next `iter` go on from where `state_dict()` was called.

        The rest of the epoch is what it would have been, random numbers included; so are
        later epochs as far as they depend on `generator`, the sampler and the workers.
        Samplers without a state of their own are drawn from again, iterable datasets without
        one are iterated again up to the place.

        Args:
            state_dict: From a loader made alike, in any process. An empty one begins anew.

        Raises:
            InvalidState: It is no loader's state.
            StateMismatch: At the next `iter`: the loader is made otherwise (`num_workers`,
                `batch_size`, `seeding`, the kind of dataset).
        """
        if state_dict:
            Checkpoint.read(state_dict)
        self._past.progress = None
        self._loaded = copy.deepcopy(state_dict) if state_dict else None
        self._iterator = None

    # -- what it tells -------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """Counters and bytes of the latest iterator; zeros before the first.

        Reads the processes' memory once (about 16 ms a GiB of this process). Any thread of
        this process may call it.
        """
        return self._past.read_stats()

    def explain(self) -> str:
        """In words: where every byte is, and why it runs as it runs."""
        return self._past.explain(f"DataLoader(num_workers={self.num_workers})")

    # -- its end -------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers of every iterator of this loader. Delivered batches stay valid."""
        self._past.close()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # An iterator belongs to this process; a copy of the loader has none yet.
        return self.__dict__ | {"_iterator": None, "_past": _Past()}


@final
class _Past:
    """What a loader knows of its iterators, without keeping any of them alive."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._latest: weakref.ref[Engine] | None = None
        self._legacy = Legacy()
        self.lessons = Lessons()
        self._in_process = 0
        self._has_warned = False
        self._is_torchs = False
        self.progress: Progress | LocalProgress | None = None
        """How far the latest iterator has come."""

    def note_engine(self, engine: Engine, legacy: Legacy) -> None:
        """A new iterator, and where its last words will be."""
        self._engines.add(engine)
        self._latest, self._legacy = weakref.ref(engine), legacy

    def note_torchs_engine(self) -> None:
        """An iterator of torch's own, of which nothing is known."""
        self._is_torchs = True

    def warn_once(self, because: str) -> None:
        """Say the first time that the budget carries less than was asked for."""
        if because and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{because}. The batches are the same. Raise memory_budget to have more at once.",
                BudgetWarning,
                stacklevel=4,
            )

    def wait_for_streams(self) -> None:
        """Until the latest iterator's streams have said where they stand."""
        engine = self._latest() if self._latest is not None else None
        if engine is not None and isinstance(self.progress, Progress):
            engine.wait_for_streams()

    def note_batch(self, _batch: object) -> None:
        """A batch made in this process."""
        self._in_process += 1

    def read_stats(self) -> LoaderStats:
        """Of the latest iterator, alive or not."""
        if self._legacy.stats is not None:
            return self._legacy.stats
        engine = self._latest() if self._latest is not None else None
        return engine.read_stats() if engine is not None else LoaderStats(batches=self._in_process)

    def explain(self, name: str) -> str:
        """The same in words."""
        if self._legacy.stats is not None:
            return "\n".join([f"{name}, ended", *self._legacy.lines])
        engine = self._latest() if self._latest is not None else None
        if engine is not None:
            return "\n".join([name, *engine.explain()])
        if self._in_process:
            return (
                f"{name}\nbatches are made in this process, by torch's own iterator: "
                f"{self._in_process:,} so far, and nothing is held ahead"
            )
        if self._is_torchs:
            return f"{name}\ntorch's own engine makes the batches: nothing is held to a budget"
        return f"{name}\nnothing was iterated yet"

    def __reduce__(self) -> tuple[type[_Past], tuple[()]]:
        return _Past, ()  # a copy of a loader has no past

    def close(self) -> None:
        """End the engines that are still alive."""
        for engine in list(self._engines):
            engine.close()
