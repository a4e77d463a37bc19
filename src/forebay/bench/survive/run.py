"""One contestant in a memory group of its own, from start to end.

Covers: the group, its limit, what is read from outside, how the run ended, and that nothing
of it is left. Does not cover: what happens inside (job.py), the order of runs (cli/survive.py).

    limit = what the job holds before its loader is made + what its consumer keeps + budget
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from forebay.bench.cgroup import MemoryGroup
from forebay.bench.sampler import Sampler, Trace
from forebay.bench.survive.outcome import Contestant, Outcome, Verdict
from forebay.bench.survive.workloads import MIB, WORKLOADS, Workload

SILENCE_S: Final = 40.0
"""A run that says nothing for so long has stalled. The slowest step takes a second."""

_NEVER_S: Final = 3600.0
_PRESSURE_AFTER_S: Final = 0.8
_SLACK_BYTES: Final = 16 * MIB
"""Page tables, stacks, sockets: charged to the group, and nobody's anonymous memory. Measured:
1 to 2 MiB a process."""

_HOG = "import sys, time; held = bytearray(b'x') * int(sys.argv[1]); time.sleep(float(sys.argv[2]))"


@final
class Run:
    """One run; `finish` gives its outcome."""

    def __init__(
        self, workload: Workload, budget_bytes: int, contestant: Contestant, seconds: float
    ) -> None:
        self._workload = workload
        self._budget_bytes = budget_bytes
        self._contestant = contestant
        self._seconds = seconds
        self._facts: dict[str, Any] = {}
        self._hog: subprocess.Popen[bytes] | None = None

    def finish(self, number: int) -> Outcome:
        """Run it to its end. Nothing is left, however it ends, KeyboardInterrupt too."""
        with MemoryGroup() as group:
            child = self._start(group)
            try:
                with Sampler(child.pid, group, parts_period_s=_NEVER_S) as sampler:
                    is_silent = not self._listen(child, group)
                    if is_silent or child.poll() is None:
                        group.kill()
                    errors = child.communicate()[1] or b""
                    trace = sampler.trace()
            finally:
                group.kill()
                if self._hog is not None:
                    self._hog.wait()
            oom_kills = group.read().oom_kills
        return self._judge(number, child.returncode, errors, trace, oom_kills, is_silent)

    def _start(self, group: MemoryGroup) -> subprocess.Popen[bytes]:
        given = {
            "workload": self._workload.name,
            "budget_bytes": self._budget_bytes,
            "seconds": self._seconds,
            **dataclasses.asdict(self._contestant),
        }
        command = [sys.executable, "-m", "forebay.bench.survive.job", json.dumps(given)]
        return subprocess.Popen(
            group.enter_command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _listen(self, child: subprocess.Popen[bytes], group: MemoryGroup) -> bool:
        """Take in what the job says until it ends; False when it said nothing for too long."""
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        heard = b""
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while selector.select(SILENCE_S):
                read = child.stdout.read()
                if not read:
                    return True
                *lines, heard = (heard + read).split(b"\n")
                for line in lines:
                    self._take(json.loads(line), child, group)
                if "ended" in self._facts:
                    return self._wait(child)
        return False

    @staticmethod
    def _wait(child: subprocess.Popen[bytes]) -> bool:
        try:
            child.wait(SILENCE_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _take(
        self, facts: dict[str, Any], child: subprocess.Popen[bytes], group: MemoryGroup
    ) -> None:
        self._facts.update(facts)
        if "ready" in facts:
            held = group.read().held_bytes
            kept = self._workload.keep_mib * MIB
            group.set_limit(held + kept + self._budget_bytes + _SLACK_BYTES)
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        if "taken" in facts and self._workload.pressure_mib and self._hog is None:
            since_s = time.monotonic() - self._facts["began"]
            if since_s > _PRESSURE_AFTER_S:
                self._hog = self._start_hog(group)

    def _start_hog(self, group: MemoryGroup) -> subprocess.Popen[bytes]:
        size = str(self._workload.pressure_mib * MIB)
        command = [sys.executable, "-c", _HOG, size, str(self._seconds / 3)]
        return subprocess.Popen(group.enter_command(command), stderr=subprocess.DEVNULL)

    def _judge(
        self,
        number: int,
        status: int,
        errors: bytes,
        trace: Trace,
        oom_kills: int,
        is_silent: bool,
    ) -> Outcome:
        facts = self._facts
        began_s = facts.get("ready", float("inf"))
        ended_s = facts.get("ended", float("inf"))
        held = [s.held_bytes for s in trace.samples if began_s <= s.t_s <= ended_s]
        peak = max(held, default=0) - trace.level_bytes(began_s) if held else 0
        hogged = self._workload.pressure_mib * MIB if self._hog is not None else 0
        peak -= hogged + self._workload.keep_mib * MIB
        verdict, who = judge_end(status, "ended" in facts, oom_kills)
        return Outcome(
            workload=self._workload.name,
            budget_bytes=self._budget_bytes,
            contestant=self._contestant.label,
            round=number,
            verdict=verdict,
            who=who,
            why=_last_words(errors, is_silent=is_silent) if verdict == "broken" else "",
            samples_per_s=float(facts.get("samples_per_s", 0.0)),
            peak_bytes=max(0, peak),
            kept=verdict == "survived" and peak <= self._budget_bytes,
            batches=int(facts.get("taken", 0)),
            digest=str(facts.get("digest", "")),
            oom_kills=oom_kills,
            explain=str(facts.get("explain", "")),
        )


def judge_end(status: int, has_ended: bool, oom_kills: int) -> tuple[Verdict, str]:
    """What became of a run, and who was killed. Pure."""
    if has_ended and status == 0:
        return "survived", "worker" if oom_kills else ""
    if oom_kills:
        return "killed", "main" if status in {-9, 137} else "worker"
    return "broken", ""


def _last_words(errors: bytes, *, is_silent: bool) -> str:
    if is_silent:
        return f"it said nothing for {SILENCE_S:.0f} s"
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-3:])[-600:]


def run_all(
    workloads: Sequence[str],
    budgets: Sequence[int],
    contestants: Sequence[Contestant],
    rounds: int,
    seconds: float,
    note: Callable[[Outcome, int, int], None],
) -> list[Outcome]:
    """Every contestant on every workload within every budget, in turns.

    Args:
        workloads: Names.
        budgets: Which of each workload's three budgets, by number.
        contestants: Who.
        rounds: How often.
        seconds: How long each takes batches after its first ones.
        note: Called after each run with its outcome, its number and how many there will be.
    """
    total = len(workloads) * len(budgets) * len(contestants) * rounds
    outcomes: list[Outcome] = []
    for name in workloads:
        workload = WORKLOADS[name]
        for budget in budgets:
            for number in range(rounds):
                for contestant in contestants:
                    budget_bytes = workload.budgets_mib[budget] * MIB
                    run = Run(workload, budget_bytes, contestant, seconds)
                    outcomes.append(run.finish(number))
                    note(outcomes[-1], len(outcomes), total)
    return outcomes
