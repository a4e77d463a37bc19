"""Framed messages, and descriptors, over a local socket.

Covers: sending, receiving, end-of-file, and not blocking the main process. Does not cover:
what the messages mean (messages.py).

A stream socket with a length before each frame: one read takes all that waits (many small
batches cost one system call), and a frame that its sender did not finish before it was
killed is simply never complete.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from typing import Any, final

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
_MAX_FDS = 16

_channels: set[Channel] = set()
"""Those that are open. Held, not only known: where a loader dies in a cycle of garbage, the
collector finalises all of it in any order, and a socket that it closed first could not be used
any more to end the workers."""


class ChannelClosed(Exception):  # noqa: N818 - an end, not a mistake
    """The other side has ended, or its end was closed."""


@final
class Channel:
    """One end of a connection between two processes of forebay.

    Args:
        sock: A connected stream socket; the channel owns it.
        is_blocking: Whether `send` and `receive` wait. In main they do not: what the
            socket does not take is kept and sent by the next `flush`.
    """

    def __init__(self, sock: socket.socket, *, is_blocking: bool) -> None:
        sock.setblocking(is_blocking)
        self._sock = sock
        self._is_blocking = is_blocking
        self._received = bytearray()
        self._unsent: bytearray = bytearray()
        self._fds: list[int] = []
        self._poller: select.poll | None = None
        _channels.add(self)

    def fileno(self) -> int:
        """The socket's descriptor, or -1 when closed."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a non-blocking channel still holds what its socket did not take."""
        return bool(self._unsent)

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send one message; with `fds`, copies of these descriptors arrive with it.

        Raises:
            ChannelClosed: Nobody is there to read it.
        """
        body = pickle.dumps(message, protocol=5)
        frame = _LENGTH.pack(len(body)) + body
        try:
            if fds:
                self._flush_wholly()
                sent = socket.send_fds(self._sock, [frame], list(fds))
                self._sock.setblocking(True)
                self._sock.sendall(frame[sent:])
                self._sock.setblocking(self._is_blocking)
            elif self._is_blocking:
                self._sock.sendall(frame)
            else:
                self._unsent += frame
                self.flush()
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ChannelClosed from error

    def post(self, message: object) -> None:
        """Keep one message for the next `flush`: several then cost one system call."""
        body = pickle.dumps(message, protocol=5)
        self._unsent += _LENGTH.pack(len(body))
        self._unsent += body

    def flush(self) -> None:
        """Hand over to the socket what it takes now.

        Raises:
            ChannelClosed: Nobody is there to read it.
        """
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed from error
            del self._unsent[:sent]

    def receive(self) -> list[Any]:
        """All complete messages: at least one when blocking, maybe none when not.

        Raises:
            ChannelClosed: The other side ended and all it said was received.
        """
        while True:
            messages = self._cut()
            if messages:
                return messages
            try:
                data = self._read()
            except BlockingIOError:
                return messages
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._received += data

    def has_waiting(self) -> bool:
        """Whether there is something to receive: a message, a part of one, or the end."""
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(self._sock.fileno(), select.POLLIN)
        return bool(self._poller.poll(0))

    def take_fd(self) -> int:
        """The next descriptor that came with a message, in the order of the messages.

        -1 when it did not arrive: the kernel drops it when this process may open no more.
        """
        return self._fds.pop(0) if self._fds else -1

    def close(self) -> None:
        """Close this end; harmless when it is closed."""
        self._sock.close()
        _channels.discard(self)
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds.clear()

    def _read(self) -> bytes:
        if self._is_control:
            data, fds, flags, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            # A read ends after a message with descriptors. One that was dropped keeps its place,
            # or a later one would be taken for it.
            self._fds += fds or ([-1] if flags & socket.MSG_CTRUNC else [])
            return data
        return self._sock.recv(_READ_BYTES)

    _is_control = False

    def expect_fds(self) -> None:
        """From now on descriptors may come along."""
        self._is_control = True

    def _flush_wholly(self) -> None:
        if self._unsent:
            self._sock.setblocking(True)
            self._sock.sendall(self._unsent)
            self._unsent.clear()
            self._sock.setblocking(self._is_blocking)

    def _cut(self) -> list[Any]:
        """The complete messages at the front of what was received."""
        received, at, end = self._received, 0, len(self._received)
        messages = []
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, at)
            if end - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            with memoryview(received) as view, view[at : at + length] as body:
                messages.append(pickle.loads(body))
            at += length
        if at:
            del received[:at]
        return messages


def make_channel_sockets() -> tuple[socket.socket, socket.socket]:
    """A connected pair: main's end, and the one that goes to a worker or a zygote."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def forget_channels() -> None:
    """Close every channel inherited from the process that this one was forked from.

    A forked child of user code must not keep the workers' channels open after us.
    """
    for channel in list(_channels):
        channel._sock.close()  # noqa: SLF001 - this module's own class
    _channels.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_channels)
