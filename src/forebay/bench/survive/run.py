"""One contestant in a memory group of its own, from start to end.

Covers: the group, its limit, what is read from outside, how the run ended, and that nothing
of it is left. Does not cover: what happens inside (job.py), the order of runs (cli/survive.py).

    limit = what the job holds before its loader is made + what its consumer keeps + budget
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final, final

from forebay.bench.sampler import Sampler, Trace
from forebay.bench.survive.nest import Nest, open_nest, start_neighbour
from forebay.bench.survive.outcome import Contestant, Outcome, Verdict
from forebay.bench.survive.workloads import MIB, WORKLOADS, Workload

SILENCE_S: Final = 40.0
"""A run that says nothing for so long has stalled. The slowest step takes a second."""

_PRESSURE_AFTER_S: Final = 0.8
_IN_FILE: Final = re.compile(r'File "[^"]*/([^/"]+)"')
_USUAL_PREFETCH: Final = 2  # torch's
_SLACK_BYTES: Final = 16 * MIB
"""Page tables, stacks, sockets: charged to the group, and nobody's anonymous memory. Measured:
1 to 2 MiB a process."""


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
        self._kept: list[tuple[float, int]] = []
        self._neighbour: subprocess.Popen[bytes] | None = None

    def finish(self, number: int) -> Outcome:
        """Run it to its end. Nothing is left, however it ends, KeyboardInterrupt too."""
        with open_nest() as nest, _scratch() as (folder, errors):
            child = self._start(nest, folder, errors)
            try:
                with Sampler(child.pid, nest.job, parts_period_s=None) as sampler:
                    is_silent = not self._listen(child, nest)
                    trace = sampler.trace()
            finally:
                self._end_all(child, nest)
            kills = nest.job.read().oom_kills, nest.beside.read().oom_kills
            errors.seek(0)
            words = _last_words(errors.read(), is_silent=is_silent)
        return self._judge(number, child.returncode, words, trace, kills)

    def _end_all(self, child: subprocess.Popen[bytes], nest: Nest) -> None:
        nest.job.kill()
        nest.beside.kill()
        for process in (child, self._neighbour):
            if process is not None:
                process.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _start(self, nest: Nest, folder: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        given = {
            "workload": self._workload.name,
            "budget_bytes": self._budget_bytes,
            "seconds": self._seconds,
            **dataclasses.asdict(self._contestant),
        }
        command = [sys.executable, "-m", "forebay.bench.survive.job", json.dumps(given)]
        return subprocess.Popen(
            nest.job.enter_command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )

    def _listen(self, child: subprocess.Popen[bytes], nest: Nest) -> bool:
        """Take in what the job says until it ends; False when it said nothing for too long.

        Its end is noticed by its exit, not by end-of-file: workers that outlive a killed main
        process hold the pipe open too.
        """
        assert child.stdout is not None
        heard, fd = b"", os.pidfd_open(child.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                selector.register(fd, selectors.EVENT_READ)
                while ready := {key.fd for key, _ in selector.select(SILENCE_S)}:
                    text = b""
                    if child.stdout.fileno() in ready:
                        text = os.read(child.stdout.fileno(), 1 << 16)
                    *lines, heard = (heard + text).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line), child, nest)
                    if not text:
                        return self._wait(child)
        finally:
            os.close(fd)
        return False

    @staticmethod
    def _wait(child: subprocess.Popen[bytes]) -> bool:
        try:
            child.wait(SILENCE_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _take(self, facts: dict[str, Any], child: subprocess.Popen[bytes], nest: Nest) -> None:
        if "kept" in facts:
            at_s, kept_bytes = facts.pop("kept")
            self._kept.append((at_s, kept_bytes))
        self._facts.update(facts)
        if "ready" in facts:
            held = nest.job.read().held_bytes
            kept = self._workload.keep_mib * MIB
            nest.around.set_limit(held + kept + self._budget_bytes + _SLACK_BYTES)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone: its status will tell
                child.stdin.write(b"go\n")
                child.stdin.flush()
        if "taken" in facts and self._workload.pressure_mib and self._neighbour is None:
            since_s = time.monotonic() - self._facts["began"]
            if since_s > _PRESSURE_AFTER_S:
                size_bytes = self._workload.pressure_mib * MIB
                self._neighbour = start_neighbour(nest, size_bytes, self._seconds / 3)

    def _judge(
        self,
        number: int,
        status: int,
        words: str,
        trace: Trace,
        kills: tuple[int, int],
    ) -> Outcome:
        facts = self._facts
        ready_s = facts.get("ready", float("inf"))
        ended_s = facts.get("ended", float("inf"))
        peak = find_peak(trace, ready_s, ended_s, self._kept)
        verdict, who = judge_end(status, "ended" in facts, *kills)
        return Outcome(
            workload=self._workload.name,
            budget_bytes=self._budget_bytes,
            contestant=self._contestant.label,
            round=number,
            verdict=verdict,
            who=who,
            why=words if verdict == "broken" else "",
            samples_per_s=float(facts.get("samples_per_s", 0.0)),
            peak_bytes=peak,
            kept=verdict == "survived" and peak <= self._budget_bytes,
            batches=int(facts.get("taken", 0)),
            digest=str(facts.get("digest", "")),
            oom_kills=sum(kills),
            explain=str(facts.get("explain", "")),
        )


@contextlib.contextmanager
def _scratch() -> Iterator[tuple[str, IO[bytes]]]:
    """A folder for the job's files, which a killed job cannot remove, and one for its errors."""
    prefix = "forebay-survive-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, tempfile.TemporaryFile() as errors:
        yield folder, errors


def find_peak(
    trace: Trace, since_s: float, until_s: float, kept: Sequence[tuple[float, int]]
) -> int:
    """The most that was held beyond the level at `since_s` and what the consumer kept. Pure.

    Args:
        trace: From outside.
        since_s: Just before the loader was made.
        until_s: After the last batch.
        kept: When the consumer kept so many bytes, in the order of time.
    """
    times = [at_s for at_s, _ in kept]

    def kept_bytes(at_s: float) -> int:
        number = bisect.bisect_right(times, at_s)
        return kept[number - 1][1] if number else 0

    level_bytes = trace.level_bytes(since_s)
    beyond = (
        s.held_bytes - level_bytes - kept_bytes(s.t_s) for s in trace.between(since_s, until_s)
    )
    return max(0, max(beyond, default=0))


def judge_end(
    status: int, has_ended: bool, oom_kills: int, neighbours_killed: int = 0
) -> tuple[Verdict, str]:
    """What became of a run, and who was killed. Pure."""
    if neighbours_killed:
        return "killed", "neighbour"
    if has_ended and status == 0:
        return "survived", "worker" if oom_kills else ""
    if oom_kills:
        return "killed", "main" if status in {-9, 137} else "worker"
    return "broken", ""


def _last_words(errors: bytes, *, is_silent: bool) -> str:
    if is_silent:
        return f"it said nothing for {SILENCE_S:.0f} s"
    return find_last_words(errors.decode(errors="replace"))


def find_last_words(text: str) -> str:
    """What the job said of its end, without the paths of the machine that it ran on. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(_IN_FILE.sub(r'File "\1"', line) for line in lines[-3:])[-600:]


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
    planned = [
        (workload, workload.budgets_mib[budget] * MIB, contestant, number)
        for workload in (WORKLOADS[name] for name in workloads)
        for budget in budgets
        for number in range(rounds)
        for contestant in contestants
        if not is_twice(contestant, workload)
    ]
    outcomes: list[Outcome] = []
    for workload, budget_bytes, contestant, number in planned:
        run = Run(workload, budget_bytes, contestant, seconds)
        outcomes.append(run.finish(number))
        note(outcomes[-1], len(outcomes), len(planned))
    return outcomes


def is_twice(contestant: Contestant, workload: Workload) -> bool:
    """Whether a setting of the grid is what torch as it comes already is. Pure."""
    usual = (workload.workers, _USUAL_PREFETCH)
    return contestant.role == "grid" and usual == (
        contestant.num_workers,
        contestant.prefetch_factor,
    )
