"""What every test of faults needs."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from .stage import Scene


@pytest.fixture(scope="session", autouse=True)
def fork_server_is_quick() -> None:
    """The fork server imports torch once, not each process that it forks; if it runs not yet."""
    multiprocessing.set_forkserver_preload(["torch", "forebay.workers.zygote"])


class Play(Protocol):
    """Starts a scene."""

    def __call__(self, name: str, before: tuple[str, ...] = (), **facts: Any) -> Scene: ...


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: the fork server's socket lies in it (107 bytes at most)."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        yield Path(name)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Start scenes of `scenes.py`; what is left of them afterwards is ended."""
    scenes: list[Scene] = []

    def start(name: str, before: tuple[str, ...] = (), **facts: Any) -> Scene:
        scenes.append(Scene(name, tmp_path, facts, before))
        return scenes[-1]

    yield start
    for scene in scenes:
        scene.close()
