"""An arena and a lender over it, closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.transport.arena import Arena
from forebay.transport.lease import Lender
from forebay.units import MIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def lender(arena: Arena) -> Lender:
    return Lender(arena)
