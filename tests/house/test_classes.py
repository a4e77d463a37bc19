"""Every class is final or abstract: what a class does can be read in one place."""

from __future__ import annotations

import ast
import builtins
import functools

from tests.house.source import Module, last_word, modules

# The exceptions to the rule, each with its reason. Keep it short.
OPEN: dict[str, str] = {
    "forebay.loader.DataLoader": "users and frameworks subclass it, as they do torch's",
}

ABSTRACT_BASES = {"ABC", "Protocol", "TypedDict"}
# Python forbids to extend an enum; a named tuple is a value, and nobody extends one.
CLOSED_BASES = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "NamedTuple"}
VAGUE = {"manager", "handler", "helper", "helpers", "util", "utils", "base", "common", "misc"}


@functools.cache
def _classes() -> tuple[tuple[Module, ast.ClassDef], ...]:
    return tuple(
        (module, node)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )


@functools.cache
def _exceptions() -> frozenset[str]:
    """The names of all exception classes: Python's, and by inheritance ours."""
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    grown = True
    while grown:
        more = {
            node.name
            for _, node in _classes()
            if any(last_word(base) in known for base in node.bases)
        }
        grown = not more <= known
        known |= more
    return frozenset(known)


def _is_abstract(node: ast.ClassDef) -> bool:
    words = {last_word(base) for base in node.bases}
    words |= {last_word(keyword.value) for keyword in node.keywords if keyword.arg == "metaclass"}
    return bool(words & {*ABSTRACT_BASES, "ABCMeta"})


def _is_closed(node: ast.ClassDef) -> bool:
    """Final by word, by kind (enum, exception of the tree), or a frozen value."""
    if any(last_word(decorator) == "final" for decorator in node.decorator_list):
        return True
    if any(last_word(base) in CLOSED_BASES for base in node.bases):
        return True
    return node.name in _exceptions() or _is_frozen_value(node)


def _is_frozen_value(node: ast.ClassDef) -> bool:
    return any(
        isinstance(decorator, ast.Call)
        and last_word(decorator) == "dataclass"
        and any(
            keyword.arg == "frozen"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is True
            for keyword in decorator.keywords
        )
        for decorator in node.decorator_list
    )


def test_every_class_is_final_or_abstract() -> None:
    wrong = [
        f"{module.at(node)}: {node.name}"
        for module, node in _classes()
        if not (_is_abstract(node) or _is_closed(node)) and f"{module.name}.{node.name}" not in OPEN
    ]
    assert not wrong, f"mark it @typing.final, or make it an ABC or a Protocol: {wrong}"


def test_no_class_of_ours_extends_a_concrete_one_of_ours() -> None:
    concrete = {
        node.name
        for _, node in _classes()
        if not _is_abstract(node) and node.name not in _exceptions()
    }
    # A name that we share with torch (DataLoader) means torch's when it is written as a path.
    wrong = [
        f"{module.at(node)}: {node.name} extends {last_word(base)}"
        for module, node in _classes()
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in concrete
    ]
    assert not wrong, f"share by holding, not by extending: {wrong}"


def test_each_open_class_still_exists() -> None:
    names = {f"{module.name}.{node.name}" for module, node in _classes()}
    assert set(OPEN) <= names, f"take it off the list: {sorted(set(OPEN) - names)}"


def test_no_file_or_class_has_a_vague_name() -> None:
    wrong = [
        str(module.path.name) for module in modules() if VAGUE & set(module.path.stem.split("_"))
    ]
    wrong += [
        f"{module.at(node)}: {node.name}"
        for module, node in _classes()
        if VAGUE & {word.lower() for word in _words(node.name)}
    ]
    assert not wrong, f"say what it is: {wrong}"


def _words(name: str) -> list[str]:
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return spaced.replace("_", " ").split()


def test_the_rule_tells_open_from_closed() -> None:
    text = (
        "class Open: ...\n"
        "@dataclass(slots=True)\nclass OpenRecord: ...\n"
        "@typing.final\nclass Final: ...\n"
        "@dataclass(frozen=True, slots=True)\nclass Value: ...\n"
        "class Door(Protocol[T]): ...\n"
        "class Part(abc.ABC): ...\n"
        "class Kind(enum.Enum): ...\n"
    )
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    open_ones = [node.name for node in nodes if not (_is_abstract(node) or _is_closed(node))]
    assert open_ones == ["Open", "OpenRecord"]
