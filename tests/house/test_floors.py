"""Floors that import-linter cannot see: the standard library, and the way through the roof.

The stairs themselves (words < memory < transport < workers < flow < loader) are contracts in
pyproject.toml, checked by `make floors`.
"""

from __future__ import annotations

import ast

import pytest

from tests.house.source import Module, imports, modules

PURE = (
    "forebay.memory.ledger",
    "forebay.memory.seats",
    "forebay.memory.crew_account",
    "forebay.memory.growth",
    "forebay.memory.policy",
    "forebay.memory.window",
    "forebay.memory.pinned",
    "forebay.memory.planner",
    "forebay.flow.order",
)
IMPURE = {"torch", "threading", "multiprocessing", "os", "time", "psutil"}
WORDS = ("forebay.units", "forebay.errors", "forebay.events", "forebay.options")
BESIDE = ("forebay.cli", "forebay.observe", "forebay.audit", "forebay.bench", "forebay.__main__")


def _by_name(name: str) -> Module:
    found = {module.name: module for module in modules()}
    assert name in found, f"{name} is named in this test and does not exist: rename it here too"
    return found[name]


def _is_engine(module: Module) -> bool:
    return module.name != "forebay" and not module.name.startswith(BESIDE)


@pytest.mark.parametrize("name", PURE)
def test_a_pure_file_imports_no_clock_process_thread_or_torch(name: str) -> None:
    module = _by_name(name)
    wrong = [
        f"{module.at(node)}: {wanted}"
        for node, wanted in imports(module)
        if wanted.split(".")[0] in IMPURE
    ]
    assert not wrong, f"pure files decide on given facts; move the reading out: {wrong}"


@pytest.mark.parametrize("name", PURE)
def test_a_pure_file_leans_on_words_and_pure_files_only(name: str) -> None:
    module = _by_name(name)
    allowed = (*PURE, *WORDS)
    wrong = [
        f"{module.at(node)}: {wanted}"
        for node, wanted in imports(module)
        if wanted.split(".")[0] == "forebay"
        and not any(wanted == name or wanted.startswith(f"{name}.") for name in allowed)
        # `from forebay import units` is the same as `from forebay.units import ...`
    ]
    assert not wrong, f"what a pure file leans on must be pure as well: {wrong}"


def test_the_engine_does_not_come_in_through_the_roof() -> None:
    """`from forebay import X` reaches the public names and so every floor at once."""
    names = {module.name for module in modules()}
    wrong = [
        f"{module.at(node)}: {wanted}"
        for module in modules()
        if _is_engine(module)
        for node, wanted in imports(module)
        if wanted == "forebay" or (wanted.count(".") == 1 and wanted not in names)
        if wanted.split(".")[0] == "forebay"
    ]
    assert not wrong, f"import from the file that defines it: {wrong}"


def test_the_package_file_holds_names_and_no_logic() -> None:
    roof = _by_name("forebay")
    defined = [
        roof.at(node)
        for node in roof.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.With)
        and not (isinstance(node, ast.FunctionDef) and node.name in {"__getattr__", "__dir__"})
    ]
    assert not defined, f"__init__.py only names what is public: {defined}"
