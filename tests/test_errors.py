"""Each text has the value, the rule, what was done and what to do; each error has its facts."""

from __future__ import annotations

import pickle
import re
import signal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import forebay.errors
from forebay.errors import (
    BatchExceedsBudget,
    BudgetTooSmall,
    BudgetWarning,
    DamagedBatch,
    DuplicateSamplesWarning,
    Finding,
    ForebayError,
    ForeignProcess,
    HoardingWarning,
    InvalidBudget,
    InvalidBudgetType,
    InvalidMemory,
    InvalidOption,
    InvalidState,
    IteratorClosed,
    NestedLoader,
    PoisonSample,
    Stalled,
    StateMismatch,
    StateUnavailable,
    WorkerDied,
    WorkersUnavailable,
)
from forebay.units import GIB, MIB, parse_size

# The error, and of its text: the value, the rule, what was done, the remedy.
PARTS: dict[str, tuple[ForebayError, str, str, str, str]] = {
    "InvalidBudget": (
        InvalidBudget.about("4Gb", "it is no size with a unit that we know"),
        "memory_budget='4Gb'", "no size with a unit",
        "The loader was not made", 'Give bytes .*"auto"',
    ),
    "InvalidBudgetType": (
        InvalidBudgetType.about([1]),
        r"memory_budget=\[1\]", "of type list", "The loader was not made", 'Give bytes .*"auto"',
    ),
    "InvalidOption": (
        InvalidOption.about("seeding", "epoch", ("torch", "batch")),
        "seeding='epoch'", "not one of 'torch', 'batch'", "The loader was not made", "Give one",
    ),
    "InvalidMemory": (
        InvalidMemory.about("4Gb"),
        "memory='4Gb'", "names no number of bytes", "was not wrapped", 'Give bytes .*"10%"',
    ),
    "InvalidState": (
        InvalidState.about({"step": 4}, "it has no _num_yielded"),
        r"keys \['step'\]", "must be what state_dict", "The loader is as it was", "Give such a one",
    ),
    "DamagedBatch": (
        DamagedBatch.about(300),
        r"\(300 bytes\)", "its checksum is another one", "Nothing of it was unpickled",
        "can go on with the next",
    ),
    "StateMismatch": (
        StateMismatch.about("num_workers", 4, 2),
        "num_workers=4, but this loader has 2", "Which batches come next depends on that",
        "Nothing was started", "Make the loader with 4",
    ),
    "StateUnavailable": (
        StateUnavailable.about("KeyError: 'a'"),
        "failed in a worker: KeyError", "The loader's state needs it",
        "Iteration is not disturbed", "Mend that method",
    ),
    "BudgetTooSmall": (
        BudgetTooSmall.about(64 * MIB, 20 * MIB, 88 * MIB, 32),
        "memory_budget is 64 MiB.* 20 MiB and one batch 88 MiB", "must hold both",
        "No batch was delivered", "to 108 MiB or more, or lower batch_size from 32 to 16",
    ),
    "BatchExceedsBudget": (
        BatchExceedsBudget.about(1204, 812 * MIB, 512 * MIB, 500 * MIB, 64),
        "batch 1,204 needs 812 MiB.* 512 MiB and leaves 500 MiB", "must fit alone",
        "It was dropped; iteration can go on",
        "to 824 MiB or more, or lower batch_size from 64 to 39",
    ),
    "WorkerDied": (
        WorkerDied.about(4321, -signal.SIGKILL, [7, 8]),
        r"worker \(pid 4321\) is killed by signal: Killed\. ", r"indices \[7, 8\]",
        "The epoch ends here", "out-of-memory killer: see dmesg",
    ),
    "PoisonSample": (
        PoisonSample.about_batch(4321, -signal.SIGSEGV, [7, 8], 3, 90 * MIB),
        r"worker \(pid 4321\) is killed by signal: Seg.* indices \[7, 8\].* 90 MiB",
        "3 workers in a row died", "it is given up", r"go on with next\(\).*To find the cause",
    ),
    "Stalled": (
        Stalled.about(
            Finding(61.2, 7, [3], 42, "sleeping", 9 * MIB, "File x.py", ("t",), lacks_memory=False)
        ),
        r"no batch for 61 s.* Batch 7, of indices \[3\], is with worker 42, .*9 MiB",
        r"\(stall_report_s\)", "The loop goes on waiting", "Give the loader a timeout.*File x.py",
    ),
    "NestedLoader": (
        NestedLoader.about("Process-3", 4),
        "num_workers=4, but Process-3 is a daemonic", "may not start others",
        "Nothing was started", "num_workers=0, or start its process with daemon=False",
    ),
    "IteratorClosed": (
        IteratorClosed.about(),
        "whose loader was closed in the middle of an epoch", "Its workers are gone",
        "no batch was taken", r"Begin a new epoch with iter\(loader\)",
    ),
    "ForeignProcess": (
        ForeignProcess.about(100, 200),
        "belongs to process 100.* its child 200", "answer only the process that started them",
        "Nothing was taken", r"Iterate in the parent, or .* iter\(loader\)",
    ),
    "WorkersUnavailable": (
        WorkersUnavailable.about("has ended (exit code 1)"),
        r"has ended \(exit code 1\)", "No worker can be started without it",
        "The epoch ends here", "num_workers=0",
    ),
}  # fmt: skip
KINDS = [
    kind
    for kind in vars(forebay.errors).values()
    if isinstance(kind, type) and issubclass(kind, ForebayError) and kind is not ForebayError
]


@pytest.mark.parametrize(("error", "value", "rule", "done", "remedy"), PARTS.values(), ids=PARTS)
def test_a_text_has_its_four_parts(
    error: ForebayError, value: str, rule: str, done: str, remedy: str
) -> None:
    for part in (value, rule, done, remedy):
        assert re.search(part, str(error), re.DOTALL), f"{part!r} is not in: {error}"


def test_every_error_is_read_here() -> None:
    assert {kind.__name__ for kind in KINDS} == set(PARTS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_also_one_of_pythons_kinds(kind: type[ForebayError]) -> None:
    # torchdata's users catch an AssertionError where a state does not fit.
    assert issubclass(kind, (ValueError, TypeError, RuntimeError, AssertionError, UserWarning))


def test_warnings_are_the_users_affair() -> None:
    assert issubclass(HoardingWarning, UserWarning)
    assert issubclass(BudgetWarning, UserWarning)
    assert issubclass(DuplicateSamplesWarning, UserWarning)


@pytest.mark.parametrize(("error", "value", "rule", "done", "remedy"), PARTS.values(), ids=PARTS)
def test_errors_cross_process_borders_with_text_and_facts(
    error: ForebayError, value: str, rule: str, done: str, remedy: str
) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert str(type(error)(str(error))) == str(error)  # as tools build them again


def test_the_facts_are_attributes() -> None:
    small = BudgetTooSmall.about(64, 20, 88, 32)
    assert (small.budget_bytes, small.workers_bytes, small.batch_bytes) == (64, 20, 88)
    assert small.needed_bytes == 108
    large = BatchExceedsBudget.about(3, 10, 8, 7, None)
    assert (large.serial, large.batch_bytes, large.budget_bytes) == (3, 10, 8)
    assert large.available_bytes == 7
    died = WorkerDied.about(5, -9, [1])
    assert (died.pid, died.exit_code, died.indices) == (5, -9, [1])


@given(
    st.integers(MIB, 8 * GIB), st.integers(0, 8 * GIB), st.integers(1, 8 * GIB), st.integers(2, 512)
)
def test_the_smaller_batch_that_is_offered_fits(
    budget_bytes: int, workers_bytes: int, batch_bytes: int, batch_size: int
) -> None:
    text = str(BudgetTooSmall.about(budget_bytes, workers_bytes, batch_bytes, batch_size))
    offered = re.search(r"lower batch_size from \d+ to (\d+)", text)
    room_bytes = budget_bytes - workers_bytes
    if offered is not None:
        assert int(offered.group(1)) >= 1
        assert int(offered.group(1)) * batch_bytes / batch_size <= room_bytes
    else:
        assert batch_bytes / batch_size > room_bytes


@pytest.mark.parametrize("batch_size", [None, 1])
def test_no_smaller_batch_is_offered_where_there_is_none(batch_size: int | None) -> None:
    assert "batch_size" not in str(BatchExceedsBudget.about(0, 9, 8, 7, batch_size))


def offered_budget(error: Exception) -> str:
    match = re.search(r"Raise the budget to (.+?) or more", str(error))
    assert match is not None
    return match.group(1)


@pytest.mark.parametrize("needed_bytes", [int(12.34 * MIB), int(1.04 * GIB), 1020 * MIB])
def test_the_budget_that_is_offered_can_be_given_and_is_enough(needed_bytes: int) -> None:
    offered = parse_size(offered_budget(BudgetTooSmall.about(MIB, 0, needed_bytes, 1)))
    assert offered is not None
    assert offered >= needed_bytes


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (None, r"DataLoader worker \(pid\(s\) 7\) exited unexpectedly"),
        (3, r"DataLoader worker \(pid 7\) exited unexpectedly with exit code 3\. "),
        (-11, r"DataLoader worker \(pid 7\) is killed by signal: Segmentation fault"),
        (-64, r"DataLoader worker \(pid 7\) is killed by signal: "),
    ],
)
def test_a_workers_death_is_told_in_torchs_words(exit_code: int | None, sentence: str) -> None:
    assert re.match(sentence, str(WorkerDied.about(7, exit_code)))


@given(st.lists(st.integers(), max_size=3000))
def test_many_indices_are_cut(indices: list[Any]) -> None:
    assume(indices)
    assert len(str(WorkerDied.about(1, -9, indices))) < 500
