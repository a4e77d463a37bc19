"""Files and functions stay small enough to be read at one sitting."""

from __future__ import annotations

from tests.house.sizes import FILE_LINES_AT_MOST, FUNCTION_LINES_AT_MOST, file_lines, functions
from tests.house.source import modules


def test_no_file_is_too_long() -> None:
    wrong = [
        f"{module.name}: {file_lines(module)} lines"
        for module in modules()
        if file_lines(module) > FILE_LINES_AT_MOST
    ]
    assert not wrong, f"split where a second noun appears: {wrong}"


def test_no_function_is_too_long() -> None:
    wrong = [
        f"{where}: {lines} lines"
        for module in modules()
        for where, lines in functions(module)
        if lines > FUNCTION_LINES_AT_MOST
    ]
    assert not wrong, f"a part of it wants a name of its own: {wrong}"
