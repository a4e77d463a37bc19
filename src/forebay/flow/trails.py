"""What streams did since they last said where they stood: the way back to the same place.

Covers: following what streams are told and what they answer, and the way by which another
worker brings a stream to where it was when its own died. Does not cover: replacing a worker
(recovery.py), or what the consumer has got (progress.py).

A stream's random state runs on from batch to batch. Taking it costs 0.1 ms, so it is not taken
with every batch but twice a second; what the stream made since is made once more, for nobody,
and leaves the state as it was. A stream of an iterable dataset without a state of its own is
run from its start. Batches that are seeded one by one need no way at all.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias, final

from forebay.errors import StateUnavailable
from forebay.workers.messages import Failed, Resume, StreamEnd
from forebay.workers.snapshot import Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.flow.order import Ticket
    from forebay.flow.progress import Progress
    from forebay.workers.messages import Done, Stands

Step: TypeAlias = "Ticket | Resume"
"""What a stream was told to do: make a batch, or begin an epoch."""


@final
class _Trail:
    """One stream's: where it stood, and what it was told since.

    Fields as those of `Start`; `made` is as of now, `made_then` as of the snapshot, which is
    still pickled unless the loader resumed from it.
    """

    __slots__ = (
        "epoch",
        "has_ended",
        "indices",
        "made",
        "made_then",
        "skipped",
        "snapshot",
        "steps",
    )

    def __init__(self, start: Start | None) -> None:
        self.snapshot: Any = start.snapshot if start is not None else None
        self.made = self.made_then = start.made if start is not None else 0
        self.skipped = start.skipped if start is not None else 0
        self.indices = start.indices if start is not None else None
        self.epoch = start.epoch if start is not None else 0
        self.has_ended = start.has_ended if start is not None else False
        self.steps: deque[Step] = deque()

    def stand(self, snapshot: bytes, *, has_ended: bool) -> None:
        """It has said where it stands now."""
        self.snapshot, self.made_then, self.skipped = snapshot, self.made, 0
        self.has_ended = has_ended

    def forget_through(self, serial: int) -> None:
        """What it did up to this ticket is in its snapshot."""
        while self.steps:
            step = self.steps.popleft()
            if not isinstance(step, Resume) and step.serial == serial:
                return

    def compose(self) -> Start:
        """Where a worker begins the way.

        Raises:
            StateUnavailable: The dataset could not tell its state.
        """
        snapshot = self.snapshot
        if isinstance(snapshot, bytes):
            snapshot = pickle.loads(snapshot)
            if "fault" in snapshot:
                raise StateUnavailable.about(snapshot["fault"])
        return Start(
            snapshot, self.made_then, self.skipped, self.indices, self.epoch, self.has_ended
        )


@final
class Trails:
    """The trails of all streams of one iterator.

    Args:
        progress: Of the same iterator; tells what kind of dataset they run through.
        starts: Where they begin, if not as they are seeded.
    """

    def __init__(self, progress: Progress, starts: tuple[Start, ...]) -> None:
        self._progress = progress
        self._is_iterable = progress.is_iterable
        numbers = range(progress.num_streams)
        self._trails = [_Trail(starts[number] if starts else None) for number in numbers]

    @property
    def begins_anew(self) -> bool:
        """Whether a stream that is brought back is run from its start."""
        return self._is_iterable and not self._progress.has_stateful_dataset

    def note_sent(self, ticket: Ticket, stream: int) -> None:
        """A stream got a ticket."""
        if ticket.seed is None or self._is_iterable:
            self._trails[stream].steps.append(ticket)

    def note_resume(self, resume: Resume) -> None:
        """All streams were told to begin another epoch."""
        for trail in self._trails:
            trail.steps.append(resume)

    def note_answer(self, stream: int, ticket: Ticket, answer: Done | StreamEnd | Failed) -> None:
        """A stream is done with a ticket."""
        if ticket.seed is not None and not self._is_iterable:
            return
        trail = self._trails[stream]
        is_end = isinstance(answer, StreamEnd)
        if not isinstance(answer, (Failed, StreamEnd)):
            trail.made += 1
        if not isinstance(answer, Failed) and answer.snapshot:
            trail.forget_through(ticket.serial)
            trail.stand(answer.snapshot, has_ended=is_end)
        elif self._is_iterable:
            trail.steps.remove(ticket)
            if is_end:
                trail.has_ended = True
            else:
                trail.skipped, trail.indices = trail.skipped + 1, ticket.indices

    def note_stands(self, stands: Stands) -> None:
        """A stream has begun an epoch, and says where it stood then."""
        trail = self._trails[stands.stream]
        resume = Resume(stands.epoch)
        if resume not in trail.steps:
            return  # the first epoch, or asked between two: nothing that is not known
        while trail.steps.popleft() != resume:
            pass
        trail.made, trail.epoch = 0, self._progress.first_epoch + stands.epoch
        trail.stand(stands.snapshot, has_ended=False)

    def find_way(self, stream: int, lost: Iterable[int]) -> tuple[Start, list[Step]]:
        """How another worker comes to where the stream was.

        Args:
            stream: Which.
            lost: Serials that it had in hand, and that will be told to it anew.

        Returns:
            Where to begin, and what to do from there, for nobody.

        Raises:
            StateUnavailable: The dataset could not tell its state.
        """
        trail, missing = self._trails[stream], set(lost)
        while trail.steps and not isinstance(trail.steps[-1], Resume):
            if trail.steps[-1].serial not in missing:
                break
            trail.steps.pop()
        return trail.compose(), list(trail.steps)

    def forget(self, stream: int, serial: int) -> None:
        """A batch is not made again, come what may."""
        steps = self._trails[stream].steps
        for step in [step for step in steps if not isinstance(step, Resume)]:
            if step.serial == serial:
                steps.remove(step)
