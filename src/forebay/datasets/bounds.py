"""How many bytes `memory=` of a dataset wrapper means.

Covers: bytes, sizes and shares. Does not cover: `"auto"` and `"off"`, which only a loader has.
"""

from __future__ import annotations

from forebay.errors import InvalidMemory
from forebay.memory.limits import memory_limit
from forebay.units import parse_share, parse_size


def parse_memory(value: object) -> int:
    """The bytes that `value` names.

    Raises:
        InvalidMemory: it names none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        share = parse_share(value)
        if share is not None:
            return max(1, int(share.frac * memory_limit().bytes))
        size_bytes = parse_size(value)
        if size_bytes is not None:
            return size_bytes
    raise InvalidMemory.about(value)
