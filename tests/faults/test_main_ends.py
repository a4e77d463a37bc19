"""However main ends, nothing of the loader outlives it for long."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from .conftest import Play
from .datasets import count_lines

pytestmark = pytest.mark.timeout(150)

MULTIPROCESSINGS_OWN = r"pymp-"
"""The folder of its fork server's socket, which only an orderly end of main takes away."""


@pytest.mark.parametrize(
    ("way", "method"),
    [
        ("SIGKILL", "fork"),
        ("SIGTERM", "fork"),
        ("SIGKILL to the group", "fork"),
        ("SIGTERM to the group", "fork"),
        ("os._exit", "fork"),
        ("SIGKILL", "forkserver"),
        ("SIGTERM to the group", "forkserver"),
        ("SIGKILL", "spawn"),
    ],
)
def test_nothing_outlives_a_main_that_is_ended_in_the_middle(
    play: Play, way: str, method: str
) -> None:
    scene = play("busy", method=method, ends_itself=way == "os._exit")
    scene.wait_for("asleep")
    if way != "os._exit":
        number, *group = way.split(maxsplit=1)
        scene.send(signal.Signals[number], to_group=bool(group))
    code = scene.wait_for_main()
    assert code == (7 if way == "os._exit" else -signal.Signals[way.split(maxsplit=1)[0]])
    scene.check_nothing_is_left(ignoring=MULTIPROCESSINGS_OWN)


def test_nothing_outlives_a_main_that_is_killed_while_the_dataset_is_unpickled(
    play: Play,
) -> None:
    scene = play("unpickling")
    scene.wait_for("asleep")
    scene.send(signal.SIGKILL)
    scene.wait_for_main()
    scene.check_nothing_is_left(ignoring=MULTIPROCESSINGS_OWN)


@pytest.mark.parametrize("in_next", [True, False], ids=["in next", "in the loop body"])
def test_ctrl_c_reaches_main_and_workers_are_silent(play: Play, in_next: bool) -> None:
    scene = play("interrupted", in_next=in_next)
    scene.wait_for("asleep")
    scene.send(signal.SIGINT, to_group=True)
    code, out, errors = scene.finish()
    assert out.split() == ["asleep", "interrupted"]
    assert (code, errors) == (0, "")
    scene.check_nothing_is_left()


def test_ctrl_c_that_nobody_catches_shows_only_mains_traceback(play: Play) -> None:
    scene = play("uncaught", method="forkserver")
    scene.wait_for("asleep")
    scene.send(signal.SIGINT, to_group=True)
    code, _, errors = scene.finish()
    assert code == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    scene.check_nothing_is_left()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ctrl_c_before_workers_are_there_is_silent_and_quick(play: Play, method: str) -> None:
    scene = play("interrupted_at_start", method=method)
    scene.wait_for("started")
    scene.send(signal.SIGINT, to_group=True)
    code, out, errors = scene.finish()
    assert out.split() == ["started", "interrupted"]
    assert (code, errors) == (0, "")
    scene.check_nothing_is_left()


@pytest.mark.parametrize(
    ("ending", "method"),
    [
        ("falls off the end", "fork"),
        ("sys.exit", "fork"),
        ("an error", "fork"),
        ("falls off the end", "forkserver"),
    ],
)
def test_the_interpreter_exits_in_order_with_batches_and_iterators_alive(
    play: Play, tmp_path: Path, ending: str, method: str
) -> None:
    scene = play("alive_at_exit", method=method, ending=ending)
    code, out, errors = scene.finish()
    assert out.split() == ["ready"]
    assert code == {"falls off the end": 0, "sys.exit": 4, "an error": 1}[ending]
    if ending == "an error":
        assert re.fullmatch(r"Traceback .*\n(  .*\n)*ValueError: of the training code\n", errors)
    else:
        assert errors == ""
    assert count_lines(tmp_path / "exits") == 6, "once for each of two workers of three iterators"
    scene.check_nothing_is_left()


def test_a_script_that_ends_with_an_iterator_in_a_variable_is_silent(play: Play) -> None:
    scene = play("held_by_a_script")
    code, out, errors = scene.finish()
    assert (code, out) == (0, "0\n")
    scene.check_nothing_is_left()
    assert errors == ""


def test_the_interpreter_exits_while_a_daemon_thread_waits_in_next(play: Play) -> None:
    scene = play("daemon_thread_waits")
    scene.wait_for("asleep")
    code, _, errors = scene.finish(patience_s=10)
    assert (code, errors) == (0, "")
    scene.check_nothing_is_left()


def test_a_forked_child_that_exits_leaves_the_parents_iterator_alone(play: Play) -> None:
    scene = play("forked_child_exits")
    code, out, errors = scene.finish()
    assert (code, out.split(), errors) == (0, ["whole"], "")
    scene.check_nothing_is_left()
