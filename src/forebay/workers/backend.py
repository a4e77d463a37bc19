"""Which kind of crew makes the batches.

Covers: choosing it. Does not cover: what a crew does (crew.py).
"""

from __future__ import annotations

from typing import Any

from forebay.transport.arena import Arena
from forebay.workers.crew import Crew
from forebay.workers.job import Job


def start_crew(
    context: Any, job: Job, arena: Arena, streams_of: tuple[tuple[int, ...], ...]
) -> Crew:
    """A crew whose workers carry `streams_of`."""
    return Crew(context, job, arena, streams_of)
