"""A child that user code forks reads what it was given, while the parent goes on recycling."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forebay.transport.arena import Arena
from forebay.transport.codec import decode
from forebay.transport.lease import Lender, own_fork
from tests.parity.batches import counting
from tests.transport.parcels import deliver, seal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

LARGE = 50_000  # float32s: 200 KB


def is_counting(tensor: torch.Tensor, index: int) -> bool:
    """By NumPy: torch's threads do not live on in a forked child."""
    values = tensor.numpy()
    return all(int(values[k]) == k + index for k in range(0, len(values), 997))


def fork_and_check(look: Callable[[], bool], meanwhile: Callable[[], None]) -> bool:
    """Fork a child that looks once `meanwhile` is done here; what it saw."""
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(done)
        os.read(ready, 1)
        os._exit(0 if look() else 1)
    os.close(ready)
    try:
        meanwhile()
    finally:
        os.close(done)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def recycle(arena: Arena, lender: Lender) -> None:
    """What a training loop does to memory: many batches, then pages given back."""
    for k in range(30):
        deliver(arena, lender, counting(1000 * k, LARGE))
        lender.settle()
    lender.scavenge()
    arena.give_back(arena.free_warm_bytes)


def test_a_forked_child_sees_its_batch_while_the_parent_recycles(
    arena: Arena, lender: Lender
) -> None:
    held = [deliver(arena, lender, counting(5, LARGE))]
    place = held[0].data_ptr()

    def go_on() -> None:
        held.clear()
        recycle(arena, lender)
        assert deliver(arena, lender, counting(0, LARGE)).data_ptr() != place

    tensor = held[0]
    look = lambda held=list(held): is_counting(held[0], 5)  # noqa: E731 - holds the batch itself
    del tensor
    assert fork_and_check(look, go_on)


def check_in_process(tensor: torch.Tensor, go: Any) -> None:
    go.wait()
    raise SystemExit(0 if is_counting(tensor, 7) else 1)


def test_a_batch_given_to_a_process_stays_what_it_was(arena: Arena, lender: Lender) -> None:
    context = multiprocessing.get_context("fork")
    go = context.Event()
    tensor = deliver(arena, lender, counting(7, LARGE))
    process = context.Process(target=check_in_process, args=(tensor, go))
    process.start()
    del tensor
    recycle(arena, lender)
    go.set()
    process.join()
    assert process.exitcode == 0
    process.close()


def test_what_was_lent_at_a_fork_is_never_used_again(arena: Arena, lender: Lender) -> None:
    tensor = deliver(arena, lender, counting(0, LARGE))
    lent = lender.lent_bytes
    assert fork_and_check(lambda: True, lambda: None)
    del tensor
    assert lender.settle() == 0
    assert (lender.lost_bytes, lender.lent_bytes) == (lent, 0)
    assert arena.touched_bytes == lent  # its pages are still counted


def test_parts_that_had_come_back_before_the_fork_are_not_lost(
    arena: Arena, lender: Lender
) -> None:
    images, label = deliver(arena, lender, [counting(0, 10 * LARGE), counting(1, LARGE)])
    del images
    lender.settle()
    lent, touched = lender.lent_bytes, arena.touched_bytes
    assert fork_and_check(lambda: True, lambda: None)
    del label
    lender.settle()
    assert lender.lost_bytes == lent
    assert arena.free_warm_bytes == touched - lent


def test_batches_after_one_fork_are_lent_and_recycled_as_before(
    arena: Arena, lender: Lender
) -> None:
    kept = deliver(arena, lender, counting(0, LARGE))
    assert fork_and_check(lambda: True, lambda: None)
    after = deliver(arena, lender, counting(1, LARGE))
    place = after.data_ptr()
    del after
    assert lender.settle() > 0
    assert deliver(arena, lender, counting(2, LARGE)).data_ptr() == place
    assert not lender.copies_only
    del kept


def test_repeated_forks_switch_to_heap_copies(arena: Arena, lender: Lender) -> None:
    for _ in range(2):
        tensor = deliver(arena, lender, counting(0, LARGE))
        assert fork_and_check(lambda: True, lambda: None)
        del tensor
    assert lender.copies_only
    lender.settle()
    lost = lender.lost_bytes
    ready = seal(arena, counting(3, LARGE))
    tensor = decode(ready.head, lender.copy_out(ready))
    assert fork_and_check(lambda: is_counting(tensor, 3), lambda: recycle(arena, lender))
    assert lender.lost_bytes == lost


def test_forks_while_nothing_is_lent_change_nothing(arena: Arena, lender: Lender) -> None:
    for _ in range(3):
        tensor = deliver(arena, lender, counting(0, LARGE))
        del tensor
        lender.settle()
        assert fork_and_check(lambda: True, lambda: None)
    assert not lender.copies_only
    assert lender.lost_bytes == 0


def test_forks_of_our_own_change_nothing(arena: Arena, lender: Lender) -> None:
    tensor = deliver(arena, lender, counting(0, LARGE))
    for _ in range(2):
        with own_fork():
            assert fork_and_check(lambda: True, lambda: None)
    del tensor
    assert lender.settle() > 0
    assert not lender.copies_only


def test_what_dies_in_the_child_takes_nothing_from_the_parent(arena: Arena, lender: Lender) -> None:
    held = [deliver(arena, lender, counting(0, LARGE))]

    def drop_and_settle() -> bool:
        held.clear()
        lender.settle()
        return True

    assert fork_and_check(drop_and_settle, lambda: None)
    assert is_counting(held[0], 0)
    assert lender.lent_bytes > 0


def end(arena: Arena, lender: Lender) -> None:
    """As an engine does."""
    lender.close()
    arena.close()


def test_what_a_child_lets_go_of_after_the_end_is_still_the_parents(
    arena: Arena, lender: Lender
) -> None:
    # Workers of another loader are forked with all that the parent holds, and may drop it.
    held = [deliver(arena, lender, counting(5, LARGE))]
    end(arena, lender)

    def let_go() -> bool:
        held.clear()
        return True

    with own_fork():
        assert fork_and_check(let_go, lambda: None)
    assert is_counting(held[0], 5)


def test_a_forked_child_sees_its_batch_after_the_parent_closed_and_let_go(
    arena: Arena, lender: Lender
) -> None:
    held = [deliver(arena, lender, counting(5, LARGE))]
    kept = list(held)
    end(arena, lender)

    def drop_all() -> None:
        held.clear()
        kept.clear()

    assert fork_and_check(lambda: is_counting(kept[0], 5), drop_all)


def test_a_batch_forked_before_the_end_stays_with_its_child(arena: Arena, lender: Lender) -> None:
    held = [deliver(arena, lender, counting(5, LARGE))]

    def end_and_let_go() -> None:
        end(arena, lender)
        held.clear()

    assert fork_and_check(lambda: is_counting(held[0], 5), end_and_let_go)
