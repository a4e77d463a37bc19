"""Every error and warning text of forebay, read together in one place.

Covers: the tree of errors and how each is worded. Does not cover: when one is raised.

Each text has four parts: what happened (numbers with units), which rule or knob, what the
loader did, what you can do. The facts are attributes too.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from forebay.units import ACCEPTED_FORMS, format_budget, format_bytes


class ForebayError(Exception):
    """Whatever forebay itself refuses or reports. Errors of user code keep their own type.

    Made from its text alone, like every exception that tools build again from type and text
    (torch does, when a worker's error crosses to the main process); `about` composes the text
    and keeps the facts.
    """

    def __init__(self, text: str = "", **facts: Any) -> None:
        super().__init__(text)
        self.__dict__.update(facts)


class HoardingWarning(UserWarning):
    """The consumer keeps batches; they were moved out of the loader's arena."""


class BudgetWarning(UserWarning):
    """The loader runs with less than was asked for, or cannot measure what it promises."""


class ReplayWarning(UserWarning):
    """A stream of a worker that died is run again from its start."""

    @classmethod
    def about_skipping(cls) -> Self:
        """The warning for an iterable dataset without a state of its own."""
        return cls(
            "a worker died, and its iterable dataset cannot tell where it stood: the stream is "
            "run again from its start, and what was delivered of it is passed over. That is the "
            "same stream only if the dataset yields the same each time. Give the dataset "
            "state_dict() and load_state_dict(), and it goes on at its place."
        )


class ScarcityWarning(UserWarning):
    """Fewer workers run than were asked for, since the system has no more to give."""

    @classmethod
    def about_descriptors(cls, workers: int, wanted: int, free: int) -> Self:
        """The warning where `free` descriptors carry `workers` of `wanted` workers."""
        return cls(
            f"only {free} more files may be opened by this process, and each worker takes "
            f"two: {workers} of {wanted} workers run, and make the batches of "
            "all. The batches are the same. Raise the limit (ulimit -n, "
            "resource.setrlimit(RLIMIT_NOFILE)) to have them all."
        )

    @classmethod
    def about_worker(cls, number: int, why: str) -> Self:
        """The warning for a worker that the system would not start."""
        return cls(
            f"worker {number} could not be started ({why}): another one makes its batches. They "
            "are the same. Free memory or processes, or ask for fewer workers."
        )


class DuplicateSamplesWarning(UserWarning):
    """Several workers produce the same samples of a stream that nobody divides among them."""


class InvalidBudget(ForebayError, ValueError):  # noqa: N818 - named for what it is about
    """`memory_budget` has a value that names no budget."""

    value: object
    why: str

    @classmethod
    def about(cls, value: object, why: str, given_as: str = "memory_budget") -> Self:
        """The error for `value`, given as `given_as`, which is no budget because of `why`."""
        return cls(
            f"{given_as}={value!r} names no budget: {why}. "
            f"The loader was not made. Give {ACCEPTED_FORMS}.",
            value=value,
            why=why,
        )


class InvalidBudgetType(ForebayError, TypeError):  # noqa: N818
    """`memory_budget` is of a type that names no budget."""

    value: object

    @classmethod
    def about(cls, value: object) -> Self:
        """The error for `value`, whatever it is."""
        return cls(
            f"memory_budget={value!r} is of type {type(value).__name__}, which names no budget. "
            f"The loader was not made. Give {ACCEPTED_FORMS}.",
            value=value,
        )


class InvalidOption(ForebayError, ValueError):  # noqa: N818
    """One of forebay's own keywords has a value outside its closed set."""

    name: str
    value: object
    accepted: tuple[object, ...]

    @classmethod
    def about(cls, name: str, value: object, accepted: tuple[object, ...]) -> Self:
        """The error for keyword `name`."""
        forms = ", ".join(repr(form) for form in accepted)
        return cls(
            f"{name}={value!r} is not one of {forms}. The loader was not made. Give one of these.",
            name=name,
            value=value,
            accepted=accepted,
        )


class InvalidMemory(ForebayError, ValueError):  # noqa: N818
    """`memory` of a dataset wrapper names no number of bytes, or too few."""

    value: object

    @classmethod
    def about(cls, value: object) -> Self:
        """The error for `value`, whatever it is."""
        return cls(
            f"memory={value!r} names no number of bytes. The dataset was not wrapped. Give bytes "
            'as an int, a size like "64MiB", "4GiB" or "4GB", or a share like "10%".',
            value=value,
        )

    @classmethod
    def below(cls, value: object, memory_bytes: int, needed_bytes: int, samples: int) -> Self:
        """The error for `value`, which holds the index of a cache and nothing beside."""
        return cls(
            f"memory={value!r} is {format_bytes(memory_bytes)}, but the index of a cache for "
            f"{samples:,} samples takes {format_bytes(needed_bytes)}, and samples come on top. "
            "The dataset was not wrapped. Give what the samples take that should be kept.",
            value=value,
            memory_bytes=memory_bytes,
            needed_bytes=needed_bytes,
            samples=samples,
        )


class BudgetTooSmall(ForebayError, ValueError):  # noqa: N818
    """The budget cannot hold what the smallest running loader needs.

    Attributes:
        budget_bytes: The budget that was given.
        needed_bytes: The smallest budget that works.
        workers_bytes: What the workers and their template take of it.
        batch_bytes: One batch, or 0 while none was seen.
    """

    budget_bytes: int
    needed_bytes: int
    workers_bytes: int
    batch_bytes: int

    @classmethod
    def about(
        cls,
        budget_bytes: int,
        workers_bytes: int,
        batch_bytes: int,
        batch_size: int | None,
        who: str = "one worker with its template takes",
    ) -> Self:
        """The error for a budget beside what a worker, or whoever it is, and a batch take."""
        needed_bytes = workers_bytes + batch_bytes
        parts = f"{who} {format_bytes(workers_bytes)}"
        if batch_bytes:
            parts += f" and one batch {format_bytes(batch_bytes)}"
        return cls(
            f"memory_budget is {format_bytes(budget_bytes)}, but {parts}. "
            "The budget must hold both. No batch was delivered. "
            f"Raise the budget to {format_budget(needed_bytes)} or more"
            f"{_smaller_batch(budget_bytes - workers_bytes, batch_bytes, batch_size)}"
            ", or use num_workers=0, which needs no worker.",
            budget_bytes=budget_bytes,
            needed_bytes=needed_bytes,
            workers_bytes=workers_bytes,
            batch_bytes=batch_bytes,
        )


class BatchExceedsBudget(ForebayError, RuntimeError):  # noqa: N818
    """One batch is larger than all that the budget leaves for batches.

    Attributes:
        serial: Number of the batch within the epoch, from 0.
        batch_bytes: What it needs.
        budget_bytes: The budget.
        available_bytes: What the budget leaves for batches beside the workers.
    """

    serial: int
    batch_bytes: int
    budget_bytes: int
    available_bytes: int

    @classmethod
    def about(
        cls,
        serial: int,
        batch_bytes: int,
        budget_bytes: int,
        available_bytes: int,
        batch_size: int | None,
    ) -> Self:
        """The error for batch `serial` of an epoch."""
        needed = batch_bytes + budget_bytes - available_bytes
        return cls(
            f"batch {serial:,} needs {format_bytes(batch_bytes)}, but memory_budget is "
            f"{format_bytes(budget_bytes)} and leaves {format_bytes(max(available_bytes, 0))} for "
            "batches beside the workers. A batch must fit alone. It was dropped; iteration can "
            f"go on with the next. Raise the budget to {format_budget(needed)} or more"
            f"{_smaller_batch(available_bytes, batch_bytes, batch_size)}.",
            serial=serial,
            batch_bytes=batch_bytes,
            budget_bytes=budget_bytes,
            available_bytes=available_bytes,
        )


def _smaller_batch(room_bytes: int, batch_bytes: int, batch_size: int | None) -> str:
    if not batch_bytes or not batch_size or batch_size < 2:  # noqa: PLR2004 - nothing to lower
        return ""
    fits = batch_size * max(room_bytes, 0) // batch_bytes
    return f", or lower batch_size from {batch_size} to {fits}" if fits >= 1 else ""


class WorkerDied(ForebayError, RuntimeError):  # noqa: N818
    """A worker process ended although nobody asked it to.

    Attributes:
        pid: Its process id.
        exit_code: As `multiprocessing` has it: negative for a signal.
        indices: What it was working on, or None.
    """

    pid: int
    exit_code: int | None
    indices: object

    @classmethod
    def about(cls, pid: int, exit_code: int | None, indices: object = None) -> Self:
        """The error for worker `pid`."""
        text = f"{_torchs_sentence(pid, exit_code)}{_working_on(indices)}"
        return cls(text, pid=pid, exit_code=exit_code, indices=indices)


class PoisonSample(WorkerDied):
    """A batch of which worker after worker died.

    Attributes:
        deaths: How many.
        held_bytes: Memory of its own that the last one had when it was read last; 0 if it never
            was.
    """

    deaths: int
    held_bytes: int

    @classmethod
    def about_batch(
        cls, pid: int, exit_code: int | None, indices: object, deaths: int, held_bytes: int
    ) -> Self:
        """The error in the place of the batch that `deaths` workers died of."""
        held = f" The last held {format_bytes(held_bytes)} of its own." if held_bytes else ""
        what = f"the batch of indices {_shorten(indices)}" if indices is not None else "its start"
        return cls(
            f"{_torchs_sentence(pid, exit_code)}{deaths} workers in a row died of {what}: it is "
            f"given up.{held} The batches after it can still be had: go on with next(), if your "
            "loop may leave it out. To find the cause, ask the dataset for these indices in a "
            "process of their own, with python -X faulthandler.",
            pid=pid,
            exit_code=exit_code,
            indices=indices,
            deaths=deaths,
            held_bytes=held_bytes,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What holds the next batch up.

    Attributes:
        waited_s: For how long the loop has waited.
        number: The batch, within the epoch; None if it is none in particular.
        indices: Its.
        pid: The worker that has it; None if none has.
        state: Of that worker, in the system's word; "thread" if it is one of this process.
        held_bytes: Memory of its own.
        stack: Its Python stacks; empty if it did not tell.
        other_threads: Threads that this process had when it forked, by name.
        lacks_memory: Whether memory holds the batch back.
    """

    waited_s: float
    number: int | None
    indices: Any
    pid: int | None
    state: str
    held_bytes: int
    stack: str
    other_threads: tuple[str, ...]
    lacks_memory: bool


class Stalled(ForebayError, UserWarning):  # noqa: N818
    """The loop has waited long for a batch: a report, and no error unless a filter makes it one.

    Attributes:
        waited_s: For how long.
        number: The batch within the epoch, or None.
        indices: What it is to be made of.
        pid: The worker that has it, or None.
        stack: That worker's Python stacks; empty if it did not tell.
    """

    waited_s: float
    number: int | None
    indices: object
    pid: int | None
    stack: str

    @classmethod
    def about(cls, found: Finding) -> Self:
        """The report of what was found."""
        return cls(
            f"no batch for {found.waited_s:.0f} s (stall_report_s). {_say_awaited(found)} "
            "The loop goes on waiting. Give the loader a timeout to have an error instead, or "
            f"stall_report_s=None for no report.{_say_stack(found)}",
            waited_s=found.waited_s,
            number=found.number,
            indices=found.indices,
            pid=found.pid,
            stack=found.stack,
        )


_STATES = {
    "sleeping": "which waits for something and computes nothing",
    "disk-sleep": "which waits for a disk or a network file system",
    "running": "which is computing",
    "stopped": "which somebody has stopped (SIGSTOP); SIGCONT would have it go on",
    "tracing-stop": "which a debugger has stopped",
    "thread": "a thread of this process",
    "not started": "which has not started yet",
    "gone": "which has just ended",
}


def _say_awaited(found: Finding) -> str:
    if found.number is None:
        lacks = "memory holds it back: what your code keeps of earlier batches, or other loaders"
        return f"The next one is with no worker; {lacks if found.lacks_memory else 'none is free'}."
    held = f", holds {format_bytes(found.held_bytes)} of its own" if found.held_bytes else ""
    who = f"worker {found.pid}" if found.pid else "a worker"
    state = _STATES.get(found.state, f"in state {found.state!r}")
    text = (
        f"Batch {found.number}, of indices {_shorten(found.indices)}, is with {who}, {state}{held}."
    )
    if found.lacks_memory:
        text += " It lacks memory: what your code keeps of earlier batches, or other loaders."
    if found.other_threads and found.state == "sleeping":
        names = ", ".join(found.other_threads)
        text += (
            f" It was forked while other threads ran in this process ({names}): a lock that one of "
            "them held then stays locked in the worker for ever. multiprocessing_context="
            "'forkserver' has no such locks."
        )
    return text


def _say_stack(found: Finding) -> str:
    return f" Its Python stack, innermost first:\n{found.stack}" if found.stack else ""


def say_end(pid: int, exit_code: int | None) -> str:
    """How a worker ended, in few words."""
    who = f"worker {pid}" if pid else "a worker that had not begun"
    if exit_code is None:
        return f"{who} ended with its template"
    if exit_code >= 0:
        return f"{who} exited with code {exit_code}"
    try:
        return f"{who} was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"{who} was killed by signal {-exit_code}"


def _name_signal(number: int) -> str:
    return signal.strsignal(number) or f"signal {number}"


def _torchs_sentence(pid: int, exit_code: int | None) -> str:
    """torch's own words, which tools and tests look for."""
    if exit_code is None:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly. "
    if exit_code >= 0:
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exit_code}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give "
            "better error trace. "
        )
    text = f"DataLoader worker (pid {pid}) is killed by signal: {_name_signal(-exit_code)}. "
    if -exit_code == signal.SIGKILL:
        text += "Usually that is the kernel's out-of-memory killer: see dmesg. "
    return text


def _working_on(indices: object) -> str:
    if indices is None:
        return "The epoch ends here."
    return f"It was to make the batch of indices {_shorten(indices)}. The epoch ends here."


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."  # noqa: PLR2004 - two lines of a terminal


class InvalidState(ForebayError, ValueError):  # noqa: N818
    """What was given to `load_state_dict` is no loader's state."""

    @classmethod
    def about(cls, state: object, why: str) -> Self:
        """The error for `state`, which cannot be read because of `why`."""
        what = f"keys {sorted(map(str, state))}" if isinstance(state, dict) else repr(state)
        if len(what) > 200:  # noqa: PLR2004 - two lines of a terminal
            what = what[:200] + "..."
        return cls(
            f"a state with {what} cannot be read ({why}). A state must be what state_dict() of a "
            "forebay.DataLoader gave. The loader is as it was. Give such a one, or {} to begin "
            "anew."
        )


class DamagedBatch(ForebayError, RuntimeError):  # noqa: N818 - named for what it is about
    """What says how a batch is put together is not what a worker wrote.

    Attributes:
        size_bytes: Its length.
    """

    size_bytes: int

    @classmethod
    def about(cls, size_bytes: int) -> Self:
        """The error for a header of `size_bytes` whose checksum is wrong."""
        return cls(
            f"the header of a batch ({size_bytes} bytes) is damaged: its checksum is another one. "
            "Nothing of it was unpickled. Something has written to memory that is not its own, or "
            "the memory is faulty; iteration can go on with the next batch.",
            size_bytes=size_bytes,
        )


class StateMismatch(ForebayError, AssertionError):  # noqa: N818
    """A loader cannot go on from the state that it was given; as torchdata, an AssertionError.

    Attributes:
        name: What differs.
        saved: What the state has.
        given: What the loader has.
    """

    name: str
    saved: object
    given: object

    @classmethod
    def about(cls, name: str, saved: object, given: object) -> Self:
        """The error for `name`, which differs."""
        return cls(
            f"the state was taken with {name}={saved!r}, but this loader has {given!r}. Which "
            f"batches come next depends on that. Nothing was started. Make the loader with "
            f"{saved!r}{_freer(name)}, or begin anew with load_state_dict({{}}).",
            name=name,
            saved=saved,
            given=given,
        )


def _freer(name: str) -> str:
    if name != "num_workers":
        return ""
    return (
        ' (with seeding="batch" and a map-style dataset, states do not depend on num_workers; '
        "how many processes carry the workers never matters)"
    )


class StateUnavailable(ForebayError, RuntimeError):  # noqa: N818
    """A dataset's own `state_dict` failed in a worker, or no engine of ours ran."""

    @classmethod
    def about(cls, why: str) -> Self:
        """The error for a state that cannot be had because of `why`."""
        return cls(
            f"state_dict() of the dataset, or of its iterator, failed in a worker: {why}. The "
            "loader's state needs it. Iteration is not disturbed. Mend that method, or take it "
            "away: then a resumed loader passes over the batches delivered before."
        )


class NestedLoader(ForebayError, RuntimeError):  # noqa: N818
    """A loader with workers was iterated where no process may be started."""

    @classmethod
    def about(cls, name: str, num_workers: int) -> Self:
        """The error for process `name`."""
        return cls(
            f"num_workers={num_workers}, but {name} is a daemonic process (a loader's worker is "
            "one), and such a process may not start others. Nothing was started. Give the inner "
            "loader num_workers=0, or start its process with daemon=False."
        )


class IteratorClosed(ForebayError, RuntimeError):  # noqa: N818
    """`next()` was called after the loader was closed."""

    @classmethod
    def about(cls) -> Self:
        """The error; there is nothing to say but what happened."""
        return cls(
            "next() was called on an iterator whose loader was closed in the middle of an epoch. "
            "Its workers are gone, and no batch was taken. Begin a new epoch with iter(loader)."
        )


class ForeignProcess(ForebayError, RuntimeError):  # noqa: N818
    """An iterator was carried into a forked child and used there."""

    @classmethod
    def about(cls, owner_pid: int, pid: int) -> Self:
        """The error for process `pid`, which is not the iterator's."""
        return cls(
            f"this iterator belongs to process {owner_pid}, but next() was called in its child "
            f"{pid}. Workers answer only the process that started them. Nothing was taken. "
            "Iterate in the parent, or make a new iterator in the child with iter(loader)."
        )


class WorkersUnavailable(ForebayError, RuntimeError):  # noqa: N818
    """Not one worker could start, or the process that they are forked from has ended."""

    @classmethod
    def about(cls, what: str) -> Self:
        """The error for a template that did `what`."""
        return cls(
            f"the workers' template process {what}. No worker can be started without it. "
            "The epoch ends here. Look above for its own error, or use num_workers=0."
        )

    @classmethod
    def about_worker(cls, number: int, why: str, *, may_share: bool) -> Self:
        """The error for a worker that cannot be started, and whose part no other can make."""
        rule = (
            "no other worker is there that could make its batches"
            if may_share
            else "its stream is its own (an iterable dataset, or a worker_init_fn): no other "
            "worker can make its batches"
        )
        return cls(
            f"could not start worker {number} ({why}), and {rule}. The epoch ends here. Free "
            "memory or processes, ask for fewer workers, or use num_workers=0."
        )
