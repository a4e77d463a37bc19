"""Scenes: small programs of `scenes.py`, each a real main process with loaders, on a stage.

All processes of a scene are known by a word in their environment, also when their parent is
gone. Whatever a scene leaves is found, reported and ended.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, final

import psutil

GONE_WITHIN_S = 5.0
"""What the loader promises: so long after its main process nothing of it is left."""

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
WORD = "FOREBAY_SCENE"
QUIETLY = ("-W", "ignore:This DataLoader will create:UserWarning")
"""More workers than processors is the normal case on a test machine."""


@final
class Scene:
    """One main process, in a session of its own.

    Args:
        name: A function of `scenes.py`.
        place: Where the scene keeps what it notes; its temporary folder is below it.
        facts: Keyword arguments of the function.
        before: Words before the interpreter, such as `unshare`.
    """

    def __init__(
        self, name: str, place: Path, facts: dict[str, Any], before: tuple[str, ...] = ()
    ) -> None:
        self.word = uuid.uuid4().hex
        self.place = place
        self.temporary = place / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._shared_before = set(os.listdir("/dev/shm"))
        facts = {"place": str(place), **facts}
        told = json.dumps(facts)
        source = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        given = {WORD: self.word, "TMPDIR": str(self.temporary)}
        self._process = subprocess.Popen(
            [*before, sys.executable, *QUIETLY, "-m", "tests.faults.scenes", name, told],
            cwd=ROOT,
            env=os.environ | given | {"PYTHONPATH": os.pathsep.join(source)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._said = b""

    def wait_for(self, word: str) -> None:
        """Until the scene has printed this line."""
        assert self._process.stdout is not None
        until = time.monotonic() + PATIENCE_S
        while word not in self._said.decode().split("\n"):
            left = until - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0))
            read = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not read:
                self.end()
                errors = self._process.communicate()[1].decode()
                message = f"the scene never said {word!r}, but {self._said!r} and {errors!r}"
                raise AssertionError(message)
            self._said += read

    def send(self, number: signal.Signals, *, to_group: bool = False) -> None:
        """A signal to the main process, or to all of its group, as a terminal does."""
        if to_group:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def finish(self, patience_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Its exit code, and all that it and its workers wrote to stdout and stderr."""
        try:
            out, errors = self._process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.end()
            out, errors = self._process.communicate()
            message = f"the scene did not end; it said {out!r} and {errors!r}"
            raise AssertionError(message) from None
        return self._process.returncode, (self._said + out).decode(), errors.decode()

    def wait_for_main(self) -> int:
        """Its exit code; what its workers may still hold open is not waited for."""
        return self._process.wait(PATIENCE_S)

    def living(self) -> list[str]:
        """Its processes that live, main or not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(WORD) == self.word:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def check_nothing_is_left(self, ignoring: str = "^$") -> None:
        """No process, shared memory or temporary file, `GONE_WITHIN_S` after main's end."""
        until = time.monotonic() + GONE_WITHIN_S
        while left := self._find_left(ignoring):
            assert time.monotonic() < until, f"left {GONE_WITHIN_S:g} s after main: {left}"
            time.sleep(0.02)

    def _find_left(self, ignoring: str) -> list[str]:
        shared = [
            f"/dev/shm/{name}"
            for name in set(os.listdir("/dev/shm")) - self._shared_before
            if not _is_of_the_living(name)
        ]
        files = [n for n in os.listdir(self.temporary) if not re.match(ignoring, n)]
        return self.living() + shared + files

    def end(self) -> None:
        """End whatever is left of it."""
        for described in self.living():
            try:
                os.kill(int(described.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it and let go of its pipes."""
        self.end()
        self._process.communicate()


def _is_of_the_living(name: str) -> bool:
    """Whether a file in /dev/shm belongs to a process that lives: other tests run too."""
    numbers = [int(digits) for digits in re.findall(r"\d+", name)]
    return any(number < 2**31 and psutil.pid_exists(number) for number in numbers)
