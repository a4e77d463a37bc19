"""A delivered buffer is the consumer's until its last view dies, and then at once free again."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.transport.arena import Arena
from forebay.transport.codec import decode
from forebay.transport.lease import SMALL_BYTES, Draft, Lender
from forebay.transport.pages import SharedPages
from forebay.units import KIB, MIB, PAGE_BYTES, round_up_to_page
from tests.parity.batches import counting
from tests.transport.parcels import deliver, seal

LARGE = 50_000  # float32s: 200 KB
LARGE_BYTES = round_up_to_page(4 * LARGE)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Reference counts alone must bring blocks back."""
    gc.disable()
    yield
    gc.enable()


# -- what keeps a block ----------------------------------------------------------------------


def with_gradient(tensor: torch.Tensor) -> Any:
    weight = torch.zeros_like(tensor, requires_grad=True)
    weight.grad = tensor
    return weight


def in_a_graph(tensor: torch.Tensor) -> Any:
    return (torch.ones(LARGE, requires_grad=True) * tensor).sum()


def as_an_attribute(tensor: torch.Tensor) -> Any:
    module = torch.nn.Module()
    module.register_buffer("kept", tensor)
    return module


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice": lambda tensor: tensor[10:20],
    "a slice of a slice": lambda tensor: tensor[10:][5:][:1],
    "another shape": lambda tensor: tensor.reshape(100, -1).t(),
    "other elements": lambda tensor: tensor.view(torch.int32),
    "one element": lambda tensor: tensor[7],
    "rows": lambda tensor: tensor.view(10, -1).unbind()[3],
    "a detached one": lambda tensor: tensor.detach(),
    "a list of one": lambda tensor: [tensor],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.numpy()[5:][::3],
    "an array of other elements": lambda tensor: tensor.numpy().view(np.uint8),
    "a tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()[3:]),
    "a memoryview": lambda tensor: tensor.numpy().data[2:],
    "a tensor by DLPack": torch.utils.dlpack.from_dlpack,
    "an array by DLPack": np.from_dlpack,
    "a parameter": torch.nn.Parameter,
    "a gradient": with_gradient,
    "an autograd graph": in_a_graph,
    "a buffer of a module": as_an_attribute,
    "a function": lambda tensor: lambda: tensor,
}


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_a_block_comes_back_when_the_last_view_of_it_dies(
    arena: Arena, lender: Lender, no_collections: None, view_of: Callable[[torch.Tensor], Any]
) -> None:
    tensor = deliver(arena, lender, counting(0, LARGE))
    view = view_of(tensor)
    del tensor
    assert lender.settle() == 0
    assert lender.lent_bytes == LARGE_BYTES
    del view
    assert lender.settle() == LARGE_BYTES
    assert lender.lent_bytes == 0
    assert arena.free_warm_bytes == LARGE_BYTES == arena.touched_bytes


def test_a_graph_lets_go_when_it_has_run_backward(
    arena: Arena, lender: Lender, no_collections: None
) -> None:
    loss = in_a_graph(deliver(arena, lender, counting(0, LARGE)))
    assert lender.settle() == 0
    loss.backward()
    assert lender.settle() == LARGE_BYTES


def test_a_gradient_lets_go_when_it_is_replaced(
    arena: Arena, lender: Lender, no_collections: None
) -> None:
    weight = with_gradient(deliver(arena, lender, counting(0, LARGE)))
    assert lender.settle() == 0
    weight.grad = None
    assert lender.settle() == LARGE_BYTES


def test_a_cycle_keeps_its_block_until_it_is_collected(
    arena: Arena, lender: Lender, no_collections: None
) -> None:
    cycle: list[Any] = [deliver(arena, lender, counting(0, LARGE))]
    cycle.append(cycle)
    del cycle
    assert lender.settle() == 0
    gc.collect()
    assert lender.settle() == LARGE_BYTES


def test_views_may_die_in_any_thread(arena: Arena, lender: Lender) -> None:
    handed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def let_go() -> None:
        while handed.get() is not None:
            pass

    threads = [threading.Thread(target=let_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for k in range(200):
        handed.put(deliver(arena, lender, [counting(k, LARGE), counting(k, LARGE)])[0])
        lender.settle()
    for _ in threads:
        handed.put(None)
    for thread in threads:
        thread.join()
    lender.settle()
    assert lender.lent_bytes == 0
    assert arena.free_warm_bytes == arena.touched_bytes


def test_the_memory_of_a_batch_is_used_again_for_the_next(arena: Arena, lender: Lender) -> None:
    places = set()
    for k in range(20):
        tensor = deliver(arena, lender, counting(k, LARGE))
        places.add(tensor.data_ptr())
        del tensor
        lender.settle()
    assert len(places) == 1
    assert arena.touched_bytes == LARGE_BYTES


# -- what keeps how much -------------------------------------------------------------------------


def test_twenty_kept_labels_do_not_keep_the_images_of_their_batches(
    arena: Arena, lender: Lender
) -> None:
    labels = []
    for k in range(20):
        images, label = deliver(arena, lender, (counting(k, LARGE), counting(k, 128)))
        labels.append(label)
        del images, label
        lender.settle()
    assert lender.lent_bytes == 0
    assert arena.touched_bytes < LARGE_BYTES + 2 * PAGE_BYTES
    assert sum(label.untyped_storage().nbytes() for label in labels) < 16 * KIB
    assert all(label.tolist() == counting(k, 128).tolist() for k, label in enumerate(labels))


def test_a_kept_large_label_keeps_its_own_pages_and_no_more(arena: Arena, lender: Lender) -> None:
    images, label = deliver(arena, lender, (counting(0, 10 * LARGE), counting(1, LARGE)))
    del images
    lender.settle()
    assert lender.idle_part_bytes == arena.touched_bytes - LARGE_BYTES
    lender.scavenge()
    assert lender.idle_part_bytes == 0
    arena.give_back(arena.free_warm_bytes)
    assert arena.touched_bytes == LARGE_BYTES == arena.read_resident_bytes()
    assert label.tolist() == counting(1, LARGE).tolist()


def test_pages_beside_a_kept_part_are_lent_again_while_it_lives(
    arena: Arena, lender: Lender
) -> None:
    first, label = deliver(arena, lender, (counting(0, 10 * LARGE), counting(1, LARGE)))
    del first
    lender.settle()
    lender.scavenge()
    other = deliver(arena, lender, counting(2, 9 * LARGE))
    del label
    lender.settle()
    third = deliver(arena, lender, counting(3, LARGE))
    assert other.tolist() == counting(2, 9 * LARGE).tolist()
    assert third.tolist() == counting(3, LARGE).tolist()


def test_what_a_batch_does_not_use_of_its_draft_is_free_at_once(
    arena: Arena, lender: Lender
) -> None:
    block = arena.place(4 * MIB)
    assert block is not None
    ready = Draft(block).seal(arena, b"", [(block.offset, MIB)], MIB, MIB)
    assert arena.touched_bytes == MIB
    kept = lender.lend(ready)
    assert lender.lent_bytes == MIB
    del kept


def test_a_block_of_small_buffers_alone_is_free_as_soon_as_it_is_delivered(
    arena: Arena, lender: Lender
) -> None:
    kept = deliver(arena, lender, [counting(k, SMALL_BYTES // 4) for k in range(8)])
    assert lender.lent_bytes == 0
    assert arena.free_warm_bytes == arena.touched_bytes
    assert kept[7].tolist() == counting(7, SMALL_BYTES // 4).tolist()


def test_a_batch_that_is_copied_out_leaves_its_block_at_once(arena: Arena, lender: Lender) -> None:
    ready = seal(arena, [counting(0, LARGE), counting(1)])
    large, small = decode(ready.head, lender.copy_out(ready))
    assert (lender.lent_bytes, lender.copied_bytes) == (0, 4 * LARGE)
    assert arena.free_warm_bytes == arena.touched_bytes
    arena.mapping[:LARGE_BYTES] = bytes(LARGE_BYTES)
    assert large.tolist() == counting(0, LARGE).tolist()
    assert small.tolist() == counting(1).tolist()
    del large
    lender.settle()
    assert lender.copied_bytes == 0


# -- what a view is to its owner -----------------------------------------------------------------


def test_lent_tensors_are_writable(arena: Arena, lender: Lender) -> None:
    tensor = deliver(arena, lender, counting(0, LARGE))
    tensor.mul_(2).add_(1)
    assert tensor[100] == 201
    array = deliver(arena, lender, np.arange(LARGE))
    array[:] = 0
    assert not array.any()


def test_views_of_one_buffer_see_each_others_writes(arena: Arena, lender: Lender) -> None:
    base = counting(0, LARGE)
    whole, part = deliver(arena, lender, [base, base[5:9]])
    part.zero_()
    assert whole[5:9].eq(0).all()


def test_batches_outlive_the_lender_and_the_arena() -> None:
    arena = Arena(16 * MIB)
    lender = Lender(arena)
    tensor, array = deliver(arena, lender, [counting(0, LARGE), np.arange(LARGE)])
    arena.close()
    del arena, lender
    gc.collect()
    tensor.add_(1)
    assert tensor.tolist() == counting(1, LARGE).tolist()
    assert np.array_equal(array, np.arange(LARGE))


def close_watched(arena: Arena, lender: Lender) -> int:
    """End both as an engine does; a descriptor that still leads to the pages."""
    watched = os.dup(arena.fd)
    lender.close()
    arena.close()
    return watched


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.skipif(not SharedPages.can_give_back, reason="this system takes no pages back")
def test_a_view_that_outlived_its_loader_gives_its_pages_back_alone() -> None:
    # Others may map the arena for as long as they live: workers forked while it was there.
    arena = Arena(16 * MIB)
    lender = Lender(arena)
    first = deliver(arena, lender, counting(0, LARGE))
    pair = deliver(arena, lender, [counting(0, LARGE), counting(1, LARGE)])
    watched = close_watched(arena, lender)
    del arena, lender
    gc.collect()
    assert resident_bytes(watched) == 3 * LARGE_BYTES
    del first
    assert resident_bytes(watched) == 2 * LARGE_BYTES
    kept = pair.pop()
    pair.clear()
    assert resident_bytes(watched) == LARGE_BYTES
    assert kept.tolist() == counting(1, LARGE).tolist()
    thread = threading.Thread(target=lambda held: held.clear(), args=([kept],))
    del kept
    thread.start()
    thread.join()
    del thread
    assert resident_bytes(watched) == 0
    os.close(watched)


@pytest.mark.skipif(not SharedPages.can_give_back, reason="this system takes no pages back")
def test_a_closed_loader_keeps_no_free_part_of_a_block_of_which_another_lives() -> None:
    arena = Arena(16 * MIB)
    lender = Lender(arena)
    pair = deliver(arena, lender, [counting(0, LARGE), counting(1, LARGE)])
    kept = pair.pop()
    del pair
    watched = close_watched(arena, lender)
    assert resident_bytes(watched) == LARGE_BYTES
    assert kept.tolist() == counting(1, LARGE).tolist()
    os.close(watched)


# -- whatever is done, in whatever order -----------------------------------------------------------

SIZES = st.lists(
    st.sampled_from([1, 700, SMALL_BYTES, 70 * KIB, 300 * KIB]), min_size=1, max_size=4
)


@dataclass
class Kept:
    """One tensor that the consumer holds, and what must be in it."""

    tensor: torch.Tensor
    mark: int


class LendingLife(RuleBasedStateMachine):
    """Batches delivered, cut, dropped; pages given back; forks by the consumer."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(8 * MIB)
        self.lender = Lender(self.arena)
        self.kept: list[Kept] = []
        self.waiting: list[tuple[Any, list[int]]] = []
        self.serial = 0

    def teardown(self) -> None:
        self.kept.clear()
        self.lender.settle()
        assert self.lender.lent_bytes == 0
        assert self.lender.copied_bytes == 0
        self.check_nothing_is_lost()
        self.arena.close()

    @precondition(lambda self: self.arena._cold.holds(2 * MIB))
    @rule(sizes=SIZES)
    def make(self, sizes: list[int]) -> None:
        marks = [(self.serial + k) % 251 + 1 for k in range(len(sizes))]
        self.serial += len(sizes)
        tensors = [torch.full((n,), mark, dtype=torch.uint8) for n, mark in zip(sizes, marks)]
        self.waiting.append((seal(self.arena, tensors), marks))

    @precondition(lambda self: self.waiting)
    @rule(copies=st.booleans())
    def deliver(self, copies: bool) -> None:
        ready, marks = self.waiting.pop(0)
        take = self.lender.copy_out if copies or self.lender.copies_only else self.lender.lend
        self.kept += map(Kept, decode(ready.head, take(ready)), marks)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        kept = self.kept[data.draw(st.integers(0, len(self.kept) - 1))]
        self.kept.append(Kept(kept.tensor[: max(1, kept.tensor.numel() // 3)], kept.mark))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.kept[data.draw(st.integers(0, len(self.kept) - 1))]

    @rule()
    def settle(self) -> None:
        lent = self.lender.lent_bytes
        freed = self.lender.settle()
        assert self.lender.lent_bytes <= lent - freed

    @rule()
    def scavenge(self) -> None:
        self.lender.scavenge()
        assert self.lender.idle_part_bytes == 0

    @rule(length=st.integers(0, 4 * MIB))
    def give_back(self, length: int) -> None:
        self.arena.give_back(length)

    @rule()
    def fork_by_the_consumer(self) -> None:
        self.lender.note_foreign_fork()

    @invariant()
    def nobody_wrote_into_what_is_kept(self) -> None:
        for kept in self.kept:
            assert bool(kept.tensor.eq(kept.mark).all())

    @invariant()
    def check_nothing_is_lost(self) -> None:
        arena, lender = self.arena, self.lender
        waiting = sum(ready.block.capacity_bytes for ready, _ in self.waiting)
        lent = lender.lent_bytes + lender.idle_part_bytes + lender.lost_bytes
        free = arena.free_warm_bytes + arena._cold.total_bytes
        assert waiting + lent + free == arena.reserve_bytes

    @invariant()
    def touched_is_never_less_than_resident(self) -> None:
        assert self.arena.read_resident_bytes() <= self.arena.touched_bytes


TestLendingLife = LendingLife.TestCase
TestLendingLife.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
