"""What is said about the demo's contest, on its page and in the terminal.

Covers: headline, lead, table, how it was measured: all as plain text, all pure.
Does not cover: figures and layout (demo_page.py). The words follow the numbers:
where forebay is not better, they say so.
"""

from __future__ import annotations

from typing import Final

from forebay.bench.contest import Contest, Entry
from forebay.bench.contestant import Broken, Finished, Killed, Run
from forebay.bench.sampler import GROUP_PERIOD_S, TREE_PERIOD_S
from forebay.units import format_bytes

SAME_FRAC: Final = 0.05
"""Differences smaller than this are not called differences: runs vary by as much."""


def headline(contest: Contest) -> str:
    """The result in one sentence, whatever it is."""
    ours, theirs = own_entry(contest), torch_entries(contest)
    if not isinstance(ours.limited.ending, Finished):
        return f"forebay did not finish: {ending_words(ours.limited)}."
    killed = [each for each in theirs if isinstance(each.limited.ending, Killed)]
    if killed and len(killed) == len(theirs):
        return "Under the same limit torch's loader was killed. forebay trained to the end."
    if killed:
        return f"Under the same limit {killed[0].title} was killed. forebay trained to the end."
    least = min(theirs, key=lambda each: each.figures.footprint_bytes)
    ratio = ours.figures.footprint_bytes / max(1, least.figures.footprint_bytes)
    if ratio < 1 - SAME_FRAC:
        return f"The same training with {ratio:.0%} of the memory that {least.title} took."
    return f"forebay took {ratio:.0%} of the memory of {least.title} on this machine."


def lead(contest: Contest) -> str:
    """What was done, in two or three sentences with the numbers."""
    job = contest.job
    words = (
        f"A small residual network was trained for {job.steps} steps on batches of "
        f"{job.batch_size} photographs ({format_bytes(job.batch_bytes)} each), three times: "
        f"fed by torch's DataLoader, by the same with prefetch_factor=1, and by forebay with a "
        f"budget of {format_bytes(job.budget_bytes)}."
    )
    if saw_same_batches(contest):
        words += " All three saw the very same batches, bit for bit."
    if contest.unenforced is not None:
        words += " No limit could be enforced here, so nobody was killed."
    return words


def saw_same_batches(contest: Contest) -> bool:
    """Whether every contestant finished and their checksums agree."""
    endings = [each.measured.ending for each in contest.entries]
    digests = {each.digest if isinstance(each, Finished) else None for each in endings}
    return len(digests) == 1 and None not in digests


def ending_words(run: Run) -> str:
    """How a run ended, for people."""
    match run.ending:
        case Finished(oom_kills=0):
            return "finished"
        case Finished(oom_kills=kills):
            return f"finished, {kills} killed workers replaced"
        case Killed():
            return f"killed {_after(run)}"
        case Broken(why):
            return f"failed {_after(run)}: {why.splitlines()[-1]}"


def _after(run: Run) -> str:
    count = len(run.steps)
    if not count:
        return "before its first step"
    return f"after {count} step{'s' if count > 1 else ''}"


def own_entry(contest: Contest) -> Entry:
    """forebay's."""
    return next(each for each in contest.entries if each.name == "forebay")


def torch_entries(contest: Contest) -> list[Entry]:
    """Those of torch, in the order of the contest."""
    return [each for each in contest.entries if each.name != "forebay"]


TABLE_COLUMNS: Final = (
    "",
    "under the limit",
    "images/s",
    "peak of the whole job",
    "peak footprint of the loader",
    "workers' own memory",
    "shared memory (batches)",
    "training process above its own need",
    "waited for batches",
    "first batch after",
    "final loss",
)


def table_rows(contest: Contest) -> list[list[str]]:
    """The cells of `TABLE_COLUMNS` as plain text, one row a contestant, for page and terminal."""
    return [_row_words(each, contest.unenforced is None) for each in contest.entries]


def _row_words(entry: Entry, enforced: bool) -> list[str]:
    figures = entry.figures
    return [
        entry.title,
        ending_words(entry.limited) if enforced else "no limit set",
        _number(figures.images_per_s, "{:,.0f}"),
        format_bytes(figures.job_peak_bytes),
        format_bytes(figures.footprint_bytes),
        format_bytes(figures.workers_anon_bytes),
        format_bytes(figures.shmem_bytes),
        format_bytes(figures.main_growth_bytes),
        f"{figures.waited_s:.1f} s",
        _number(figures.first_batch_s, "{:.2f} s"),
        _number(figures.final_loss, "{:.4f}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


def method(contest: Contest) -> list[str]:
    """How it was measured, one paragraph each."""
    job = contest.job
    grouped = contest.unenforced is None
    where = (
        f"a memory cgroup of its own, entered before the program starts, and is read from outside "
        f"every {GROUP_PERIOD_S * 1000:.0f} ms (anonymous and shared memory; file pages that the "
        "kernel can drop are not counted)"
        if grouped
        else f"a process tree that is read from outside every {TREE_PERIOD_S * 1000:.0f} ms "
        "(proportional set sizes; short peaks may be missed), since no cgroup could be made"
    )
    setting = (
        f"Every contestant runs alone in a fresh process, one after another, in {where}. "
        f"Each has {job.workers} workers; training uses {job.threads} thread(s) in all three."
    )
    texts = [setting, *MEANING]
    texts.append(_limit_words(contest) if contest.unenforced is None else contest.unenforced)
    return texts


MEANING: Final = (
    (
        "The footprint of the loader is, at each moment, what the whole job holds less what the "
        "training process itself holds: the workers' own memory, and all shared memory, which is "
        "the batches, also the one being trained on. Memory that a forked worker only shares with "
        "the training process is not the worker's."
    ),
    (
        "What a loader adds inside the training process cannot be told from training by looking. "
        "It is bounded instead: before it asks for a batch, the job trains a throw-away model on "
        "one made-up batch and gives that memory back. The peak of that, less the made-up batch, "
        "is the job's own need. How far the training process later rises above its own part of "
        "it stands in the table; some 20 MiB of that are training itself, which peaks differently "
        "in each run. Batches that a loader copies into the training process are in there too."
    ),
    (
        "Speed is measured from the end of the first step; the time to the first batch has a "
        "column of its own."
    ),
)


def _limit_words(contest: Contest) -> str:
    return (
        f"The limit was {format_bytes(contest.limit_bytes)}. Unless you chose another it is the "
        f"job's own need ({format_bytes(contest.own_need_bytes)}), plus the budget given to "
        f"forebay ({format_bytes(contest.job.budget_bytes)}), plus a little for the kernel. Swap "
        "counts. Whoever is killed runs once more without it."
    )
