"""Whether the very first fetch must run alone.

Covers: the time before anything is known of what fetches take. Does not cover: later ones,
which are promised what those before them took (admission.py).
"""

from __future__ import annotations

from typing import final

from forebay.flow.admission import Admission
from forebay.units import GIB

_AMPLE_BYTES = GIB
"""Free bytes a stream from which the first fetches may run at once all the same."""

_MARGIN = 8
"""How often what a first fetch has taken so far must be free for every stream, for more to
start: samples that were collected are still to be stacked, which doubles them."""


@final
class SlowStart:
    """The first fetch shows what fetches take; the others begin when it has landed.

    That costs the time of one fetch, once in the life of a loader: later iterators know.
    """

    def __init__(self, admission: Admission, num_streams: int) -> None:
        self._admission = admission
        self._num_streams = num_streams
        self._is_ended = False

    @property
    def is_on(self) -> bool:
        """Whether no second fetch may begin."""
        ledger = self._admission.ledger
        return self._is_waiting and ledger.free_bytes < _AMPLE_BYTES * self._num_streams

    @property
    def is_cheap(self) -> bool:
        """Whether the first fetch, which is still at it, has taken next to nothing so far."""
        ledger = self._admission.ledger
        taken = max(0, ledger.workers_bytes - ledger.workers_least_bytes)
        return self._is_waiting and _MARGIN * taken * self._num_streams <= ledger.free_bytes

    def end(self) -> None:
        """Let the others begin: the first may be waiting for one of them."""
        self._is_ended = True

    @property
    def _is_waiting(self) -> bool:
        return not self._is_ended and not self._admission.sizes.seen
