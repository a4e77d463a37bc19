"""What the readings of a job are taken to mean."""

from __future__ import annotations

from forebay.bench.sampler import FROM_GROUP, Sample, Trace
from tests.budget.harness import MIB, Batch, Report, Verdict, judge
from tests.budget.workloads import Tiny, Workload

LEVEL_MIB = 200
BUDGET_MIB = 50
TWO_SIZES = Workload(
    "two sizes", Tiny, 8, 1, (1, 2, 3), workers=1, size_class=lambda serial: int(serial >= 5)
)


def judged(held_mib: dict[float, int], consumer_mib: int = 0) -> Verdict:
    """Batch n is begun at n + 0.1 s, asked for at n + 0.2 s, delivered at n + 0.6 s.

    `held_mib` maps a time to what the group held above its level. Batches 5 to 7 are
    of a second size; the start is over at 1.6 s.
    """
    batches = [Batch(n + 0.2, n + 0.6, consumer_mib * MIB, str(n)) for n in range(8)]
    report = Report(0.0, tuple(batches), ended_s=9.0, error=None, stats=None)
    readings = {-0.1: 0, **held_mib}
    samples = [Sample(t, (LEVEL_MIB + mib) * MIB, 0) for t, mib in readings.items()]
    starts = [(n, n + 0.1) for n in range(8)]
    return judge(TWO_SIZES, BUDGET_MIB * MIB, report, starts, Trace(FROM_GROUP, tuple(samples), ()))


def test_the_level_before_the_loader_is_not_counted() -> None:
    assert judged({3.0: 40}).peak_bytes == 40 * MIB


def test_a_reading_beyond_the_budget_breaks_it() -> None:
    assert not judged({3.0: 51, 4.0: 10}).kept


def test_a_reading_at_the_budget_keeps_it() -> None:
    assert judged({3.0: 50}).kept


def test_an_overshoot_at_the_start_is_reported_apart() -> None:
    verdict = judged({1.0: 60, 3.0: 40})
    assert verdict.kept
    assert verdict.first_overshoot_bytes == 10 * MIB


def test_an_overshoot_at_the_first_batch_of_a_size_is_reported_apart() -> None:
    verdict = judged({3.0: 40, 5.3: 70})
    assert verdict.kept
    assert verdict.first_overshoot_bytes == 20 * MIB


def test_an_overshoot_at_the_second_batch_of_a_size_breaks_the_budget() -> None:
    assert not judged({3.0: 40, 6.3: 70}).kept


def test_what_the_consumer_holds_is_not_the_loaders() -> None:
    assert judged({3.0: 40}, consumer_mib=15).peak_bytes == 25 * MIB


def test_shared_memory_counts_like_any_other() -> None:
    trace = Trace(FROM_GROUP, (Sample(-0.1, 0, 0), Sample(3.0, 30 * MIB, 30 * MIB)), ())
    report = Report(
        0.0,
        tuple(Batch(n + 0.2, n + 0.6, 0, str(n)) for n in range(8)),
        ended_s=9.0,
        error=None,
        stats=None,
    )
    assert not judge(TWO_SIZES, BUDGET_MIB * MIB, report, [], trace).kept


def test_what_is_read_after_the_end_does_not_count() -> None:
    assert judged({3.0: 10, 9.5: 99}).peak_bytes == 10 * MIB


def test_a_job_that_delivers_nothing_keeps_no_budget() -> None:
    report = Report(0.0, (), ended_s=9.0, error="it died", stats=None)
    assert not judge(TWO_SIZES, BUDGET_MIB * MIB, report, [], Trace(FROM_GROUP, (), ())).kept
