"""The demo's page says what was measured, whichever way it went, and works offline."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forebay.bench.contest import Contest
from forebay.bench.contestant import Broken, Finished
from forebay.bench.machine import Machine
from forebay.bench.sampler import Sample
from forebay.observe.demo_page import demo_page, thinned
from forebay.observe.demo_words import TABLE_COLUMNS, headline, lead, saw_same_batches, table_rows
from tests.bench.made_up import made_up_contest, made_up_entry

pytest.importorskip("plotly", reason="needs the extra `demo` (plotly)")

MACHINE = Machine("A processor", 2, 8 << 30, "Linux 6.1", "3.11.7", "2.13.0", "0.1.0")


@pytest.fixture
def contest() -> Contest:
    return made_up_contest()


def test_a_kill_is_the_headline(contest: Contest) -> None:
    assert headline(contest) == "Under the same limit torch was killed. forebay trained to the end."


def test_where_both_of_torchs_are_killed_that_is_the_headline() -> None:
    killed = made_up_entry("torch-prefetch1", fed_mib=250, killed=True)
    assert headline(made_up_contest(torch_prefetch1=killed)).startswith(
        "Under the same limit torch's loader was killed."
    )


def test_where_nobody_is_killed_the_share_is_the_headline() -> None:
    spared = made_up_entry("torch", fed_mib=310)
    assert headline(made_up_contest(torch=spared)) == (
        "The same training with 50% of the memory that torch, prefetch_factor=1 took."
    )


def test_where_forebay_is_not_better_the_page_says_so() -> None:
    spared = made_up_entry("torch", fed_mib=310)
    fat = made_up_entry("forebay", fed_mib=200)
    assert headline(made_up_contest(torch=spared, forebay=fat)) == (
        "forebay took 105% of the memory of torch, prefetch_factor=1 on this machine."
    )


def test_where_forebay_is_killed_the_page_says_so() -> None:
    killed = made_up_entry("forebay", fed_mib=95, killed=True)
    assert headline(made_up_contest(forebay=killed)) == (
        "forebay did not finish: killed after 2 steps."
    )


def test_where_forebay_fails_the_reason_is_shown() -> None:
    broken = made_up_entry("forebay", fed_mib=95, ending=Broken("exit status 1: x\nOSError: no"))
    assert "OSError: no" in headline(made_up_contest(forebay=broken))


def test_equal_batches_are_claimed_when_the_checksums_agree(contest: Contest) -> None:
    assert saw_same_batches(contest)
    assert "the very same batches" in lead(contest)


def test_equal_batches_are_not_claimed_otherwise() -> None:
    other = made_up_entry("forebay", fed_mib=95, ending=Finished("00000000", None))
    contest = made_up_contest(forebay=other)
    assert not saw_same_batches(contest)
    assert "same batches" not in demo_page(contest, MACHINE)


def test_a_limit_that_was_not_enforced_is_admitted() -> None:
    contest = made_up_contest(unenforced="No memory cgroup can be made here: not root.")
    assert "No limit could be enforced here, so nobody was killed." in lead(contest)
    assert "No memory cgroup can be made here: not root." in demo_page(contest, MACHINE)
    assert {row[1] for row in table_rows(contest)} == {"no limit set"}


def test_the_table_has_one_row_a_contestant_and_a_cell_a_column(contest: Contest) -> None:
    rows = table_rows(contest)
    assert [row[0] for row in rows] == ["torch", "torch, prefetch_factor=1", "forebay"]
    assert {len(row) for row in rows} == {len(TABLE_COLUMNS)}


def test_replaced_workers_are_told() -> None:
    replaced = made_up_entry("forebay", fed_mib=95, ending=Finished("0badcafe", None, 2))
    row = table_rows(made_up_contest(forebay=replaced))[2]
    assert row[1] == "finished, 2 killed workers replaced"


def test_thinning_keeps_the_peak_and_the_order() -> None:
    samples = [Sample(float(t_s), t_s % 97, 0) for t_s in range(5000)]
    kept = thinned(samples, lambda each: each.held_bytes, buckets=50)
    assert len(kept) <= 100
    assert max(each.held_bytes for each in kept) == 96
    assert kept == sorted(kept, key=lambda each: each.t_s)


def test_speed_is_not_credited_to_a_loader_that_nobody_waited_for() -> None:
    patient = made_up_contest(
        made_up_entry("torch", fed_mib=310, wait_s=0.001),
        made_up_entry("torch-prefetch1", fed_mib=190, wait_s=0.001),
        made_up_entry("forebay", fed_mib=95, wait_s=0.001),
    )
    assert "images/s is then the speed of the training" in demo_page(patient, MACHINE)


class Outside(HTMLParser):
    """Collects every address that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"src", "href", "srcset", "data", "poster", "action"}
        self.addresses += [value or "" for name, value in attrs if name in wanted]


def test_the_page_fetches_nothing(contest: Contest) -> None:
    page = demo_page(contest, MACHINE)
    outside = Outside()
    outside.feed(page)
    assert set(outside.addresses) <= {"data:,"}
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.browser
def test_a_browser_draws_every_figure_and_complains_of_nothing(
    contest: Contest, tmp_path: Path
) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("needs chromium on the PATH")
    (tmp_path / "page.html").write_text(demo_page(contest, MACHINE), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=10000", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    command = [browser, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert "CONSOLE" not in done.stderr
    lines = re.findall(r'<path class="js-line" d="(M[^"]+)"', done.stdout)
    bars = re.findall(r'<g class="point"><path d="(M[^"]+)"', done.stdout)
    # The legend draws short ones.
    assert (len([each for each in lines if each.count("L") > 10]), len(bars)) == (9, 6)
