"""A whole training job fits a machine of 512 MB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.cgroup


@pytest.mark.timeout(300)
def test_mobilenet_trains_for_an_epoch_within_512_mib() -> None:
    pytest.importorskip("av", reason="the photographs are cut from clips: install forebay[demo]")
    try:
        with MemoryGroup():
            pass
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to measure this. {unavailable}")
        pytest.skip(str(unavailable))
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/small_machine.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "processes killed by the kernel: 0" in done.stdout
    assert "finished" in done.stdout
