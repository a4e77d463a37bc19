"""Which kind of crew makes the batches.

Covers: choosing it. Does not cover: what a crew does (crew.py, threads.py).
"""

from __future__ import annotations

from typing import Any, cast

from forebay.transport.arena import Arena
from forebay.workers.crew import Crew
from forebay.workers.job import Job
from forebay.workers.threads import ThreadCrew


def start_crew(
    context: Any,
    job: Job,
    arena: Arena,
    streams_of: tuple[tuple[int, ...], ...],
    *,
    in_threads: bool = False,
) -> Crew:
    """A crew whose workers carry `streams_of`.

    Args:
        context: The user's multiprocessing context; threads need none.
        job: What workers make.
        arena: Where they put it.
        streams_of: For each worker the streams that it carries.
        in_threads: Whether they are threads of this process.
    """
    if in_threads:
        # Not a Crew by name: the same verbs, which is all that is asked of it.
        return cast("Crew", ThreadCrew(job, arena, streams_of))
    return Crew(context, job, arena, streams_of)
