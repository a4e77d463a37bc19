"""Too few descriptors, addresses, processes, shared memory or disk: it goes on or says so."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay.units import MIB

from .conftest import Play
from .datasets import Numbered

pytestmark = pytest.mark.timeout(120)

IN_A_SMALL_WORLD = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size={} tmpfs {} && exec "$@"',
)


def small(place: str, size: str) -> tuple[str, ...]:
    """Words before a command for which `place` is a file system of that size."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root may mount")
    before = (*IN_A_SMALL_WORLD[:-1], IN_A_SMALL_WORLD[-1].format(size, place), "sh")
    if subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    return before


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_bytes", [1000, 100_000], ids=["small", "large"])
def test_a_consumer_may_keep_more_batches_than_it_may_open_files(
    play: Play, sample_bytes: int
) -> None:
    scene = play(
        "limited", limit="NOFILE", above_now=24, length=400, sample_bytes=sample_bytes, keeps=True
    )
    code, out, errors = scene.finish()
    assert (code, out, errors) == (0, "200 batches\n", "")
    scene.check_nothing_is_left()


def test_two_thousand_batches_are_kept_under_256_open_files(play: Play) -> None:
    """Neither a batch nor a tensor of it costs a descriptor, as a file of /dev/shm would."""
    above_now = 256 - len(os.listdir("/proc/self/fd"))
    scene = play(
        "limited",
        limit="NOFILE",
        above_now=above_now,
        length=4000,
        sample_bytes=20_000,
        keeps=True,
    )
    assert scene.finish() == (0, "2000 batches\n", "")
    scene.check_nothing_is_left()


def test_too_few_descriptors_for_one_worker_are_told_and_nothing_is_left(play: Play) -> None:
    scene = play(
        "limited", limit="NOFILE", above_now=4, length=24, sample_bytes=100_000, num_workers=16
    )
    code, out, _ = scene.finish()
    assert code == 0
    assert "Too many open files" in out
    scene.check_nothing_is_left()


@pytest.mark.parametrize("above_now", [14, 18, 30])
def test_a_loader_goes_on_with_the_workers_that_descriptors_allow(
    play: Play, above_now: int
) -> None:
    scene = play(
        "limited",
        limit="NOFILE",
        above_now=above_now,
        length=200,
        sample_bytes=100_000,
        num_workers=16,
        keeps=True,
        warns=True,
    )
    code, out, errors = scene.finish()
    assert (code, out) == (0, "100 batches\n")
    assert errors.count("ScarcityWarning") == 1
    assert "of 16 workers run" in errors
    scene.check_nothing_is_left()


@pytest.mark.parametrize("kills", [False, True])
def test_files_that_run_out_in_the_middle_of_an_epoch_cost_no_batch(
    play: Play, kills: bool
) -> None:
    scene = play("no_more_files", kills=kills)
    code, out, errors = scene.finish()
    assert (code, out) == (0, "100 batches\n")
    assert ("was killed by SIGKILL" in errors) is kills
    scene.check_nothing_is_left()


@pytest.mark.parametrize(
    ("kind", "batches"), [("pieces", 13), ("batches", 2000)], ids=["tiny tensors", "batches"]
)
def test_neither_tensors_nor_batches_cost_mappings(play: Play, kind: str, batches: int) -> None:
    """`max_map_count` is 65,530: torch's loader needs one for each tensor that is kept."""
    scene = play("many_mappings", kind=kind)
    code, out, errors = scene.finish()
    assert (code, errors) == (0, "")
    said = re.fullmatch(r"(\d+) batches, at most (\d+) at once, (-?\d+) in all\n", out)
    assert said is not None, out
    assert int(said[1]) == batches
    assert int(said[2]) <= 2
    assert int(said[3]) <= 20, "the heap's own"
    scene.check_nothing_is_left()


# -- addresses and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["200MiB", None], ids=["a size", "auto"])
def test_an_epoch_fits_into_a_limited_address_space(play: Play, budget: str | None) -> None:
    scene = play(
        "limited",
        limit="AS",
        above_now=600 * MIB,
        length=40,
        sample_bytes=8 * MIB,
        memory_budget=budget,
    )
    code, out, errors = scene.finish()
    assert (code, out, errors) == (0, "20 batches\n", "")
    scene.check_nothing_is_left()


def refuse_forks(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Processes below this one may fork so often; then the kernel has no memory for more."""
    fork, main, done = os.fork, os.getpid(), []

    def refusing() -> int:
        if os.getpid() != main:
            done.append(0)
            if len(done) > after:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return fork()

    monkeypatch.setattr(os, "fork", refusing)


def make_loader(**options: Any) -> Any:
    return forebay.DataLoader(
        Numbered(24, 100_000), batch_size=2, num_workers=3, timeout=3, **options
    )


def test_that_no_worker_can_be_forked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_forks(monkeypatch, after=0)
    with make_loader() as loader, pytest.raises(forebay.WorkersUnavailable) as told:
        list(loader)
    assert "could not start worker" in str(told.value)
    assert "Cannot allocate memory" in str(told.value)
    monkeypatch.undo()
    assert len(list(loader)) == 12
    loader.close()


class Noisy(Dataset[Any]):
    """Draws from a generator that runs on from batch to batch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return index, torch.rand(3)


def make_noise(**options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(5)
    with forebay.DataLoader(Noisy(), 2, shuffle=True, num_workers=4, **options) as loader:
        return list(loader), loader.stats()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_loader_goes_on_with_the_workers_that_memory_allows(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, _ = make_noise()
    refuse_forks(monkeypatch, after=after)
    with pytest.warns(forebay.ScarcityWarning, match="Cannot allocate memory") as said:
        ours, stats = make_noise()
    assert sum(each.category is forebay.ScarcityWarning for each in said) == 1
    assert sum("could not be started" in why for why in stats.restart_reasons) == 4 - after
    assert len(ours) == len(whole)
    for one, other in zip(ours, whole):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore::forebay.ScarcityWarning")
def test_who_cannot_be_forked_anew_is_stood_for_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is killed when there is no memory for a fifth."""
    whole, _ = make_noise()
    refuse_forks(monkeypatch, after=4)
    torch.manual_seed(5)
    ours: list[Any] = []
    with forebay.DataLoader(Noisy(), 2, shuffle=True, num_workers=4) as loader:
        iterator: Any = iter(loader)
        for batch in iterator:
            ours.append(batch)
            if len(ours) in (5, 11):
                there = [each.pid for each in iterator._workers if each.pid is not None]
                os.kill(there[1], signal.SIGKILL)
        reasons = loader.stats().restart_reasons
    assert [why for why in reasons if "Cannot allocate memory" in why]
    for one, other in zip(ours, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Refusing(Numbered):
    """Once unpickled, in a template, only so many processes can be forked there."""

    def __init__(self, after: int) -> None:
        super().__init__(24, 100_000)
        self.after = after

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        fork, done = os.fork, []

        def refusing() -> int:
            done.append(0)
            if len(done) > self.after:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return fork()

        os.fork = refusing


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("after", [1, 0])
def test_a_template_of_its_own_that_cannot_fork_is_no_other_matter(method: str, after: int) -> None:
    with forebay.DataLoader(
        Refusing(after), 2, num_workers=3, timeout=30, multiprocessing_context=method
    ) as loader:
        if after:
            with pytest.warns(forebay.ScarcityWarning, match="Cannot allocate memory"):
                batches = list(loader)
            assert [int(batch[0, 0]) for batch in batches] == list(range(0, 24, 2))
        else:
            with pytest.raises(forebay.WorkersUnavailable, match="Cannot allocate memory"):
                list(loader)


def test_a_stream_of_its_own_that_nobody_can_make_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_forks(monkeypatch, after=1)
    with (
        make_loader(worker_init_fn=print) as loader,
        pytest.raises(forebay.WorkersUnavailable, match="worker_init_fn"),
    ):
        list(loader)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *, names: str, after: int = 0) -> None:
    """Of threads with such names only so many can be started."""
    start, done = threading.Thread.start, []

    def refusing(self: threading.Thread) -> None:
        if self.name.startswith(names):
            done.append(0)
            if len(done) > after:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)


@pytest.mark.parametrize("after", [1, 3])
def test_a_loader_goes_on_with_the_threads_that_there_are(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    refuse_threads(monkeypatch, names="forebay-worker", after=after)
    numbered = Numbered(24, 100_000)
    with forebay.DataLoader(numbered, 2, num_workers=4, worker_backend="thread") as loader:
        with pytest.warns(forebay.ScarcityWarning, match="can't start new thread") as said:
            batches = list(loader)
        assert [int(batch[0, 0]) for batch in batches] == list(range(0, 24, 2))
        assert sum(each.category is forebay.ScarcityWarning for each in said) == 1
        monkeypatch.undo()
        assert len(list(loader)) == 12, "and with all of them in the next epoch"


def test_that_no_thread_can_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, names="forebay-worker")
    with (
        make_loader(worker_backend="thread") as loader,
        pytest.raises(forebay.WorkersUnavailable, match="can't start new thread"),
    ):
        list(loader)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_loader_without_a_clock_delivers_every_batch(
    monkeypatch: pytest.MonkeyPatch, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_threads(monkeypatch, names="forebay-clock")
    with make_loader(worker_backend=backend) as loader:
        assert len(list(loader)) == 12
    assert "no thread to fill the window" in caplog.text


# -- shared memory and disk ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collates",
    [
        ["default", "as_they_are"],
        ["within_default"],
    ],
    ids=", ".join,
)
def test_large_batches_do_not_need_the_systems_shared_memory(
    play: Play, collates: list[str]
) -> None:
    scene = play("small_shared_memory", before=small("/dev/shm", "64m"), collates=collates)
    code, out, errors = scene.finish()
    told = ["64 MiB free", *[f"3 batches by {name}" for name in collates]]
    assert (code, errors, out.splitlines()) == (0, "", told)
    scene.check_nothing_is_left()


EVERY_BATCH = " ".join(map(str, range(12)))


def test_batches_that_make_room_come_back_from_the_disk(play: Play) -> None:
    scene = play("evicting")
    code, out, errors = scene.finish(patience_s=8)
    assert (code, out, errors) == (0, f"{EVERY_BATCH}; evicted\n", "")
    scene.check_nothing_is_left()


def test_no_batch_is_lost_where_the_disk_is_full(play: Play, tmp_path: Any) -> None:
    (tmp_path / "tmp").mkdir()
    scene = play("evicting", before=small(str(tmp_path / "tmp"), "64k"))
    code, out, errors = scene.finish(patience_s=8)
    # The large one fits beside those that cannot leave, or does not: a worker's own memory decides.
    told = EVERY_BATCH.replace("6", "BatchExceedsBudget")
    assert code == 0, errors
    assert out in {f"{given}; none evicted\n" for given in (EVERY_BATCH, told)}
    scene.check_nothing_is_left()
