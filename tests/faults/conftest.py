"""What every test of faults needs."""

from __future__ import annotations

import multiprocessing

import pytest


@pytest.fixture(scope="session", autouse=True)
def fork_server_is_quick() -> None:
    """The fork server imports torch once, not each process that it forks; if it runs not yet."""
    multiprocessing.set_forkserver_preload(["torch", "forebay.workers.zygote"])
