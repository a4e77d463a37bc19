"""Sizes are read as people write them, and written as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.units import (
    GIB,
    KIB,
    MIB,
    PAGE_BYTES,
    Share,
    format_bytes,
    parse_share,
    parse_size,
    round_up_to_page,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * GIB),
        ("4 GiB", 4 * GIB),
        (" 4gib ", 4 * GIB),
        ("4G", 4 * GIB),
        ("4GB", 4_000_000_000),
        ("4gb", 4_000_000_000),
        ("1.5KiB", 1536),
        ("0.5 MiB", 512 * KIB),
        ("2T", 2048 * GIB),
        ("7TB", 7 * 10**12),
        ("812 B", 812),
        ("812b", 812),
        ("4096", 4096),
        ("010M", 10 * MIB),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "4Gb", "4 Mb", "4GIb", "4 GiB!", "-1GiB", "+1GiB", "1e9", "0x10", "1,5GiB"),
        *("4 Gi", "4XB", "four", "4GiBB", "1..5M", ".5M", "5.M", "nan", "inf", "0", "0.0GiB"),
        *("0.5B", "9" * 400),
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    assert parse_size(text) is None


@given(st.integers(1, 2**50))
def test_a_plain_number_is_so_many_bytes(count: int) -> None:
    assert parse_size(str(count)) == count


@given(st.text(max_size=12))
def test_any_text_is_a_size_of_one_byte_at_least_or_none(text: str) -> None:
    size = parse_size(text)
    assert size is None or size >= 1


@pytest.mark.parametrize(
    ("text", "frac"), [("25%", 0.25), ("100 %", 1.0), (" 0.5%", 0.005), ("33.3%", 0.333)]
)
def test_shares_are_read(text: str, frac: float) -> None:
    share = parse_share(text)
    assert share is not None
    assert share.frac == pytest.approx(frac)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "25", "25%%", "a%", "1e1%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    assert parse_share(text) is None


def test_shares_compare_by_value() -> None:
    assert parse_share("50%") == Share(0.5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (812 * MIB, "812 MiB"),
        (-3 * MIB, "-3 MiB"),
        (4 * GIB, "4 GiB"),
        (GIB + GIB // 2, "1.5 GiB"),
        (3000 * 1024 * GIB, "3,000 TiB"),
        (0.4, "0 B"),
    ],
)
def test_bytes_are_written(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_what_was_written_reads_as_the_same_size_but_for_rounding(count: int) -> None:
    size = parse_size(format_bytes(count).replace(",", ""))
    assert size is not None
    assert abs(size - count) <= max(count, KIB) / 20


@given(st.integers(0, 2**50))
def test_pages_hold_what_they_are_for_and_less_than_a_page_more(count: int) -> None:
    rounded = round_up_to_page(count)
    assert rounded % PAGE_BYTES == 0
    assert count <= rounded < count + PAGE_BYTES
