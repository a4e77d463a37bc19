"""How long files and functions are: the figures behind test_sizes.py, and a report to read.

`python -m tests.house.sizes` prints what is worth a second look. Docstrings do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import Module, modules

FILE_LINES_AT_MOST = 600
FILE_LINES_LOOK_AGAIN = 400
FUNCTION_LINES_AT_MOST = 80
FUNCTION_LINES_LOOK_AGAIN = 50


def file_lines(module: Module) -> int:
    """The lines of a file."""
    return len(module.text.splitlines())


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Each function as (where and name, lines less docstring)."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module.at(node)}: {node.name}", _lines(node)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def main() -> None:
    """Print the files and functions that are near their bound."""
    for module in modules():
        if file_lines(module) > FILE_LINES_LOOK_AGAIN:
            print(f"{file_lines(module):5} lines  {module.name}")
        for where, lines in functions(module):
            if lines > FUNCTION_LINES_LOOK_AGAIN:
                print(f"{lines:5} lines  {where}")


if __name__ == "__main__":
    main()
