"""torch's private names are touched in one file, which checks them when it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import Module, dotted, imports, modules

ONE_FILE = "forebay.torch_compat"


def _is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def _names_of_torch(module: Module) -> dict[str, str]:
    """Local name -> dotted torch name, for all that the file imports from torch."""
    bound: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    bound[alias.asname] = alias.name
                else:
                    bound[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in bound.items() if full.split(".")[0] == "torch"}


def _touches(module: Module) -> Iterator[str]:
    for statement, wanted in imports(module):
        if wanted.split(".")[0] == "torch" and any(map(_is_private, wanted.split("."))):
            yield f"{module.at(statement)}: {wanted}"
    bound = _names_of_torch(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in {"getattr", "setattr", "hasattr"}
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
        ):
            name = f"{dotted(node.args[0])}.{node.args[1].value}"
        else:
            continue
        first, _, rest = name.partition(".")
        if first in bound and any(map(_is_private, rest.split("."))):
            yield f"{module.at(node)}: {bound[first]}.{rest}"


def test_only_torch_compat_touches_the_private_names_of_torch() -> None:
    wrong = [touch for module in modules() if module.name != ONE_FILE for touch in _touches(module)]
    assert not wrong, f"take it through {ONE_FILE}, which checks that it is there: {wrong}"


def test_the_search_for_private_names_finds_each_way_to_reach_one() -> None:
    text = (
        "import torch\n"
        "import torch.utils.data as data\n"
        "from torch._utils import ExceptionWrapper\n"
        "from torch.utils.data.dataloader import _DatasetKind\n"
        "torch._C.fork\n"
        "data._utils.fetch\n"
        "getattr(torch, '_C')\n"
        "torch.__version__\n"
        "self._index_sampler\n"
    )
    module = Module("forebay.sample", modules()[0].path, text, ast.parse(text))
    lines = sorted({int(touch.split(":")[1]) for touch in _touches(module)})
    assert lines == [3, 4, 5, 6, 7]
