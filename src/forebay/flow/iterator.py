"""torch's iterator protocol over an engine.

Covers: what frameworks and PyTorch's own tests expect of the object that `iter(loader)`
gives. Does not cover: making batches (engine.py).
"""

from __future__ import annotations

import abc
import functools
import itertools
from dataclasses import replace
from typing import Any, final

from forebay import torch_compat
from forebay.flow.checkpoint import Checkpoint, MainState
from forebay.flow.engine import Engine, Legacy
from forebay.flow.plan import Plan
from forebay.flow.progress import Draws, LocalProgress, Progress, begin_dataset, catch_up
from forebay.memory.planner import Lessons
from forebay.workers.crew import WorkerProcess
from forebay.workers.randomness import Generators, entered_here
from forebay.workers.snapshot import Start
from forebay.workers.streams import RandomState, mix_seed, seed_generators


class _QuickNext(abc.ABC):  # noqa: B024 - a part of iterators, never one itself
    """`__next__` without the profiler's record (15 us) while no profiler runs."""

    def __next__(self) -> Any:
        if torch_compat.is_profiling() or self._IterableDataset_len_called is not None:  # type: ignore[attr-defined]
            return super().__next__()  # type: ignore[misc]
        data = self._next_data()  # type: ignore[attr-defined]
        self._num_yielded += 1  # type: ignore[attr-defined]
        return data


@final
class LoaderIterator(_QuickNext, torch_compat.BaseLoaderIterator):
    """Batches from worker processes, within a byte budget.

    One thread at a time may call `next`; others wait their turn. When the last reference
    goes, so do the workers.
    """

    def __init__(
        self,
        loader: Any,
        plan: Plan,
        make_job: Any,
        context: Any,
        legacy: Legacy,
        lessons: Lessons,
        checkpoint: Checkpoint | None,
    ) -> None:
        super().__init__(loader)  # draws the base seed, decides on pinning, warns
        self._is_over = False
        self._legacy = legacy
        self._checkpoint = checkpoint
        self._progress = Progress(loader, checkpoint)
        starts: tuple[Start, ...] = ()
        if checkpoint is not None:
            if checkpoint.keeps_seed(loader):
                self._base_seed = checkpoint.base_seed or 0
            starts = checkpoint.make_starts(loader, iter(self._index_sampler))
        self._progress.base_seed = int(self._base_seed)
        fixed = plan.budget.size_bytes if plan.budget.is_fixed else None
        self._make_engine = functools.partial(
            Engine,
            plan,
            replace(make_job(self._base_seed, starts), budget_bytes=fixed),
            context,
            legacy,
            lessons,
            self._progress,
        )
        self._engine = self._make_engine()
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        start = MainState.take(loader)
        super()._reset(loader, first_iter)
        self._is_over = False
        checkpoint, self._checkpoint = self._checkpoint, None
        drawn = 0
        if checkpoint is not None:
            if checkpoint.is_seeded:
                start = checkpoint.begin
            if checkpoint.is_running or checkpoint.is_seeded:
                self._sampler_iter = checkpoint.reopen_sampler(loader)
            drawn = checkpoint.drawn
            self._num_yielded = checkpoint.delivered if checkpoint.is_running else 0
        elif not first_iter and loader.refresh_dataset:
            self._engine.refresh_dataset(loader.dataset)
        draws = Draws(loader, self._sampler_iter, drawn)
        self._progress.note_start(start, draws)
        if self._engine.scheduler.has_lost:  # persistent workers of which one died: begin anew
            self._engine.close()
            self._progress.restart()
            self._engine = self._make_engine()
            loader._past.note_engine(self._engine, self._legacy)  # noqa: SLF001 - the loader ends it
            first_iter = True
        self._engine.start_epoch(draws.open(), is_first=first_iter)

    def _next_data(self) -> Any:
        if self._is_over:
            raise StopIteration
        self._engine.warn_of_deaths()
        try:
            batch = self._engine.take(self._timeout)
        except StopIteration:
            self._is_over = True
            if not self._persistent_workers:
                self._shutdown_workers()
            self._engine.warn_of_deaths()
            self._engine.warn_if_outgrown()
            raise
        self._engine.warn_if_outgrown()
        return torch_compat.pin_memory(batch) if self._pin_memory else batch

    @property
    def _workers(self) -> list[WorkerProcess]:
        return self._engine.crew.workers

    def _shutdown_workers(self) -> None:
        self._engine.close()

    def __del__(self) -> None:
        engine = self.__dict__.get("_engine")
        if engine is not None:
            engine.close_soon()


@final
class InProcessIterator(_QuickNext, torch_compat.SingleProcessIterator):
    """torch's own single-process iterator, with batches seeded one by one if asked for."""

    def __init__(self, loader: Any, note: Any, checkpoint: Checkpoint | None) -> None:
        start = MainState.take(loader) if checkpoint is None else checkpoint.begin
        if checkpoint is not None:
            begin_dataset(loader, checkpoint)
            checkpoint.put_start(loader)  # the dataset's state may hold a generator's
        super().__init__(loader)
        self._seeding = loader.seeding
        self._note = note
        self._epoch = drawn = 0
        if checkpoint is not None and checkpoint.is_running:
            self._base_seed = checkpoint.base_seed or 0
            self._epoch, drawn = checkpoint.epoch, checkpoint.drawn
            self._num_yielded = checkpoint.delivered
            if checkpoint.is_seeded:  # begun with workers
                self._sampler_iter = checkpoint.reopen_sampler(loader)
            else:
                checkpoint.sampler.put_iterator(self._sampler_iter)
        self._own = Generators(int(self._base_seed), 0)  # the one stream's: `forebay.rng()`
        draws = Draws(loader, self._sampler_iter, drawn)
        self._sampler_iter = draws.open()
        if checkpoint is not None and checkpoint.is_running:
            with entered_here(self._own):
                catch_up(
                    loader,
                    checkpoint,
                    self._sampler_iter,
                    self._dataset_fetcher,
                    self._own,
                    self._begin_batch,
                )
            if checkpoint.is_seeded:  # the sampler had begun, and drawn what it begins with
                begun = list(itertools.islice(self._sampler_iter, 1))
                self._sampler_iter = itertools.chain(begun, self._sampler_iter)
        self._progress = LocalProgress(
            start, draws, int(self._base_seed), self._epoch, self._own, self._num_yielded
        )
        self._progress.hold(loader.dataset, self._dataset_fetcher)

    def _next_data(self) -> Any:
        try:
            with entered_here(self._own):
                data = (
                    self._next_seeded() if self._seeding == "batch" else super()._next_data()  # type: ignore[no-untyped-call]
                )
        except StopIteration:
            self._progress.note_end()
            raise
        except Exception:
            self._progress.note_delivery()  # it stands in the place of a batch
            raise
        self._note(data)
        self._progress.note_delivery()
        return data

    def _begin_batch(self, number: int) -> None:
        """Seed what the batch draws from, if it is seeded by its number."""
        if self._seeding == "batch":
            seed = mix_seed(int(self._base_seed), self._epoch, number)
            seed_generators(seed, 0)
            self._own.reseed(seed, 0)

    def _next_seeded(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call] # the sampler draws from main's generators
        main = RandomState.take()
        try:
            self._begin_batch(self._progress.delivered)
            data = self._dataset_fetcher.fetch(index)
        finally:
            main.put()
        return torch_compat.pin_memory(data) if self._pin_memory else data
