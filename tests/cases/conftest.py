"""A scene of a report, run in a memory group of its own and read from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.sampler import Sampler, Trace

ROOT = Path(__file__).parents[2]
MIB = 1024**2


@dataclass(frozen=True)
class Seen:
    """What a scene told, and what was read from outside every 10 ms.

    Attributes:
        facts: Its lines, without the first and the last.
        trace: The readings.
        ready_s: When it began: before any loader under test, after what a first use loads.
        oom_kills: How often the kernel killed in its group.
    """

    facts: list[dict[str, Any]]
    trace: Trace
    ready_s: float
    oom_kills: int

    def peak_bytes(self, since_s: float | None = None) -> int:
        """The most held beyond the level at the beginning, from `since_s` on."""
        since_s = self.ready_s if since_s is None else since_s
        return self.trace.peak_bytes(since_s) - self.trace.level_bytes(self.ready_s)

    def risen_bytes(self, from_s: float, to_s: float) -> int:
        """How far what was held rose between two moments."""
        return self.trace.level_bytes(to_s) - self.trace.level_bytes(from_s)


Watch = Callable[..., Seen]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Runs a scene to its end: `watch("large", limit_mib=1024, budget="auto")`."""

    def run(scene: str, *, limit_mib: int | None = None, **arguments: Any) -> Seen:
        try:
            with MemoryGroup(limit_mib * MIB if limit_mib else None) as group:
                return run_in(group, scene, arguments)
        except GroupUnavailable as unavailable:
            if os.environ.get("CI") == "true":
                pytest.fail(f"CI has to measure this. {unavailable}")
            pytest.skip(str(unavailable))

    def run_in(group: MemoryGroup, scene: str, arguments: dict[str, Any]) -> Seen:
        out = tmp_path / f"{scene}.jsonl"
        command = [sys.executable, "-m", "tests.cases.scenes", scene, str(out)]
        path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        child = subprocess.Popen(
            group.enter_command([*command, json.dumps(arguments)]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stderr=subprocess.PIPE,
        )
        with Sampler(child.pid, group, parts_period_s=None) as sampler:
            try:
                _, errors = child.communicate(timeout=100)
            finally:
                group.kill()
        assert child.returncode == 0, errors.decode(errors="replace")
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert lines[-1].get("is_done")
        return Seen(lines[1:-1], sampler.trace(), lines[0]["t_s"], group.read().oom_kills)

    return run
