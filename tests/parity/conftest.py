"""The two classes that a parity test compares."""

from __future__ import annotations

import importlib
import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .batches import nested_strided, quantized, sparse_compressed, sparse_coo
from .harness import Job, LoaderClass, check_parity

Parity = Callable[[Job], None]


@pytest.fixture(scope="session")
def reference() -> LoaderClass:
    return torch.utils.data.DataLoader


@pytest.fixture(scope="session")
def candidate(request: pytest.FixtureRequest) -> LoaderClass:
    """The class named by --loader."""
    module, _, name = request.config.getoption("--loader").partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    return found


@pytest.fixture
def parity(reference: LoaderClass, candidate: LoaderClass) -> Parity:
    """Check that a job gives the same with both classes."""
    return lambda job: check_parity(job, reference, candidate)


@pytest.fixture(scope="session", autouse=True)
def quick_fork_server() -> None:
    """Let the fork server import torch once, instead of every worker of the reference."""
    multiprocessing.set_forkserver_preload(["torch", "numpy"])


@pytest.fixture(scope="session", autouse=True)
def notices_of_torch_are_over() -> None:
    """torch says once in a process that some kinds of tensors are new or old: say it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in (nested_strided, quantized, sparse_compressed, sparse_coo):
            make(1)
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,))
