"""What is kept of one run: frozen values, to and from JSON, and the best of a grid. Pure.

Covers: contestants, outcomes, their file format with its check. Does not cover: taking them
(run.py) or showing them (observe/survive_page.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, final, get_args

Verdict: TypeAlias = Literal["survived", "killed", "broken"]
SCHEMA = "forebay survive 1"


@final
@dataclass(frozen=True, slots=True)
class Contestant:
    """One loader and its setting.

    Attributes:
        label: For the tables.
        loader: "torch" or "forebay".
        num_workers: None takes the workload's.
        prefetch_factor: None takes the loader's own default.
        persistent: torch's `persistent_workers`.
        role: What it stands for: "default", "recipe", "grid" or "forebay".
    """

    label: str
    loader: str
    num_workers: int | None
    prefetch_factor: int | None
    persistent: bool
    role: str


def make_contestants(cpus: int) -> tuple[Contestant, ...]:
    """torch as it comes, by the article's recipe, over a grid; and forebay as it comes."""
    recipe = max(1, min(4, cpus - 2))
    grid = [(0, None), (1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
    return (
        Contestant("torch", "torch", None, None, False, "default"),
        Contestant("torch, recipe", "torch", recipe, 1, True, "recipe"),
        *(
            Contestant(f"torch {workers}x{ahead or 0}", "torch", workers, ahead, False, "grid")
            for workers, ahead in grid
        ),
        Contestant("forebay", "forebay", None, None, False, "forebay"),
    )


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        workload, budget_bytes, contestant, round: Which.
        verdict: What became of it.
        who: "main", "worker" or "neighbour" when it was killed.
        why: The last words of one that broke.
        samples_per_s: After the first batches; 0 when there were no more.
        peak_bytes: The most that was held beyond the level before the loader, from outside.
        kept: Whether that was within the budget.
        batches: How many arrived.
        digest: Of the first batches, equal for equal ones.
        oom_kills: As the kernel counted them.
        explain: forebay's own words.
    """

    workload: str
    budget_bytes: int
    contestant: str
    round: int
    verdict: Verdict
    who: str
    why: str
    samples_per_s: float
    peak_bytes: int
    kept: bool
    batches: int
    digest: str
    oom_kills: int
    explain: str


def as_data(
    outcomes: Sequence[Outcome], machine: dict[str, Any], contestants: Sequence[Contestant]
) -> dict[str, Any]:
    """For JSON."""
    return {
        "schema": SCHEMA,
        "machine": machine,
        "contestants": [asdict(contestant) for contestant in contestants],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def read_data(data: Any) -> tuple[tuple[Outcome, ...], tuple[Contestant, ...]]:
    """The outcomes in what `as_data` made.

    Raises:
        ValueError: It is something else, or a value has another type.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        message = f"this is no result of `forebay survive`: its schema is not {SCHEMA!r}"
        raise ValueError(message)
    outcomes = tuple(Outcome(**_check(Outcome, each)) for each in data["outcomes"])
    for outcome in outcomes:
        if outcome.verdict not in get_args(Verdict):
            message = f"{outcome.verdict!r} is no verdict; known: {get_args(Verdict)}"
            raise ValueError(message)
    return outcomes, tuple(Contestant(**_check(Contestant, each)) for each in data["contestants"])


_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "Verdict": str,
}


def _check(kind: Any, each: Any) -> dict[str, Any]:
    names = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(each, dict) or each.keys() != names.keys():
        message = f"a {kind.__name__} has the fields {sorted(names)}"
        raise ValueError(message)
    for name, type_name in names.items():
        allowed = _TYPES.get(type_name)
        if allowed is not None and not isinstance(each[name], allowed):
            message = f"{name} of a {kind.__name__} must be {type_name}, not {each[name]!r}"
            raise ValueError(message)
    return each


# -- what follows from outcomes -------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one budget, over all rounds.

    Attributes:
        label: The contestant; for the best of the grid, its setting too.
        verdict: The worst of the rounds.
        samples_per_s: The median; 0 unless it survived every round.
        peak_bytes: The largest.
        kept: Whether the budget was kept in every round.
        who: Who was killed, if anybody.
    """

    label: str
    verdict: Verdict
    samples_per_s: float
    peak_bytes: int
    kept: bool
    who: str


_BAD = ("killed", "broken", "survived")


def summarise(label: str, outcomes: Sequence[Outcome]) -> Row:
    """The rounds of one contestant as one row."""
    verdict = min((outcome.verdict for outcome in outcomes), key=_BAD.index)
    speeds = [outcome.samples_per_s for outcome in outcomes]
    return Row(
        label=label,
        verdict=verdict,
        samples_per_s=statistics.median(speeds) if verdict == "survived" else 0.0,
        peak_bytes=max(outcome.peak_bytes for outcome in outcomes),
        kept=all(outcome.kept for outcome in outcomes),
        who=next((outcome.who for outcome in outcomes if outcome.who), ""),
    )


def choose_best(rows: Iterable[Row]) -> Row | None:
    """The fastest that survived every round; None when nobody did."""
    alive = [row for row in rows if row.verdict == "survived"]
    return max(alive, key=lambda row: row.samples_per_s, default=None)


@final
@dataclass(frozen=True, slots=True)
class Case:
    """All contestants on one workload within one budget.

    Attributes:
        workload: Its name.
        budget_bytes: The budget.
        default: torch as it comes.
        recipe: torch by the article's recipe.
        best: The fastest of torch's settings with workers that survived; None when none did.
        alone: torch without workers: every batch is made in the training process, between two
            of its steps.
        forebay: forebay.
        is_same: Whether forebay's first batches were torch's; None where torch with as many
            workers survived at none of the budgets, so that there is nothing to compare.
    """

    workload: str
    budget_bytes: int
    default: Row | None
    recipe: Row | None
    best: Row | None
    alone: Row | None
    forebay: Row | None
    is_same: bool | None

    @property
    def ratio(self) -> float | None:
        """forebay's speed over that of torch's best surviving workers; None without any."""
        return _divide(self.forebay, self.best)

    @property
    def ratio_alone(self) -> float | None:
        """The same over torch without workers."""
        return _divide(self.forebay, self.alone)

    @property
    def is_lone(self) -> bool:
        """Whether no setting of torch's survived."""
        is_alone_dead = self.alone is None or self.alone.verdict != "survived"
        return self.best is None and is_alone_dead


def _divide(ours: Row | None, torchs: Row | None) -> float | None:
    if ours is None or torchs is None or not torchs.samples_per_s:
        return None
    return ours.samples_per_s / torchs.samples_per_s


def make_cases(outcomes: Sequence[Outcome], contestants: Sequence[Contestant]) -> tuple[Case, ...]:
    """One case for each workload and budget, in the order in which they were run."""
    keys = dict.fromkeys((outcome.workload, outcome.budget_bytes) for outcome in outcomes)
    return tuple(_make_case(*key, outcomes, contestants) for key in keys)


def _make_case(
    workload: str,
    budget_bytes: int,
    outcomes: Sequence[Outcome],
    contestants: Sequence[Contestant],
) -> Case:
    here = [o for o in outcomes if (o.workload, o.budget_bytes) == (workload, budget_bytes)]
    rows = {}
    for contestant in contestants:
        rounds = [o for o in here if o.contestant == contestant.label]
        if rounds:
            rows[contestant.label] = (contestant.role, summarise(contestant.label, rounds))

    def find(role: str) -> Row | None:
        return next((row for each, row in rows.values() if each == role), None)

    without = {each.label for each in contestants if each.num_workers == 0}
    torchs = {label: row for label, (role, row) in rows.items() if role != "forebay"}
    return Case(
        workload=workload,
        budget_bytes=budget_bytes,
        default=find("default"),
        recipe=find("recipe"),
        best=choose_best(row for label, row in torchs.items() if label not in without),
        alone=next((row for label, row in torchs.items() if label in without), None),
        forebay=find("forebay"),
        is_same=_is_same(workload, here, outcomes, contestants),
    )


def _is_same(
    workload: str,
    here: Sequence[Outcome],
    outcomes: Sequence[Outcome],
    contestants: Sequence[Contestant],
) -> bool | None:
    """Compares equal numbers of workers only: what a split stream yields depends on it.

    The first batches do not depend on the budget, so torch at any budget will do.
    """
    asked = {each.label: each for each in contestants if each.num_workers is None}
    torchs = {
        o.digest
        for o in outcomes
        if o.workload == workload and o.digest and o.contestant in asked
        if asked[o.contestant].loader == "torch"
    }
    ours = {
        o.digest
        for o in here
        if o.digest and o.contestant in asked and asked[o.contestant].loader == "forebay"
    }
    return ours == torchs if ours and torchs else None
