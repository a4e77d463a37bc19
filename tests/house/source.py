"""The library's source as syntax trees, for the tests of its architecture.

Covers: finding the files, parsing them once, and the few questions several tests ask.
Does not cover: any rule; each rule is a test beside this file.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "forebay"


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, where it lies, its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def at(self, node: ast.AST) -> str:
        """Where `node` is, in the form that editors jump to."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every file of the library, in the order of their names."""
    return tuple(_parse(path) for path in sorted(PACKAGE.rglob("*.py")))


def _parse(path: Path) -> Module:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Module(name, path, text, ast.parse(text, filename=str(path)))


def imports(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement with the dotted name it asks for, `from a import b` as `a.b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module, node)
            for alias in node.names:
                yield node, f"{origin}.{alias.name}"


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (1 if module.is_package else 0)
    home = parts[: len(parts) - up]
    return ".".join([*home, node.module] if node.module else home)


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain on a name, the empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    if isinstance(node, ast.Subscript):  # a generic base: `Protocol[T]`
        return dotted(node.value)
    if isinstance(node, ast.Call):  # a decorator with arguments
        return dotted(node.func)
    return ""


def last_word(node: ast.expr) -> str:
    """`c` for `a.b.c`."""
    return dotted(node).rpartition(".")[2]
