"""The short form of tests/chaos/run.py: every job once, some kills in each epoch."""

from __future__ import annotations

import pytest

from tests.chaos.jobs import JOBS
from tests.chaos.run import EPOCHS_A_RUN, Tally, run


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::forebay.ReplayWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_batch_is_torchs_whoever_is_killed(method: str) -> None:
    epochs = EPOCHS_A_RUN * len(JOBS)
    tally: Tally = run(2 * epochs, epochs, seed=len(method), methods=[method], shows=False)
    assert tally.wrong == []
    assert tally.left == []
    assert tally.epochs == epochs
    assert tally.restarts >= tally.kills // 2
