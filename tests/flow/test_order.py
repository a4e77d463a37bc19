"""Tickets are numbered, tied to streams and drawn as torch would: whatever ends when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.flow.order import Order, Ticket


def order(num_streams: int, sampler: Any, *, is_bound: bool = True) -> Order:
    made = Order(num_streams, is_bound=is_bound, seed_of=None)
    made.start_epoch(iter(sampler))
    return made


def drawn(source: Order, count: int) -> list[Ticket]:
    tickets = [source.draw() for _ in range(count)]
    return [ticket for ticket in tickets if ticket is not None]


@given(st.integers(1, 9), st.integers(0, 40))
def test_batch_i_is_made_by_stream_i_mod_w(num_streams: int, count: int) -> None:
    tickets = drawn(order(num_streams, range(count)), count + 1)
    assert tickets == [Ticket(i, i % num_streams, i, None) for i in range(count)]


def torchs_turns(num_streams: int, events: list[int | None]) -> Iterator[int]:
    """torch's loop: a cycle over all workers, in which the dead ones are passed by."""
    alive = [True] * num_streams
    cycle = itertools.cycle(range(num_streams))
    for event in events:
        if event is not None:
            alive[event] = False
            continue
        for _ in range(num_streams):
            stream = next(cycle)
            if alive[stream]:
                yield stream
                break


@given(st.data(), st.integers(1, 6))
def test_ended_streams_are_passed_by_as_in_torch(data: st.DataObject, num_streams: int) -> None:
    """An event is a draw (None), or the end of a stream; twice is as good as once."""
    events = data.draw(st.lists(st.none() | st.integers(0, num_streams - 1), max_size=60))
    source = order(num_streams, itertools.count())
    streams = []
    for event in events:
        if event is not None:
            source.end_stream(event)
        elif (ticket := source.draw()) is not None:
            streams.append(ticket.stream)
    assert streams == list(torchs_turns(num_streams, events))


def test_an_epoch_is_over_when_the_sampler_is_or_every_stream() -> None:
    short = order(2, [0])
    drawn(short, 2)
    assert short.is_exhausted
    endless = order(2, itertools.count())
    for stream in (1, 0):
        assert not endless.is_exhausted
        endless.end_stream(stream)
    assert endless.is_exhausted
    assert endless.draw() is None


def test_nothing_is_drawn_before_an_epoch_begins() -> None:
    assert Order(2, is_bound=True, seed_of=None).draw() is None


def test_serials_run_on_over_epochs_while_streams_begin_again() -> None:
    source = order(3, range(4))
    drawn(source, 9)
    source.end_stream(0)
    source.start_epoch(iter("ab"))
    assert (source.first_serial, source.drawn) == (4, 0)
    assert drawn(source, 9) == [Ticket(4, 0, "a", None), Ticket(5, 1, "b", None)]
    assert source.drawn == 2


def test_unbound_tickets_belong_to_no_stream() -> None:
    assert {ticket.stream for ticket in drawn(order(3, range(5), is_bound=False), 5)} == {-1}


def test_seeds_come_from_the_epoch_and_the_number_within_it() -> None:
    source = Order(2, is_bound=False, seed_of=lambda epoch, serial: 100 * epoch + serial)
    seeds = []
    for _ in range(2):
        source.start_epoch(iter(range(3)))
        seeds += [ticket.seed for ticket in drawn(source, 9)]
    assert seeds == [0, 1, 2, 100, 101, 102]


def test_what_the_sampler_raises_comes_out_and_takes_no_number() -> None:
    def sampler() -> Iterator[int]:
        yield 0
        raise LookupError("index 7")

    source = order(2, sampler())
    source.draw()
    with pytest.raises(LookupError, match="index 7"):
        source.draw()
    assert source.next_serial == 1


def test_an_endless_sampler_is_drawn_from_one_at_a_time() -> None:
    sampler = itertools.count()
    drawn(order(4, sampler), 3)
    assert next(sampler) == 3


# -- an epoch that was begun before ---------------------------------------------------------


@given(
    length=st.integers(0, 20),
    taken=st.integers(0, 20),
    known=st.integers(0, 20),
    num_streams=st.integers(1, 4),
)
def test_after_skipping_the_tickets_are_those_that_were_to_come(
    length: int, taken: int, known: int, num_streams: int
) -> None:
    taken = min(taken, length)
    known = min(known, taken)
    whole = order(num_streams, range(length))
    expected = [whole.draw() for _ in range(length)]
    resumed = order(num_streams, range(known, length))
    passed = list(resumed.skip(taken, known, set()))
    assert [(number, ticket.indices) for number, ticket in passed] == [
        (number, number) for number in range(known, taken)
    ]
    assert resumed.drawn == 0
    assert [resumed.draw() for _ in range(length - taken)] == expected[taken:]
    assert resumed.draw() is None


def test_tickets_that_were_not_delivered_come_first() -> None:
    source = order(2, range(8))
    assert [number for number, _ in source.skip(5, 0, {0, 2})] == [1, 3, 4]
    drawn = [ticket.indices for _ in range(5) if (ticket := source.draw())]
    assert drawn == [0, 2, 5, 6, 7]


@given(data=st.data(), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_streams_take_turns_from_where_they_were(data: st.DataObject, lengths: list[int]) -> None:
    def run(source: Order, left: list[int], most: int) -> list[int]:
        """Streams in the order in which the consumer gets their batches."""
        delivered: list[int] = []
        while len(delivered) < most and (ticket := source.draw()) is not None:
            if left[ticket.stream]:
                left[ticket.stream] -= 1
                delivered.append(ticket.stream)
            else:
                source.end_stream(ticket.stream)
        return delivered

    taken = data.draw(st.integers(0, sum(lengths)))
    expected = run(order(len(lengths), iter(int, 1)), list(lengths), sum(lengths))
    head = expected[:taken]
    given_of = [head.count(stream) for stream in range(len(lengths))]
    resumed = order(len(lengths), iter(int, 1))
    ended = {stream for stream, length in enumerate(lengths) if length == 0}
    resumed.leave_out(ended, head[-1] if head else -1, given_of)
    left = [length - given for length, given in zip(lengths, given_of, strict=True)]
    assert run(resumed, left, sum(lengths)) == expected[taken:]


def test_a_batch_of_a_stream_is_seeded_by_its_place_in_it() -> None:
    source = Order(2, is_bound=True, seed_of=lambda _, number: number)
    source.start_epoch(iter(int, 1))
    source.draw()
    source.end_stream(0)
    seeds = [ticket.seed for _ in range(3) if (ticket := source.draw())]
    assert seeds == [1, 3, 5]
