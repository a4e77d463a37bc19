"""What holds for every test: nothing is left behind.

The leak check compares before and after each test: child processes, open descriptors, threads
and mappings of shared memory. It waits, polling and bounded, until what the test started is gone.
Three things that `multiprocessing` makes once and keeps are no leaks: its fork server, its resource
tracker, and the files behind shared values (`pym-...`), which it uses again.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 10.0
POLL_S = 0.02
FAILED = pytest.StashKey[bool]()

# Their process ids and descriptors have no public name.
FORK_SERVER: Any = forkserver._forkserver
TRACKER: Any = resource_tracker._resource_tracker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loader",
        default="forebay:DataLoader",
        metavar="MODULE:CLASS",
        help="the loader class under test in tests/parity; torch.utils.data:DataLoader tests "
        "the tests themselves",
    )


@dataclass(frozen=True)
class Traces:
    """What of this process can outlive a test."""

    children: frozenset[str]
    descriptors: frozenset[str]
    threads: frozenset[str]
    mappings: frozenset[str]

    def beyond(self, before: Traces) -> str:
        """What is here and was not before; empty when nothing is."""
        return "; ".join(
            f"{name}: {', '.join(sorted(here - there))}"
            for name in ("children", "descriptors", "threads", "mappings")
            if (here := getattr(self, name)) - (there := getattr(before, name))
        )


def read_traces() -> Traces:
    return Traces(
        children=frozenset(_children()),
        descriptors=frozenset(_descriptors()),
        threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
        mappings=frozenset(_mappings()),
    )


@pytest.fixture(scope="session", autouse=True)
def collections_are_quick() -> None:
    """Leave what was imported out of every later collection: tests collect after each loader."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, descriptor, thread or mapping.

    A test that failed already is not checked: its traceback keeps its objects alive.
    """
    before = read_traces()
    yield
    if request.node.get_closest_marker("leaves_traces") or request.node.stash.get(FAILED, True):
        return
    left = wait_until_nothing(lambda: read_traces().beyond(before))
    assert not left, f"left behind {PATIENCE_S:g} s after the test: {left}"


def wait_until_nothing(look: Callable[[], str]) -> str:
    """Poll `look` until it finds nothing, or patience ends; what it found last."""
    until = time.monotonic() + PATIENCE_S
    while found := look():
        gc.collect()
        if time.monotonic() > until:
            return found
        time.sleep(POLL_S)
    return ""


def _servers() -> set[int | None]:
    """The process ids of multiprocessing's own helpers, which stay for ever."""
    return {FORK_SERVER._forkserver_pid, TRACKER._pid}


def _children() -> Iterator[str]:
    servers = _servers()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid not in servers:
                yield f"{child.pid} {' '.join(child.cmdline()) or child.name()} ({child.status()})"
        except psutil.NoSuchProcess:
            continue


def _descriptors() -> Iterator[str]:
    if not Path("/proc/self/fd").exists():
        return
    server_ends = (FORK_SERVER._forkserver_alive_fd, TRACKER._fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in server_ends:
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # the descriptor of the listing itself
                continue
            if "/pym-" not in target:
                yield f"{name} -> {target}"


def _mappings() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        shared = r"^(\S+) .*(?:/memfd:|/dev/shm/(?!pym-))"
        yield from re.findall(shared, maps.read_text(), re.MULTILINE)
