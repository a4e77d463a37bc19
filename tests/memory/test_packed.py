"""PackedList: what comes out is what went in, and touching it copies nothing."""

from __future__ import annotations

import copy
import datetime as dt
import enum
import json
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import PackedList

SCENE = Path(__file__).with_name("packed_scene.py")


class Point(NamedTuple):
    x: int
    y: float


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Box:
    name: str
    corners: tuple[float, ...]
    extra: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenBox:
    name: str


@dataclass
class SlottedBox:
    __slots__ = ("name",)
    name: str


@dataclass
class Counted:
    """Pickle calls its own method, so we must too."""

    value: int

    def __setstate__(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        self.restored = True


class Text(str):
    __slots__ = ()


def is_same(one: Any, other: Any) -> bool:
    """Equal in value and in type, all the way down; NaN is itself, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and one.dtype.hasobject:
        return is_same(one.tolist(), other.tolist())
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    if hasattr(one, "__dict__") and not isinstance(one, enum.Enum):
        return is_same(vars(one), vars(other))
    return bool(one == other)


def assert_kept(records: list[Any]) -> PackedList[Any]:
    packed = PackedList(records)
    assert len(packed) == len(records)
    for index, record in enumerate(records):
        assert is_same(packed[index], record), (packed[index], record)
    assert is_same(list(packed), records)
    return packed


ODD: list[Any] = [
    *(0, -1, True, False, None, 2**63 - 1, -(2**63), 2**63, 10**40),
    *(0.0, -0.0, float("inf"), float("nan"), 1e-320, 1 + 2j),
    *("", "a", "\0", "ä€😀", "\ud800", b"", b"\0\xff", bytearray(b"x")),
    *((), [], {}, set(), (1,), [1], [[]], ((),), [1, 2.0, True, None, "x"]),
    *(list(range(100)), tuple(range(100)), [0.5] * 9, [True] * 9, [2**70] * 9, [1] * 9 + [2.0]),
    *({"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: "a"}, {True: 1}, {"": None}),
    {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}},
    *(
        np.float32(0.1),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.str_("x"),
        np.bytes_(b"y"),
    ),
    *(np.int64(3), np.datetime64("2020-01-01", "D"), np.timedelta64(3, "ms")),
    *(np.arange(4), np.zeros((2, 3), np.float16), np.zeros((0, 3)), np.array(5), np.arange(4)[::2]),
    *(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3, dtype=">i4")),
    *(np.array([None, {}], object), np.array(["a", "bc"]), np.zeros(2, [("a", "i4"), ("b", "f8")])),
    np.zeros(100_000, np.uint8),
    *(Point(1, 2.0), Point(2, 1.5), [Point(1, 2.0)], Colour.RED, Level.LOW, Text("x")),
    *(Box("a", (1.0, 2.0)), Box("b", (1.0,), [1]), FrozenBox("f"), SlottedBox("s")),
    *(OrderedDict(a=1), dt.date(2020, 1, 1), Path("a/b"), range(3), slice(1, 2)),
    *(torch.arange(3), {"t": torch.zeros(2, 2)}, torch.Size([1, 2])),
]


@pytest.mark.parametrize("record", ODD, ids=repr)
def test_a_record_comes_back_with_its_types(record: Any) -> None:
    assert_kept([record])
    assert_kept([record] * 3)
    assert_kept([{"id": 1, "value": record}, {"id": 2, "value": record}])


def test_a_class_that_restores_itself_does_so() -> None:
    assert PackedList([Counted(3)])[0].restored


def test_records_of_all_kinds_live_in_one_list() -> None:
    assert_kept([*ODD, *reversed(ODD)])


@pytest.mark.parametrize("record", ODD, ids=repr)
def test_a_column_that_turns_out_to_be_mixed_loses_no_record(record: Any) -> None:
    plain = [{"id": i, "name": str(i), "value": i / 2} for i in range(50)]
    odd = [{"id": 7, "name": "odd", "value": record}]
    assert_kept(plain + odd + plain + odd)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.sampled_from([np.float32(1.5), np.int16(2), np.uint8(255), np.float64(0.1)]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.integers(-9, 9) | st.floats(), min_size=7, max_size=12),
        st.tuples(inner, inner),
        st.builds(Point, st.integers(), st.floats()),
        st.builds(Box, st.text(max_size=3), st.tuples(st.floats(), st.floats())),
        st.dictionaries(st.text("abc", max_size=2) | st.integers(0, 2), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, max_size=12))
def test_any_values_come_back(records: list[Any]) -> None:
    packed = assert_kept(records)
    assert is_same(list(pickle.loads(pickle.dumps(packed))), records)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_columns_of_changing_types_come_back(data: st.DataObject) -> None:
    keys = ["a", "b", "c"]
    columns = {key: data.draw(st.lists(SCALARS, min_size=1, max_size=3)) for key in keys}
    rows = st.fixed_dictionaries({key: st.sampled_from(column) for key, column in columns.items()})
    assert_kept(data.draw(st.lists(rows, min_size=1, max_size=30)))


def small(count: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"image {i}", "box": [i, 1.5, 2.5]} for i in range(count)]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 30),
    st.slices(30),
    st.slices(30),
    st.integers(-40, 40),
)
def test_indices_and_slices_are_a_lists(count: int, one: slice, two: slice, index: int) -> None:
    records = small(count)
    packed = PackedList(records)
    assert list(packed[one]) == records[one]
    assert list(packed[one][two]) == records[one][two]
    if -count <= index < count:
        assert packed[index] == records[index]
    else:
        with pytest.raises(IndexError):
            packed[index]


def test_numpy_and_torch_integers_are_indices() -> None:
    packed: Any = PackedList(small(10))
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), np.int32(-7)):
        assert packed[index]["id"] == 3


def test_other_indices_are_refused() -> None:
    packed: Any = PackedList(small(3))
    for index in ("a", 1.0, None, np.arange(2)):
        with pytest.raises(TypeError):
            packed[index]


def test_getitems_gives_the_records_of_a_batch() -> None:
    records = small(10)
    assert PackedList(records).__getitems__([3, -1, 0]) == [records[3], records[9], records[0]]
    assert PackedList(records)[2:].__getitems__(np.array([0, 1])) == records[2:4]


def test_it_is_a_sequence() -> None:
    records = small(10)
    packed = PackedList(records)
    assert records[4] in packed
    assert packed.index(records[4]) == 4
    assert list(reversed(packed)) == records[::-1]
    assert "10 records" in repr(packed)
    assert not PackedList()


def test_a_record_is_the_callers_own() -> None:
    packed: PackedList[Any] = PackedList([{"a": [1, 2], "x": np.arange(3)}])
    packed[0]["a"].append(3)
    packed[0]["x"][0] = 9
    assert is_same(packed[0], {"a": [1, 2], "x": np.arange(3)})


def test_a_copy_is_itself() -> None:
    packed = PackedList(small(3))
    assert copy.copy(packed) is packed
    assert copy.deepcopy(packed) is packed


def test_dicts_with_optional_keys_in_all_combinations_come_back() -> None:
    names = "abcdefghij"
    records = [
        {name: i for bit, name in enumerate(names) if i >> bit & 1} for i in range(1 << len(names))
    ]
    assert_kept(records)


def test_an_iterator_is_packed_without_being_listed() -> None:
    alive = 0

    def stream() -> Iterator[dict[str, int]]:
        for i in range(1000):
            yield {"i": i}

    packed = PackedList.from_iter(stream())
    assert alive == 0
    assert [record["i"] for record in packed] == list(range(1000))


def test_an_error_of_the_stream_is_the_callers() -> None:
    def stream() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        PackedList(stream())


def test_a_record_that_cannot_be_pickled_says_so() -> None:
    with pytest.raises(Exception, match="pickle"):
        PackedList([1, {"lock": threading.Lock()}])


def test_numbers_and_text_of_equal_dicts_take_their_bytes_and_no_more() -> None:
    records = [{"id": i, "score": i / 3, "ok": True, "name": "abcd"} for i in range(1000)]
    per_row = 8 + 8 + 1 + 4 + 8 + len("abcd")  # the two after `ok`: length of the text, its place
    assert PackedList(records).packed_bytes == 1000 * per_row


def test_its_buffers_travel_out_of_band() -> None:
    records = small(5000)
    packed = PackedList(records)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert len(head) < 4096
    assert sum(buffer.raw().nbytes for buffer in buffers) == packed.packed_bytes
    assert list(pickle.loads(head, buffers=[buffer.raw() for buffer in buffers])) == records


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_keeps_the_records(protocol: int) -> None:
    records = [*small(20), None, "x"]
    assert list(pickle.loads(pickle.dumps(PackedList(records), protocol))) == records
    assert list(pickle.loads(pickle.dumps(PackedList(), protocol))) == []


def test_a_pickled_slice_does_not_carry_the_whole() -> None:
    packed = PackedList(small(10_000))
    data = pickle.dumps(packed[500:510])
    assert len(data) < 4096
    assert list(pickle.loads(data)) == list(packed[500:510])


def measure(scene: str) -> dict[str, float]:
    """The figures of a process of its own: pytest's memory is in none of them."""
    command = [sys.executable, str(SCENE), scene]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup")


@linux_only
def test_an_epoch_of_random_access_copies_less_than_a_twentieth_in_a_forked_worker() -> None:
    figures = measure("fork")
    assert figures["grown_bytes"] < 0.05 * figures["packed_bytes"]
    assert figures["list_grown_bytes"] > 10 * figures["grown_bytes"]  # the measure sees copies


@linux_only
def test_packing_a_stream_of_small_dicts_peaks_below_one_and_a_half_times_its_size() -> None:
    figures = measure("dicts")
    assert figures["peak_bytes"] < 1.5 * figures["packed_bytes"]


@linux_only
def test_31_annotations_from_a_stream_peak_below_one_and_a_half_times_their_size() -> None:
    figures = measure("annotations")
    assert figures["peak_bytes"] < 1.5 * figures["packed_bytes"]


@linux_only
def test_a_schema_that_changes_half_way_does_not_raise_the_peak() -> None:
    figures = measure("changing")
    assert figures["peak_bytes"] < 1.5 * figures["packed_bytes"]
