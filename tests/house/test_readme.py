"""The pages for users tell the truth: their Python runs, their commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)
# First words of shell lines that are not ours to check.
FOREIGN = {"git", "cd", "pip", "python", "python3", "source", "apt-get", "export"}


def _blocks(*languages: str) -> list[object]:
    """Each fenced block in one of `languages`, named by its page and its line."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match.group(1) in languages:
                line = text.count("\n", 0, match.start()) + 1
                where = f"{page.relative_to(ROOT)}:{line}"
                found.append(pytest.param(match.group(2), id=where))
    return found


def _shell_words(block: str) -> list[list[str]]:
    return [
        words
        for line in block.splitlines()
        if (words := shlex.split(line.removeprefix("$ "), comments=True))
    ]


@pytest.mark.parametrize("block", _blocks("python"))
def test_a_python_snippet_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", _blocks("bash", "sh", "console"))
def test_a_shell_line_names_what_exists(block: str) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    for words in _shell_words(block):
        command = next((word for word in words if "=" not in word), "")
        rest = words[words.index(command) + 1 :] if command else []
        if command == "make":
            wanted = {word for word in rest if "=" not in word and not word.startswith("-")}
            assert wanted <= targets, f"no such target: {wanted - targets}"
        elif command == "forebay":
            _ask_for_help(rest)
        elif command.startswith(".venv/bin/"):
            assert Path(sys.executable).with_name(Path(command).name).exists(), command
        elif command.startswith("."):
            assert (ROOT / command).exists(), f"no such file: {command}"
        else:
            assert command in FOREIGN, f"this test does not know the command {command!r}"


def _ask_for_help(rest: list[str]) -> None:
    """The command line knows the command and each long option that the page names."""
    command = [word for word in rest[:1] if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-c", "from forebay.cli import main; main()", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "TERM": "dumb",
        },
    )
    assert done.returncode == 0, done.stderr
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    missing = {option for option in options if option not in done.stdout}
    assert not missing, f"forebay {' '.join(command)} has no {missing}"


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_each_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    dead = [link for link in links if not (page.parent / link).exists()]
    assert not dead
