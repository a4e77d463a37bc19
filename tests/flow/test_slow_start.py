"""Whether the first fetch runs alone, as pure arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.flow.admission import Admission
from forebay.flow.slow_start import SlowStart
from forebay.units import GIB, MIB


def make(free_bytes: int, *, seen: int = 0, grown_bytes: int = 0, streams: int = 4) -> SlowStart:
    ledger = SimpleNamespace(
        free_bytes=free_bytes,
        workers_bytes=40 * MIB + grown_bytes,
        workers_least_bytes=40 * MIB,
    )
    admission: Any = SimpleNamespace(ledger=ledger, sizes=SimpleNamespace(seen=seen))
    return SlowStart(cast("Admission", admission), streams)


@pytest.mark.parametrize(
    ("free_bytes", "seen", "is_on"),
    [
        (100 * MIB, 0, True),
        (4 * GIB - 1, 0, True),
        (4 * GIB, 0, False),  # a GiB for each: hardly any first batch takes that
        (100 * MIB, 1, False),
    ],
)
def test_the_first_runs_alone_until_it_landed_where_memory_is_not_ample(
    free_bytes: int, seen: int, is_on: bool
) -> None:
    assert make(free_bytes, seen=seen).is_on is is_on


def test_it_ends_for_good() -> None:
    start = make(100 * MIB)
    start.end()
    assert not start.is_on
    assert not start.is_cheap


@pytest.mark.parametrize(
    ("grown_bytes", "is_cheap"), [(0, True), (8 * MIB, True), (9 * MIB, False)]
)
def test_a_long_first_fetch_that_takes_little_lets_the_others_begin(
    grown_bytes: int, is_cheap: bool
) -> None:
    assert make(256 * MIB, grown_bytes=grown_bytes).is_cheap is is_cheap
