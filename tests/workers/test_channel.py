"""Messages arrive whole and in order, or not at all; nobody in the main process waits to send."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.units import MIB
from forebay.workers.channel import Channel, ChannelClosed, forget_channels, make_channel_sockets
from forebay.workers.messages import Done, Task

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Main's end, which never waits, and a worker's, which does."""
    ours, theirs = make_channel_sockets()
    main, worker = Channel(ours, is_blocking=False), Channel(theirs, is_blocking=True)
    yield main, worker
    main.close()
    worker.close()


def receive(channel: Channel, count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        messages += channel.receive()
    return messages


def test_messages_arrive_as_they_were_in_order(pair: Pair) -> None:
    main, worker = pair
    sent = [Task(k, k % 2, [k, k + 1], None, 4096 * k, 8192, False) for k in range(50)]
    for message in sent:
        main.send(message)
    assert receive(worker, 50) == sent


def test_many_small_messages_come_in_one_read(pair: Pair) -> None:
    main, worker = pair
    for k in range(100):
        worker.send(k)
    assert main.receive() == list(range(100))


def test_posted_messages_leave_together_with_the_next_flush(pair: Pair) -> None:
    main, worker = pair
    main.post("a")
    main.post("b")
    main.flush()
    assert not main.has_unsent
    assert worker.receive() == ["a", "b"]


def test_main_does_not_wait_for_messages(pair: Pair) -> None:
    main, worker = pair
    assert main.receive() == []
    worker.send(1)
    assert main.receive() == [1]


def test_main_does_not_wait_for_a_full_socket(pair: Pair) -> None:
    main, worker = pair
    large = os.urandom(8 * MIB)
    main.send(large)
    main.send("after")
    assert main.has_unsent
    received: list[Any] = []
    worker._sock.setblocking(False)
    while len(received) < 2:
        main.flush()
        received += worker.receive()
    assert received == [large, "after"]
    assert not main.has_unsent


@given(st.lists(st.binary(max_size=3000), max_size=8), st.integers(1, 700))
@settings(deadline=None)
def test_frames_cut_anywhere_are_put_together(messages: list[bytes], piece: int) -> None:
    ours, theirs = make_channel_sockets()
    writer = Channel(ours, is_blocking=False)
    reader = Channel(theirs, is_blocking=False)
    for message in messages:
        writer.post(message)
    stream, received = bytes(writer._unsent), []
    for at in range(0, len(stream), piece):
        ours.send(stream[at : at + piece])
        received += reader.receive()
    assert received == messages
    writer.close()
    reader.close()


def test_a_message_that_its_sender_did_not_finish_is_never_complete(pair: Pair) -> None:
    main, worker = pair
    worker.send("whole")
    frame = bytearray()
    worker.post(Done(1, b"head" * 100, (), (), 0, 0, None))
    frame += worker._unsent
    worker._sock.send(frame[:50])
    worker._sock.close()
    assert main.receive() == ["whole"]
    with pytest.raises(ChannelClosed):
        main.receive()


def test_what_was_said_before_the_end_is_received_first(pair: Pair) -> None:
    main, worker = pair
    worker.send("last words")
    worker.close()
    assert main.receive() == ["last words"]
    with pytest.raises(ChannelClosed):
        main.receive()


@pytest.mark.parametrize(
    "say",
    [lambda end: end.send(1), lambda end: (end.post(1), end.flush())],
    ids=["send", "post and flush"],
)
def test_sending_to_nobody_raises(pair: Pair, say: Callable[[Channel], Any]) -> None:
    main, worker = pair
    worker.close()
    with pytest.raises(ChannelClosed):
        say(main)


def test_closing_twice_is_harmless(pair: Pair) -> None:
    main, _ = pair
    main.close()
    main.close()
    assert main.fileno() == -1


# -- descriptors -----------------------------------------------------------------------------


def test_descriptors_arrive_with_their_messages_in_order(pair: Pair) -> None:
    main, worker = pair
    worker.expect_fds()
    pipes = [os.pipe() for _ in range(3)]
    for number, (reader, _) in enumerate(pipes):
        main.send(number, (reader,))
    assert receive(worker, 3) == [0, 1, 2]
    for number, (reader, writer) in enumerate(pipes):
        fd = worker.take_fd()
        os.write(writer, b"%d" % number)
        assert os.read(fd, 1) == b"%d" % number
        for each in (fd, reader, writer):
            os.close(each)


def test_a_descriptor_that_did_not_come_is_told(pair: Pair) -> None:
    main, worker = pair
    worker.expect_fds()
    main.send("without")
    worker.receive()
    assert worker.take_fd() == -1


def test_a_message_with_a_descriptor_waits_for_those_before_it(pair: Pair) -> None:
    main, worker = pair
    worker.expect_fds()
    reader, writer = os.pipe()
    main.post("first")
    main.send("second", (reader,))
    assert receive(worker, 2) == ["first", "second"]
    assert not main._sock.getblocking()
    for fd in (worker.take_fd(), reader, writer):
        os.close(fd)


def test_descriptors_that_nobody_took_are_closed_with_the_channel(pair: Pair) -> None:
    main, worker = pair
    worker.expect_fds()
    reader, writer = os.pipe()
    main.send("here", (reader,))
    os.close(reader)
    worker.receive()
    worker.close()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"nobody reads this")
    os.close(writer)


# -- forks -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_of_user_code_does_not_keep_channels_open(pair: Pair) -> None:
    """Otherwise a worker would not learn that the main process has ended."""
    main, worker = pair
    go, done = os.pipe()
    pid = os.fork()
    if not pid:
        closed = main.fileno() == worker.fileno() == -1
        os.read(go, 1)
        os._exit(0 if closed else 1)
    main.close()
    with pytest.raises(ChannelClosed):
        worker.receive()  # the end is heard while the child still lives
    os.write(done, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(go)
    os.close(done)


def test_forgotten_channels_are_closed_and_others_made_after_live() -> None:
    ours, theirs = socket.socketpair()
    before = Channel(ours, is_blocking=False)
    forget_channels()
    assert before.fileno() == -1
    after = Channel(theirs, is_blocking=False)
    assert after.fileno() >= 0
    after.close()


def test_a_channel_that_dies_in_a_cycle_is_closed_by_its_owner_only() -> None:
    class Owner:
        """Younger than its channel's socket, which the collector meets first."""

        def __init__(self, channel: Channel) -> None:
            self.channel, self.itself = channel, self

        def __del__(self) -> None:
            self.channel.send(b"last words")
            self.channel.close()

    ours, theirs = socket.socketpair()
    other = Channel(theirs, is_blocking=True)
    owner = Owner(Channel(ours, is_blocking=False))
    del ours, owner
    gc.collect()
    assert other.receive() == [b"last words"]
    other.close()
