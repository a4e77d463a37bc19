"""Whether several workers produce the same samples.

Covers: comparing the first few samples of each worker of a stream. Does not cover: duplicates
later on.

The one idea: nobody can see from inside one process what the others yield, so each worker notes
digests of its first samples on a page that all of them share, and the one that finds its own
there already says so.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, final

from forebay.datasets.shared_file import SharedFile
from forebay.transport.codec import encode

SAMPLES = 4
"""One equal sample may be chance (a constant, an end marker), four in a row hardly."""

_MOST_WORKERS = 256
_LOOKED_AT_BYTES = 4096
_ENTRY = struct.Struct(f"<Q{16 * SAMPLES}s")


@final
class Witness:
    """The shared page. Made before the workers are."""

    def __init__(self) -> None:
        self._file: SharedFile | None = SharedFile.create(_MOST_WORKERS * _ENTRY.size)

    def find_twin(self, worker: int, epoch: int, samples: bytes) -> int | None:
        """Note what `worker` saw; the worker that saw the same in this epoch, if any did.

        Args:
            worker: Its number.
            epoch: A number that all workers of one epoch have, and no other epoch.
            samples: Their digests.
        """
        if self._file is None or worker >= _MOST_WORKERS:
            return None
        mine = _ENTRY.pack(epoch, samples)
        place = worker * _ENTRY.size
        self._file.view[place : place + _ENTRY.size] = mine
        # Written before read: of two twins at least the later one sees the other.
        for other in range(_MOST_WORKERS):
            place = other * _ENTRY.size
            if other != worker and self._file.view[place : place + _ENTRY.size] == mine:
                return other
        return None


def digest_sample(sample: Any) -> bytes:
    """16 bytes that are equal for equal samples; empty for one that cannot be pickled."""
    try:
        encoded = encode(sample)
    except Exception:  # whatever a type of the user's raises: it cannot be compared
        return b""
    digest = hashlib.blake2b(encoded.head, digest_size=16)
    for buffer in encoded.buffers:
        digest.update(buffer[:_LOOKED_AT_BYTES].tobytes())
    return digest.digest()
