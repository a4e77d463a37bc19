"""Bytes as people write them: parsing and printing.

Covers: turning `"4GiB"` or `"25%"` into exact values and byte counts into text.
Does not cover: what a share is a share *of* (memory/limits.py knows that).

Binary units only (1 KiB = 1024 bytes): memory limits of the kernel, of
containers and of schedulers are binary, and a "GB" that means one thing here
and another there is how budgets are missed. `"4GB"` is therefore read as its
decimal self, 4,000,000,000 bytes, as the SI says.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

PAGE_BYTES = 4096
"""Granularity of blocks. Fixed at 4 KiB: a larger machine page (16 KiB on some
arm64) only makes giving pages back coarser, never wrong."""

_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1024 * GIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

ACCEPTED_FORMS = (
    'bytes as an int, a size like "512MiB", "2GiB" or "4GB", a share like "25%", "auto" or "off"'
)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the tightest memory limit that binds; `frac` is in (0, 1]."""

    frac: float


def parse_size(text: str) -> int | None:
    """The bytes that `text` names, or None when it is not a size.

    Units: B, KiB, MiB, GiB, TiB (1024), their short forms K, M, G, T (1024), and
    KB, MB, GB, TB (1000). Exact spelling of the binary ones is not asked for,
    but a mixed case such as "Gb" is refused: there it usually means bits.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, unit = match.groups()
    if unit.endswith("b") and len(unit) > 1 and not unit.islower():
        return None
    scale = _UNITS.get(unit.lower(), 0) if unit else 1
    if not scale:
        return None
    value = float(number) * scale
    return int(value) if math.isfinite(value) and value >= 1 else None


def parse_share(text: str) -> Share | None:
    """The share that `text` names ("25%"), or None when it is not one in (0, 100]."""
    match = _SHARE.fullmatch(text)
    if match is None:
        return None
    frac = float(match.group(1)) / 100
    return Share(frac) if 0 < frac <= 1 else None


def format_bytes(count: float) -> str:
    """`count` bytes in the unit a reader wants: "0 B", "812 MiB", "1.5 GiB"."""
    sign = "-" if count < 0 else ""
    size = abs(count)
    for unit, scale in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            value = size / scale
            digits = 0 if value >= 100 else 1  # noqa: PLR2004 - three figures are enough
            text = f"{value:,.{digits}f}"
            return f"{sign}{text.removesuffix('.0')} {unit}"
    return f"{sign}{size:.0f} B"


def format_budget(count: int) -> str:
    """At least `count` bytes, as `memory_budget` takes them: rounded up to a MiB."""
    return f"{-(-count // MIB)} MiB"


def round_up_to_page(count: int) -> int:
    """The least multiple of `PAGE_BYTES` that holds `count` bytes."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES
