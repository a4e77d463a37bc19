"""Looks and readings come when they are due, decisions act, and nothing read is no disaster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from forebay.flow.clock import LOOK_S, READING_LEAST_S, READING_SHARE, Pace
from forebay.flow.controller import Controller
from forebay.memory.budget import Budget
from forebay.memory.probe import CpuUse
from forebay.memory.readings import FootprintReading, HostReading, Pressure, RlimitReading
from forebay.units import GIB, MIB
from forebay.workers.messages import Keep
from tests.flow.stand_ins import Batch, Rig

USUAL = Batch(256 * 1024, 0)


class History:
    """A probe that reads what the test wrote down, moment after moment."""

    def __init__(self) -> None:
        self.host_free = 8 * GIB
        self.private = {1000: 8 * MIB, 1001: 8 * MIB}
        self.pressure: Pressure | None = None
        self.group_bytes: int | None = None
        self.cpu: dict[int, CpuUse] = {}
        self.is_closed = False
        self.footprints = 0
        self.looks = 0

    def read_tree(self, roots: Iterable[int]) -> tuple[int, ...]:
        return (*roots, *self.private)

    def read_footprint(self, main_pid: int, roots: Iterable[int]) -> FootprintReading:
        self.footprints += 1
        if self.is_closed:
            return FootprintReading(0, 0, (), False)
        by_pid = ((999, 4 * MIB), *self.private.items())
        return FootprintReading(sum(size for _, size in by_pid), 0, by_pid, True)

    def read_limited_groups(self) -> tuple[Any, ...]:
        self.looks += 1
        return ()

    def read_own_group(self, pids: Iterable[int]) -> int | None:
        return self.group_bytes

    def read_cpu(self, pids: Iterable[int]) -> dict[int, CpuUse | None]:
        return {pid: self.cpu.get(pid) for pid in pids}

    def read_affinity(self) -> int:
        return 2

    def read_cpu_groups(self) -> tuple[Any, ...]:
        return ()

    def read_host(self) -> HostReading:
        return HostReading(16 * GIB, self.host_free)

    def read_rlimits(self) -> RlimitReading:
        return RlimitReading(None, None, None)

    def read_statm(self, pid: int | str = "self") -> None:
        return None

    def read_pressure(self) -> Pressure | None:
        return self.pressure


class Scene:
    """A rig, a history, and a clock that the test moves."""

    def __init__(self, budget: int | str, num_streams: int = 2) -> None:
        self.rig = Rig(
            [USUAL] * 60,
            num_streams=num_streams,
            budget_bytes=GIB,
            may_move=True,
            may_merge=True,
        )
        self.budget = Budget(budget)
        self.history = History()
        self.rig.ledger.seat = self.budget.sit(0)
        self.controller = Controller(
            self.rig.scheduler,
            self.budget,
            self.history,  # type: ignore[arg-type]
            1,
            lambda: [999],
        )
        self.now_s = 100.0

    def warm_up(self) -> None:
        for _ in range(12):
            self.rig.take_now()
        self.wait(2.0)

    def wait(self, seconds: float, *, away_s: float = 0.0, is_waiting: bool = False) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += 0.05
            self.controller.look(self.now_s, is_waiting=is_waiting, away_s=away_s)


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*given: Any, **more: Any) -> Scene:
        made.append(Scene(*given, **more))
        return made[-1]

    yield make
    for each in made:
        each.rig.close()


def test_looks_and_readings_keep_their_distance(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    looks, readings = made.history.looks, made.history.footprints
    made.wait(4.0)
    assert 4.0 / LOOK_S * 0.5 <= made.history.looks - looks <= 4.0 / LOOK_S + 1
    assert 1 <= made.history.footprints - readings <= 4.0 / READING_LEAST_S + 1


def test_an_automatic_budget_follows_what_is_free_down_and_up(scene: Callable[..., Scene]) -> None:
    made = scene("auto")
    made.warm_up()
    before = made.budget.size_bytes
    made.history.host_free = 200 * MIB
    made.wait(2 * LOOK_S)
    assert made.budget.size_bytes <= 0.8 * (200 * MIB + made.rig.ledger.seat.measured_bytes)
    made.history.host_free = 8 * GIB
    made.wait(2 * LOOK_S)
    assert made.budget.size_bytes > 0.9 * before


def test_a_given_budget_stays_what_it_is_while_the_machine_has_it(
    scene: Callable[..., Scene],
) -> None:
    made = scene("512MiB")
    made.warm_up()
    made.history.host_free = 4 * GIB
    made.wait(1.0)
    assert made.budget.size_bytes == 512 * MIB


def test_a_worker_that_readings_show_to_have_grown_is_replaced(scene: Callable[..., Scene]) -> None:
    made = scene("100MiB")
    made.warm_up()
    for size_mib in (20, 40, 60, 80, 80, 80, 80):
        made.history.private[1000] = size_mib * MIB
        made.wait(0.5)
    assert made.rig.crew.spares
    assert "Recycle" in {act for event in made.controller.events for act in event.acts}
    assert any("exist" in event.because for event in made.controller.events)


def test_heaps_are_trimmed_while_memory_is_short_and_kept_again_after(
    scene: Callable[..., Scene],
) -> None:
    made = scene("100MiB")
    made.warm_up()
    made.history.pressure = Pressure(0.5, "cgroup /job")
    made.wait(1.5)
    assert str(made.controller.stance) == "shrink"
    assert {message for _, message in made.rig.crew.told} == {Keep(0)}
    made.history.pressure = None
    made.wait(2.5)
    assert str(made.controller.stance) == "grow"
    assert made.rig.crew.told[-1][1] == Keep(made.rig.scheduler.settings.keep_bytes)


def test_the_hosts_pressure_is_not_ours_below_a_groups_limit(scene: Callable[..., Scene]) -> None:
    made = scene("100MiB")
    made.warm_up()
    made.budget._is_bound_by_host = False
    made.budget.follow = lambda room: None  # type: ignore[method-assign]
    made.history.pressure = Pressure(0.5, "host")
    made.wait(2.5)
    assert str(made.controller.stance) == "grow"


def test_fetches_beyond_the_processors_are_taken_back(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB", num_streams=4)
    made.warm_up()
    for second in range(1, 6):
        made.history.cpu = {1000 + n: CpuUse(0.5 * second, 0.5 * second) for n in range(4)}
        made.wait(1.0)
    assert made.rig.scheduler.roster.tokens == 2


def test_events_tell_changes_only(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    before = len(made.controller.events)
    made.wait(5.0)
    assert len(made.controller.events) == before
    made.history.pressure = Pressure(0.5, "cgroup /job")
    made.wait(1.5)
    event = made.controller.events[-1]
    assert event.stance == "shrink"
    assert "10 s" in event.because


def test_nothing_read_changes_nothing(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    before = made.rig.ledger.workers_bytes
    made.history.is_closed = True
    made.wait(3.0)
    assert made.rig.ledger.workers_bytes == before
    assert str(made.controller.stance) == "grow"


def test_a_process_that_is_gone_when_it_is_read_does_no_harm(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    del made.history.private[1001]
    made.wait(3.0)
    assert str(made.controller.stance) == "grow"


def test_a_clock_that_jumps_back_delays_a_look_and_no_more(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    made.now_s -= 50.0
    made.wait(1.0)
    made.now_s += 100.0
    looks = made.history.looks
    made.wait(1.0)
    assert made.history.looks > looks


def test_the_position_adds_up(scene: Callable[..., Scene]) -> None:
    made = scene("1GiB")
    made.warm_up()
    position = made.controller._take_position(made.now_s, is_waiting=True)
    read = made.controller.workers_bytes + made.rig.arena.read_resident_bytes()
    assert position.measured_bytes == position.accounted_bytes + position.unaccounted_bytes
    assert abs(position.measured_bytes - read) <= 2 * MIB
    assert dataclasses.asdict(position)["budget_bytes"] == GIB


def test_reading_costs_its_share_and_more_only_while_something_grows() -> None:
    pace = Pace()
    assert pace.is_due(0.0)
    pace.note(10.0, 0.05)
    assert not pace.is_due(10.0 + 0.99 * READING_SHARE * 0.05)
    assert pace.is_due(10.0 + 1.01 * READING_SHARE * 0.05)
    assert not pace.is_due(10.4, is_urgent=True)
    assert pace.is_due(10.6, is_urgent=True)
