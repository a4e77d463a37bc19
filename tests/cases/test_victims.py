"""If the kernel must kill for memory, it kills a worker, and the run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import forebay
from tests.cases.conftest import Watch


@pytest.mark.cgroup
def test_the_kernel_takes_the_worker_and_every_batch_comes(watch: Watch, tmp_path: Path) -> None:
    """The scene checks each batch. The training process is larger than the worker at its start."""
    seen = watch("victims", limit_mib=800, place=str(tmp_path / "grown"), main_mib=350)
    (told,) = seen.facts
    assert seen.oom_kills >= 1
    assert told["restarts"] == seen.oom_kills
    assert any("SIGKILL, at batch 30" in reason for reason in told["reasons"])
    assert any("for lack of memory" in reason for reason in told["reasons"])
    assert told["tokens"] == 1


class Scores(Dataset[torch.Tensor]):
    """What the kernel adds to the badness of this process, and of its parent."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:

        pids = (os.getpid(), os.getppid())
        return torch.tensor([read_score(pid) for pid in pids])


def read_score(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii"))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_come_first_then_their_template_then_the_training_process(method: str) -> None:
    options: dict[str, Any] = {"multiprocessing_context": method, "num_workers": 2}
    with forebay.DataLoader(Scores(), batch_size=None, **options) as loader:
        for worker, template in loader:
            assert worker == 1000
            assert read_score("self") < template < worker
