"""A run that goes on from a state gives what the undisturbed run gave, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.flow import progress
from tests.house.source import ROOT
from tests.resume.scene import Scene, assert_resumes, resumed, undisturbed, write_jobs

SCENES = st.builds(
    Scene,
    dataset=st.sampled_from(["map", "failing", "stream", "teller", "iterator"]),
    length=st.integers(0, 40),
    batch_size=st.sampled_from([None, 1, 3, 4, 50]),
    num_workers=st.integers(1, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    has_generator=st.booleans(),
    persistent=st.booleans(),
    seeding=st.sampled_from(["torch", "batch"]),
    collates=st.booleans(),
    inits=st.booleans(),
    every=st.sampled_from([1, 2, 5]),
    before=st.integers(0, 1),
    taken=st.integers(0, 12),
)


def _is_sensible(scene: Scene) -> bool:
    is_map = scene.dataset in ("map", "failing")
    return not (is_map and scene.shuffle and scene.length == 0)  # torch refuses it


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(scene=SCENES.filter(_is_sensible))
def test_head_and_tail_with_worker_processes(scene: Scene) -> None:
    assert_resumes(scene)


@settings(max_examples=60, deadline=None)
@given(scene=SCENES.filter(_is_sensible))
def test_head_and_tail_in_the_main_process(scene: Scene) -> None:
    assert_resumes(replace(scene, num_workers=0, after=0))


@settings(max_examples=12, deadline=None)
@given(scene=SCENES.filter(_is_sensible).filter(lambda scene: scene.dataset == "map"))
def test_any_batch_can_be_resumed_from_with_another_number_of_workers(scene: Scene) -> None:
    scene = replace(scene, seeding="batch", has_generator=True, persistent=False)
    state, rest = undisturbed(scene)
    for num_workers in {0, 1, 2, 3} - {scene.num_workers}:
        assert resumed(replace(scene, num_workers=num_workers), state) == rest


@pytest.mark.parametrize("every_s", [0.0, float("inf")])
@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_streams_go_on_from_a_snapshot_or_make_again_what_came_after_it(
    monkeypatch: pytest.MonkeyPatch, every_s: float, taken: int
) -> None:
    monkeypatch.setattr(progress, "RECORD_EVERY_S", every_s)
    assert_resumes(Scene(taken=taken, persistent=True, before=1))


@pytest.mark.parametrize("dataset", ["map", "stream", "teller"])
def test_fewer_processes_may_carry_the_same_streams(dataset: str) -> None:
    scene = Scene(dataset=dataset, num_workers=3, taken=5)
    state, rest = undisturbed(scene)
    assert resumed(replace(scene, most_workers=1), state) == rest


def test_threads_go_on_with_their_own_generators() -> None:
    scene = Scene(backend="thread", dataset="owned", taken=5)
    assert_resumes(scene)


def test_a_state_of_a_resumed_run_is_as_good_as_any() -> None:
    for dataset in ("map", "stream", "teller", "iterator"):
        scene = Scene(dataset=dataset, taken=2)
        state, rest = undisturbed(scene)
        for _ in range(3):  # one batch further each time
            with scene.make() as loader:
                loader.load_state_dict(state)
                iterator = iter(loader)
                assert repr(next(iterator)) == rest[0].pop(0)
                state = loader.state_dict()
                del iterator
        assert resumed(scene, state) == rest


def test_in_a_fresh_process(tmp_path: Path) -> None:
    scenes = [
        Scene(taken=5),
        Scene(taken=3, before=1, persistent=True),
        Scene(dataset="stream", taken=4),
        Scene(dataset="teller", taken=4, persistent=True),
        Scene(num_workers=0, taken=6, after=0),
    ]
    expected = write_jobs(tmp_path / "jobs.json", scenes)
    command = [sys.executable, "-m", "tests.resume.scene", str(tmp_path / "jobs.json")]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout) == expected
