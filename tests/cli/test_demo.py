"""`forebay demo`: wrong use is one sentence and status 2; a real run writes a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from forebay.bench.contest import why_no_group
from forebay.bench.contestant import Broken
from forebay.cli import app
from forebay.cli.demo import as_data
from tests.bench.made_up import made_up_contest, made_up_entry


def refuse(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["demo", *map(str, words)])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_a_size_that_is_none_is_refused() -> None:
    assert "'4Gb' is no size" in refuse("--budget", "4Gb")


def test_an_option_that_is_none_is_refused() -> None:
    assert "No such option" in refuse("--colour")


def test_no_steps_are_refused() -> None:
    assert "--steps" in refuse("--steps", "0")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "does not exist. Name a folder that does." in refuse("--images", tmp_path / "x")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "Name a folder with at least one" in refuse("--images", tmp_path)


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.split()[0].strip(",")) == (0, "forebay")


def test_help_names_the_demo() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_the_data_are_json_and_say_who_was_killed() -> None:
    data = json.loads(json.dumps(as_data(made_up_contest())))
    assert [each["under_the_limit"] for each in data["contestants"]] == [
        "killed",
        "finished",
        "finished",
    ]


def test_the_data_say_why_a_contestant_failed() -> None:
    broken = made_up_entry("forebay", fed_mib=95, ending=Broken("exit status 1: no"))
    assert as_data(made_up_contest(forebay=broken))["contestants"][2]["why"] == "exit status 1: no"


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_demo_trains_measures_and_writes_its_page(tmp_path: Path) -> None:
    reason = why_no_group()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to run the demo. {reason}")
        pytest.skip(reason)
    noise = np.random.default_rng(0).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for number in range(12):
        turned = np.roll(noise, number * 7, axis=1)
        Image.fromarray(turned).save(tmp_path / "images" / f"{number}.jpg")
    words = ["demo", "--steps", "4", "--batch-size", "8", "--budget", "96MiB", "--json"]
    words += ["--images", str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", "from forebay.cli import main; main()", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    contestants = json.loads(done.stdout)["contestants"]
    assert len({each["digest"] for each in contestants}) == 1
    assert len({each["final_loss"] for each in contestants}) == 1
    assert (tmp_path / "out" / "report.html").stat().st_size > 1_000_000
