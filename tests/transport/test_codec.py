"""Whatever a batch is made of, it arrives as it was made, and only what is seen of it travels."""

from __future__ import annotations

import collections
import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.transport.codec import decode, encode
from forebay.units import KIB
from tests.parity.batches import (
    COLLATED,
    LISTED,
    Make,
    classes_that_pickle_themselves,
    counting,
    large_numpy_arrays,
    large_python_values,
    nested_jagged,
    other_arrays,
    quantized,
    sparse_compressed,
    structured_arrays,
)
from tests.parity.compare import assert_same
from tests.parity.freeze import freeze
from tests.transport.parcels import carry, carry_unknown, lay_out, shipped_bytes

KINDS = COLLATED | LISTED
# Of these a pickle makes something else, and torch's own transport with it: objects remade by
# their own rules, arrays in native byte order, in one of two orders, and writable.
LOSING = {classes_that_pickle_themselves, structured_arrays, other_arrays, large_numpy_arrays}
DTYPES_TOO = (torch.float8_e5m2, torch.complex32)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_kind_of_batch_arrives_as_it_was_made(make: Make) -> None:
    made = make(3)
    expected = pickle.loads(pickle.dumps(made, 4)) if make in LOSING else made
    assert_same(freeze(expected), freeze(carry(made)))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_batch_arrives_alike_the_second_time(make: Make) -> None:
    """The first is unpickled; the second may be made by the recipe that was derived from it."""
    first, second = carry_unknown(make(2)), carry(make(2))
    assert_same(freeze(first), freeze(second))


@pytest.mark.parametrize("dtype", DTYPES_TOO, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rare_dtypes_arrive(dtype: torch.dtype) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
    arrived = carry(tensor)
    assert arrived.dtype is dtype
    assert arrived.view(torch.uint8).tolist() == list(range(64))


# -- tensors ----------------------------------------------------------------------------------


def test_tensors_arrive_writable_and_their_makers_do_not_feel_it() -> None:
    made = counting(0, 50_000)
    arrived = carry(made)
    arrived.fill_(7)
    assert arrived.eq(7).all()
    assert made[1] == 1


def test_views_of_one_storage_still_share_their_bytes() -> None:
    base = counting(0, 1000)
    whole, part = carry([base, base[10:20]])
    part.fill_(-1)
    assert whole[10:20].eq(-1).all()
    assert whole[9] == 9
    assert shipped_bytes([base, base[10:20], base.view(torch.int32)]) == 4000


def test_a_storage_and_a_view_of_it_share_their_bytes() -> None:
    base = counting(0, 1000)
    storage, view = carry([base.untyped_storage(), base[500:]])
    view.fill_(0)
    assert bytes(storage[2000:2004]) == bytes(4)
    assert storage.nbytes() == 4000


def test_a_small_view_travels_without_the_rest_of_its_storage() -> None:
    video = torch.zeros(1000, 1000)
    assert shipped_bytes(video[500]) <= 4000 + 16
    assert shipped_bytes([video[500], video[502]]) <= 3 * 4000 + 16


def test_views_far_apart_carry_what_lies_between_them_and_stay_views() -> None:
    base = counting(0, 100_000)
    first, last = base[:10], base[-10:]
    assert shipped_bytes([first, last]) == base.nbytes
    one, other = carry([first, last])
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]),
            st.integers(0, 4000),
            st.integers(0, 40),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=80, deadline=None)
def test_any_views_of_one_storage_keep_their_bytes_and_their_distances(
    cuts: list[tuple[torch.dtype, int, int, int]],
) -> None:
    base = (torch.arange(80_000) % 251).to(torch.uint8)
    views = [
        base.view(dtype)[first : first + length * step : step]
        for dtype, first, length, step in cuts
    ]
    assert_same(freeze(views), freeze(carry(views)), ignoring=("stride",))


@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
@settings(deadline=None)
def test_two_storages_over_the_same_memory_arrive_right(
    first: int, second: int, with_array: bool
) -> None:
    """`from_numpy` makes a storage of its own at each call; compaction may not confuse them."""
    pixels = np.arange(50_000)
    batch: list[Any] = [torch.from_numpy(pixels)[k * 500 : k * 500 + 9] for k in (first, second)]
    batch += [pixels] if with_array else []
    arrived = carry(batch)
    for got, k in zip(arrived, (first, second)):
        assert got.tolist() == list(range(k * 500, k * 500 + 9))
    assert not with_array or np.array_equal(arrived[2], pixels)


def test_conjugated_and_negated_views_arrive_resolved() -> None:
    made = torch.arange(6).to(torch.complex64) * (1 + 2j)
    conjugated, negated = carry([made.conj(), made.conj().imag])
    assert not conjugated.is_conj()
    assert not negated.is_neg()
    assert torch.equal(conjugated, made.conj())
    assert torch.equal(negated, made.conj().imag)


def test_an_expanded_tensor_travels_as_the_elements_it_has() -> None:
    wide = torch.tensor([[3.0]]).expand(3000, 4000)
    assert shipped_bytes(wide) == 4
    arrived = carry(wide)
    assert arrived.stride() == (0, 0)
    assert arrived.shape == (3000, 4000)


def test_a_tensor_that_is_a_result_of_autograd_is_refused_in_torchs_words() -> None:
    result = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        encode(result)


@pytest.mark.parametrize("make", [sparse_compressed, nested_jagged, quantized])
def test_the_bulk_of_a_tensor_of_many_parts_travels_out_of_band(make: Make) -> None:
    assert len(encode(make(1)).head) < 8 * KIB


def test_a_layout_that_cannot_be_taken_apart_is_refused_with_the_way_out() -> None:
    with pytest.raises(NotImplementedError, match=r"mkldnn.*to_dense\(\)"):
        encode(torch.ones(8, 8).to_mkldnn())


# -- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        np.arange(80_000)[::2],
        np.arange(90_000).reshape(300, 300)[::2, 1:],
        np.arange(90_000).reshape(30, 30, 100).transpose(2, 0, 1),
        np.arange(50_000, dtype=">i4"),
        np.arange(50_000, dtype=">f8")[::-1],
    ],
    ids=["strided", "cut", "turned", "big endian", "big endian, reversed"],
)
def test_an_array_that_is_copied_to_travel_keeps_the_copy_until_it_has_left(
    made: np.ndarray[Any, Any],
) -> None:
    arrived = carry(made)
    assert np.array_equal(arrived, made)
    assert arrived.dtype.isnative


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_keep_their_order_and_arrive_writable(order: Any) -> None:
    made = np.arange(12.0).reshape(3, 4).copy(order)
    made.flags.writeable = False
    arrived = carry(made)
    assert arrived.flags.c_contiguous == (order == "C")
    assert arrived.flags.writeable
    assert np.array_equal(arrived, made)
    assert not made.flags.writeable


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("id", "i4"), ("place", ">f8", (2,)), ("name", "U4")]),
        np.dtype([("a", "u1"), ("b", "i8")], align=True),
        "M8[ns]",
        "m8[D]",
        "S7",
        "U3",
        np.longdouble,
        "V5",
    ],
    ids=str,
)
def test_arrays_of_rare_dtypes_arrive_bit_for_bit(dtype: Any) -> None:
    made = np.zeros(11, dtype)
    made.view(np.uint8)[:] = np.arange(made.nbytes) % 5
    arrived = carry(made)
    assert arrived.dtype == made.dtype
    assert arrived.tobytes() == made.tobytes()


def test_an_array_of_objects_arrives_with_its_objects() -> None:
    made = np.array([1, "a", None, [2]], dtype=object)
    assert carry(made).tolist() == made.tolist()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)], ids=str)
def test_empty_arrays_and_tensors_keep_shape_and_dtype(shape: tuple[int, ...]) -> None:
    array, tensor = carry([np.empty(shape, np.int16), torch.empty(shape, dtype=torch.bfloat16)])
    assert (array.shape, array.dtype) == (shape, np.int16)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)


# -- other values -----------------------------------------------------------------------------


def test_large_python_values_stay_in_the_head_where_their_size_is_known() -> None:
    encoded = encode(large_python_values(1))
    assert len(encoded.head) > 500_000
    assert not encoded.buffers


def test_an_object_met_twice_stays_one_object_both_times() -> None:
    meta = {"source": "a"}
    for _ in range(2):
        first, second, tensor = carry([meta, meta, counting(0)])
        assert first is second
        assert tensor.tolist() == counting(0).tolist()


def test_a_list_that_holds_itself_arrives_both_times() -> None:
    ring: list[Any] = [counting(0)]
    ring.append(ring)
    for _ in range(2):
        arrived = carry(ring)
        assert arrived[1] is arrived


def test_what_cannot_be_pickled_raises_its_own_error() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        encode(lambda: 0)


def test_a_batch_can_be_put_together_twice_from_the_same_head() -> None:
    encoded = encode({"a": counting(0, 100), "b": [np.arange(5)]})
    one = decode(encoded.head, lay_out(encoded))
    other = decode(encoded.head, lay_out(encoded))
    one["a"].zero_()
    one["b"].append(None)
    assert_same(freeze({"a": counting(0, 100), "b": [np.arange(5)]}), freeze(other))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5)
    | st.floats() | st.builds(counting, st.integers(0, 9), st.integers(0, 4))
    | st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 4)),
    lambda parts: st.lists(parts, max_size=3)
    | st.dictionaries(st.text(max_size=3) | st.integers(), parts, max_size=3)
    | st.lists(parts, max_size=3).map(tuple)
    | st.lists(parts, max_size=3).map(collections.deque),
    max_leaves=8,
)  # fmt: skip


@given(json_like)
@settings(max_examples=150, deadline=None)
def test_any_nesting_arrives_as_it_was_made_both_times(batch: Any) -> None:
    expected = freeze(batch)
    assert_same(expected, freeze(carry(batch)))
    assert_same(expected, freeze(carry(batch)))


# -- who else has the memory ----------------------------------------------------------------


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a view": lambda tensor: tensor[3:],
    "an alias": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a typed storage": lambda tensor: tensor.storage(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_else_has_is_not_forsaken(holder: str) -> None:
    tensor = torch.ones(1000)
    held = HOLDERS[holder](tensor)
    encoded = encode({"x": [tensor]})
    del tensor
    assert not encoded.is_forsaken(0)
    del held
    # NumPy's owners are not torch's to count: what it once looked at stays as it is.
    assert encoded.is_forsaken(0) == (holder != "an array")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.ones(1000)),
        lambda: torch.ones(1000).share_memory_(),
        lambda: torch.frombuffer(bytearray(4000), dtype=torch.uint8),
        lambda: np.ones(1000),
        lambda: torch.ones(100_000)[:50],
    ],
    ids=["from_numpy", "shared", "frombuffer", "array", "a cut"],
)
def test_memory_that_torch_did_not_allocate_or_that_goes_in_part_is_never_forsaken(
    make: Callable[[], Any],
) -> None:
    assert not encode(make()).is_forsaken(0)


def test_two_ways_to_one_memory_keep_it() -> None:
    tensor = torch.ones(1000)
    encoded = encode((tensor, tensor.numpy()))
    del tensor
    assert not any(encoded.is_forsaken(number) for number in range(len(encoded.buffers)))


def test_views_of_one_storage_are_one_buffer_that_may_be_forsaken() -> None:
    tensor = torch.ones(1000)
    encoded = encode((tensor[:600], tensor[400:]))
    del tensor
    assert len(encoded.buffers) == 1
    assert encoded.is_forsaken(0)


# -- what is damaged -----------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn, head: bytes) -> bytes:
    """Bits that turned, bytes that are gone or came on, or all of it something else."""
    damaged = bytearray(head)
    kind = draw(st.sampled_from(["turn", "cut", "grow", "replace"]))
    if kind == "turn":
        for at in draw(st.lists(st.integers(0, len(head) - 1), min_size=1, max_size=4)):
            damaged[at] ^= draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[draw(st.integers(0, len(head) - 1)) :]
    elif kind == "grow":
        damaged += draw(st.binary(min_size=1, max_size=20))
    else:
        damaged = bytearray(draw(st.binary(max_size=200)))
    return bytes(damaged)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_a_damaged_header_is_refused_before_anything_of_it_is_unpickled(
    data: st.DataObject, kind: str
) -> None:
    encoded = encode(KINDS[kind](2))
    head = data.draw(damages(encoded.head))
    if head == encoded.head:  # two bits that turned twice
        return
    with pytest.raises(forebay.DamagedBatch) as told:
        decode(head, lay_out(encoded))
    assert told.value.size_bytes == len(head)


class Loud:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return HEARD.append, (1,)


HEARD: list[int] = []


def test_a_header_that_nobody_sealed_runs_no_code() -> None:
    with pytest.raises(forebay.DamagedBatch):
        decode(pickle.dumps(Loud()), ())
    assert HEARD == []


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)))
@pytest.mark.filterwarnings("ignore")
def test_buffers_of_wrong_lengths_are_an_error_or_a_batch_and_never_a_crash(
    data: st.DataObject, kind: str
) -> None:
    encoded = encode(KINDS[kind](2))
    lengths = [len(buffer) for buffer in encoded.buffers]
    drawn = [data.draw(st.integers(0, 2 * length + 8)) for length in lengths]
    buffers: list[object] = [bytearray(length) for length in drawn]
    if data.draw(st.booleans()) and buffers:
        buffers.pop()
    with contextlib.suppress(Exception):
        freeze(decode(encoded.head, buffers))  # looks at every element
