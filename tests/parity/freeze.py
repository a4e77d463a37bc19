"""A value, taken down exactly: what it is made of, bit for bit, in plain Python values.

Covers whatever a loader may deliver: containers, scalars, tensors of every layout, NumPy
arrays, objects of user classes. Does not cover comparing (`compare.py`) or running loaders
(`harness.py`).

The one idea: a frozen tree holds copies and no live object, so a batch can be given back to its
loader at once, and two trees from two loaders can be compared at leisure. What two values share
is part of the tree: an object met again becomes `again #n`, and tensors tell which storage they
lie in (numbered by first appearance) and where, counted from the first tensor seen in it. So
views of one storage must stay views of one storage, but the storage itself may be compacted.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = str(Path(__file__).parent)
EMPTY = ()  # there is one empty tuple in a process: meeting it again says nothing
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, slots=True)
class Frozen:
    """One value: its kind, the facts about it, and the values inside it by name."""

    kind: str
    facts: Mapping[str, object] = field(default_factory=dict)
    parts: tuple[tuple[str, Frozen], ...] = ()


def freeze(value: object) -> Frozen:
    """`value` as a tree that compares equal only to a value that is the same in every respect."""
    return _Freezer().freeze(value)


def freeze_error(error: BaseException) -> Frozen:
    """An exception: its type, and its text without what differs from one run to the next."""
    return Frozen("error", {"type": name_of(type(error)), "text": plain_text(str(error))})


def plain_text(text: str) -> str:
    """`text` without the stack frames of the loaders themselves, and without process ids."""
    frames = re.sub(
        r'^  File "(?P<path>[^"]*)".*\n(?:    .*\n)*',
        lambda frame: frame.group() if frame["path"].startswith(HERE) else "",
        text,
        flags=re.MULTILINE,
    )
    return re.sub(r"\(pid\(?s?\)? [\d, ]+\)", "(pid N)", frames)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Freezer:
    """One walk over one value. `_seen` keeps every object alive, so that no id is used twice."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, object]] = {}
        self._storages: dict[int, tuple[int, int]] = {}

    def freeze(self, value: object) -> Frozen:
        if value is None or isinstance(value, (bool, int, str, bytes, complex, float, enum.Enum)):
            return Frozen(name_of(type(value)), {"value": _bits(value)})
        if isinstance(value, (torch.dtype, torch.device, torch.layout, type, range)):
            return Frozen(name_of(type(value)), {"value": repr(value)})
        known = self._seen.get(id(value))
        if known is not None and known[1] is not EMPTY:
            return Frozen("again", {"object": known[0]})
        self._seen[id(value)] = (len(self._seen), value)
        return self._freeze_new(value)

    def _freeze_new(self, value: Any) -> Frozen:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return Frozen(
                name_of(type(value)), {"dtype": repr(value.dtype), "bits": value.tobytes()}
            )
        if isinstance(value, torch.Generator):
            return Frozen(name_of(type(value)), {"state": value.get_state().numpy().tobytes()})
        if isinstance(value, (bytearray, memoryview)):
            return Frozen(name_of(type(value)), {"bits": bytes(value)})
        if isinstance(value, BaseException):
            return freeze_error(value)
        if hasattr(value, "tobytes") and hasattr(value, "mode"):  # a picture of Pillow's
            facts = {"mode": value.mode, "size": value.size, "bits": value.tobytes()}
            return Frozen(name_of(type(value)), facts)
        return self._container(value)

    def _container(self, value: Any) -> Frozen:
        facts: dict[str, object] = {}
        if isinstance(value, Mapping):
            parts = [(f"[{key!r}]", item) for key, item in value.items()]
            facts["default"] = repr(getattr(value, "default_factory", None))
        elif isinstance(value, (set, frozenset)):
            parts = [(f"{{{n}}}", item) for n, item in enumerate(sorted(value, key=repr))]
        elif hasattr(value, "__iter__") and hasattr(value, "__len__"):
            parts = [(f"[{n}]", item) for n, item in enumerate(value)]
        else:
            parts = []
            facts["repr"] = None if _attributes(value) else _plain_repr(value)
        parts += [(f".{name}", item) for name, item in _attributes(value)]
        return self._node(value, facts, parts)

    def _node(self, value: object, facts: dict[str, object], parts: list[Any]) -> Frozen:
        frozen = tuple((name, self.freeze(part)) for name, part in parts)
        return Frozen(name_of(type(value)), facts, frozen)

    def _array(self, value: np.ndarray[Any, Any]) -> Frozen:
        facts: dict[str, object] = {
            "dtype": repr(value.dtype),
            "shape": value.shape,
            "C order": value.flags.c_contiguous,
            "Fortran order": value.flags.f_contiguous,
            "writeable": value.flags.writeable,
        }
        if value.dtype.hasobject:
            return self._node(value, facts, [(f".flat[{n}]", x) for n, x in enumerate(value.flat)])
        return Frozen(name_of(type(value)), facts | {"bits": value.tobytes()})

    def _tensor(self, value: torch.Tensor) -> Frozen:
        facts: dict[str, object] = {
            "dtype": value.dtype,
            "layout": value.layout,
            "device": str(value.device),
            "requires_grad": value.requires_grad,
            "leaf": value.is_leaf,
        }
        extra = [(f".{name}", item) for name, item in sorted(vars(value).items()) if name[0] != "_"]
        with torch.no_grad():
            if value.is_nested:
                facts["sizes"] = [tuple(row.shape) for row in value.unbind()]
                return self._node(value, facts, [("rows", value.unbind()), *extra])
            facts["shape"] = tuple(value.shape)
            if value.layout in SPARSE_PARTS:
                return self._sparse(value, facts)
            if value.is_quantized:
                return self._quantized(value, facts)
            return self._node(value, facts | self._strided(value), extra)

    def _strided(self, value: torch.Tensor) -> dict[str, object]:
        facts: dict[str, object] = {
            "stride": value.stride(),
            "conj": value.is_conj(),
            "neg": value.is_neg(),
        }
        if value.device.type == "meta" or value.numel() == 0:
            return facts
        plain = value.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)
        facts["bits"] = (
            plain.clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
        # The storages of a batch are told apart by their C++ object, which torch keeps single
        # for all tensors that share memory.
        number, first = self._storages.setdefault(
            value.untyped_storage()._cdata, (len(self._storages), value.data_ptr())
        )
        return facts | {"storage": number, "place in storage": value.data_ptr() - first}

    def _sparse(self, value: torch.Tensor, facts: dict[str, object]) -> Frozen:
        if value.layout is torch.sparse_coo:
            facts["coalesced"] = value.is_coalesced()
        parts = [(f".{name}", getattr(value, name)()) for name in SPARSE_PARTS[value.layout]]
        return self._node(value, facts, [(name, part.detach()) for name, part in parts])

    def _quantized(self, value: torch.Tensor, facts: dict[str, object]) -> Frozen:
        facts["scheme"] = value.qscheme()
        facts["stride"] = value.stride()
        parts: list[tuple[str, object]] = [(".int_repr", value.int_repr())]
        if value.qscheme() == torch.per_tensor_affine:
            parts += [(".scale", value.q_scale()), (".zero_point", value.q_zero_point())]
        else:
            parts += [
                (".scales", value.q_per_channel_scales()),
                (".zero_points", value.q_per_channel_zero_points()),
                (".axis", value.q_per_channel_axis()),
            ]
        return self._node(value, facts, parts)


def _plain_repr(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _bits(value: object) -> object:
    """`value` as something that == compares exactly: floats by their bits, so that NaN is NaN."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    return value


def _attributes(value: object) -> list[tuple[str, object]]:
    """The instance attributes of an object of a user class, whether in a dict or in slots."""
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    slots = [s for kind in type(value).__mro__ for s in _slots(kind) if hasattr(value, s)]
    named = sorted(getattr(value, "__dict__", {}).items())
    return [(name, getattr(value, name)) for name in slots] + named


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(s for s in slots if not s.startswith("__") and kind.__module__ != "builtins")
