"""Two frozen values compared; a difference is reported with the path that leads to it.

Neighbours: `freeze.py` makes the trees, `harness.py` the transcripts made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from .freeze import Frozen

MOST_REPORTED = 12


class NotTheSame(AssertionError):  # noqa: N818 (it says what was found)
    """Two values differ. The message names each place, with what was expected and what came."""


def assert_same(
    expected: object, actual: object, *, ignoring: Collection[str] = (), path: str = ""
) -> None:
    """Raise `NotTheSame` unless `actual` is `expected` in every fact but those in `ignoring`."""
    found = list(differences(expected, actual, frozenset(ignoring), path))
    if found:
        more = len(found) - MOST_REPORTED
        tail = [f"... and {more} more"] if more > 0 else []
        raise NotTheSame("\n".join(["not the same:", *found[:MOST_REPORTED], *tail]))


def differences(
    expected: Any, actual: Any, ignoring: frozenset[str], path: str = ""
) -> Iterator[str]:
    """One line for each place where two frozen values, or sequences or mappings of them, part."""
    if type(expected) is not type(actual):
        yield f"  {path or 'value'}: expected {_short(expected)}, got {_short(actual)}"
    elif isinstance(expected, Frozen):
        yield from _in_trees(expected, actual, ignoring, path)
    elif isinstance(expected, dict):
        yield from _in_facts(expected, actual, ignoring, path)
    elif isinstance(expected, (tuple, list)):
        if len(expected) != len(actual):
            yield f"  {path}: expected {len(expected)} of them, got {len(actual)}"
        for n, (one, other) in enumerate(zip(expected, actual)):
            yield from differences(one, other, ignoring, f"{path}[{n}]")
    elif expected != actual:
        yield f"  {path or 'value'}: {_told_apart(expected, actual)}"


def _in_trees(
    expected: Frozen, actual: Frozen, ignoring: frozenset[str], path: str
) -> Iterator[str]:
    if expected.kind != actual.kind:
        yield f"  {path or 'value'}: expected a {expected.kind}, got a {actual.kind}"
        yield f"    expected {_short(expected.facts)}, got {_short(actual.facts)}"
        return
    yield from _in_facts(dict(expected.facts), dict(actual.facts), ignoring, path)
    names, others = [name for name, _ in expected.parts], [name for name, _ in actual.parts]
    if names != others:
        yield f"  {path}: expected the parts {_short(names)}, got {_short(others)}"
        return
    for (name, part), (_, other) in zip(expected.parts, actual.parts):
        yield from differences(part, other, ignoring, path + name)


def _in_facts(
    expected: dict[str, Any], actual: dict[str, Any], ignoring: frozenset[str], path: str
) -> Iterator[str]:
    for name in sorted({*expected, *actual} - ignoring):
        if name not in expected or name not in actual:
            yield f"  {path}, {name}: only {'got' if name in actual else 'expected'}"
        else:
            yield from differences(expected[name], actual[name], ignoring, f"{path}, {name}")


def _told_apart(expected: object, actual: object) -> str:
    if not (isinstance(expected, bytes) and isinstance(actual, bytes)):
        return f"expected {_short(expected)}, got {_short(actual)}"
    if len(expected) != len(actual):
        return f"expected {len(expected)} bytes, got {len(actual)}"
    place = next(n for n, (one, other) in enumerate(zip(expected, actual)) if one != other)
    span = slice(place, place + 16)
    unlike = sum(one != other for one, other in zip(expected, actual))
    return (
        f"{unlike} of {len(expected)} bytes differ, from byte {place} on: expected "
        f"{expected[span].hex()}, got {actual[span].hex()}"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "..."
