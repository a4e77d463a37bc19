"""What `import forebay` offers is documented, in the code and in docs/usage.md."""

from __future__ import annotations

import dataclasses
import inspect

import torch.utils.data

import forebay
from tests.house.source import ROOT

USAGE = ROOT / "docs" / "usage.md"


def _own_parameters() -> list[str]:
    ours = inspect.signature(forebay.DataLoader.__init__).parameters
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    return [
        name
        for name, parameter in ours.items()
        if name not in torchs and parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def test_each_public_name_exists() -> None:
    missing = [name for name in forebay.__all__ if not hasattr(forebay, name)]
    assert not missing


def test_each_public_name_has_a_docstring() -> None:
    bare = [
        name
        for name in forebay.__all__
        if callable(getattr(forebay, name)) and not inspect.getdoc(getattr(forebay, name))
    ]
    assert not bare


def test_each_public_method_of_the_loader_has_a_docstring() -> None:
    bare = [
        name
        for name, value in vars(forebay.DataLoader).items()
        if inspect.isfunction(value) and not name.startswith("_") and not inspect.getdoc(value)
    ]
    assert not bare


def test_each_public_name_is_in_the_usage_page() -> None:
    page = USAGE.read_text(encoding="utf-8")
    missing = [
        name for name in forebay.__all__ if not name.startswith("__") and f"`{name}" not in page
    ]
    assert not missing, f"docs/usage.md says nothing about {missing}"


def test_each_own_parameter_is_in_the_usage_page() -> None:
    page = USAGE.read_text(encoding="utf-8")
    missing = [name for name in _own_parameters() if f"`{name}`" not in page]
    assert not missing, f"docs/usage.md says nothing about {missing}"


def test_each_figure_of_the_stats_is_in_the_usage_page() -> None:
    page = USAGE.read_text(encoding="utf-8")
    names = [field.name for field in dataclasses.fields(forebay.LoaderStats)]
    missing = [name for name in names if f"`{name}`" not in page]
    assert not missing, f"docs/usage.md says nothing about {missing}"
