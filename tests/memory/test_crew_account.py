"""Growth counts at once, heaps that come and go do not, and a new worker has none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.crew_account import CrewAccount
from forebay.units import MIB

PAGES = MIB // 4096  # page faults of a MiB


class Crew:
    """Workers whose memory the test makes up, and an account that hears of it."""

    def __init__(self, *numbers: int) -> None:
        self.account = CrewAccount(5 * MIB, numbers)
        self.private = dict.fromkeys(numbers, 8 * MIB)
        self.faults = dict.fromkeys(numbers, 1000)
        self.t_s = 0.0

    def fetch(self, number: int, kept: int = 0, copied: int = 0, passing: int = 0) -> None:
        """A fetch that keeps, copies or takes and gives back so many MiB."""
        self.private[number] += (kept + copied) * MIB
        self.faults[number] += (kept + copied + passing) * PAGES
        anon = 100 * MIB + self.private[number] - copied * MIB
        made = ((kept + passing) * MIB, anon, -1)
        self.account.note_report(number, made, self.faults[number])

    def speak(self, number: int, faulted: float = 0.01) -> None:
        """A fetch that was not metered, with faults of so many MiB."""
        self.faults[number] += int(faulted * PAGES)
        self.account.note_report(number, None, self.faults[number])

    def read(self, *, is_warm: bool = True, promised: dict[int, int] | None = None) -> None:
        self.t_s += 0.2
        total = 5 * MIB + sum(self.private.values())
        self.account.note_reading(
            self.t_s, total, dict(self.private), promised or {}, is_warm=is_warm
        )

    def warm_up(self) -> None:
        for number in self.private:
            self.fetch(number)
        for _ in range(4):
            self.read()


def test_before_anything_was_made_the_guess_counts() -> None:
    crew = Crew(0, 1)
    assert crew.account.idle_bytes == 5 * MIB + 2 * 8 * MIB
    crew.private = {0: MIB, 1: MIB}
    crew.read(is_warm=False)
    assert crew.account.idle_bytes == 5 * MIB + 2 * 8 * MIB


def test_pages_that_are_copied_count_before_any_reading_sees_them() -> None:
    crew = Crew(0)
    crew.warm_up()
    before = crew.account.idle_bytes
    crew.fetch(0, copied=10)
    assert crew.account.idle_bytes == before + 10 * MIB
    assert crew.account.is_estimated(0)
    crew.read()
    assert crew.account.grown_of(0) == 10 * MIB
    assert not crew.account.is_estimated(0)


def test_memory_that_a_fetch_had_and_gave_back_is_no_growth() -> None:
    crew = Crew(0)
    crew.warm_up()
    for _ in range(20):
        crew.fetch(0, passing=60)
    assert crew.account.grown_of(0) == 0


def test_faults_that_readings_do_not_bear_out_are_counted_less_and_less() -> None:
    crew = Crew(0)
    crew.warm_up()
    for _ in range(12):
        crew.faults[0] += 50 * PAGES  # heap that comes and goes, sample by sample
        crew.account.note_report(0, None, crew.faults[0])
        crew.read()
    assert crew.account.ratio < 0.01


def test_a_step_that_was_seen_is_expected_of_every_ticket() -> None:
    crew = Crew(0, 1)
    crew.warm_up()
    crew.fetch(0, copied=4)
    assert crew.account.estimate_coming({0: 3}) == 12 * MIB
    assert crew.account.estimate_coming({1: 3}) == 0


def test_a_new_worker_has_not_grown_and_will_grow_as_the_old_one_did() -> None:
    crew = Crew(0)
    crew.warm_up()
    crew.fetch(0, copied=6)
    crew.read()
    crew.account.add(1, instead_of=0)
    assert crew.account.grown_of(1) == 0
    assert crew.account.step_of(1) == 6 * MIB
    both = crew.account.idle_bytes
    crew.account.remove(0)
    assert crew.account.idle_bytes <= both - 14 * MIB


def test_the_least_is_what_all_would_take_if_they_were_new() -> None:
    crew = Crew(0, 1)
    crew.warm_up()
    crew.fetch(0, kept=30)
    crew.read()
    assert crew.account.least_bytes == 5 * MIB + 2 * 8 * MIB
    assert crew.account.grown_bytes == 30 * MIB


def test_a_trend_is_told_and_noise_is_not() -> None:
    crew = Crew(0)
    crew.warm_up()
    for number in range(12):
        crew.private[0] += MIB // 4 if number % 2 else -MIB // 4
        crew.read()
    assert crew.account.growth_bytes_per_s == 0
    for _ in range(12):
        crew.fetch(0, copied=2)
        crew.read()
    assert 5 * MIB < crew.account.growth_bytes_per_s < 20 * MIB


def test_growth_that_no_fault_shows_is_believed_when_two_fetches_agree() -> None:
    """Faults may be taken for what fetches give back: then nothing but readings tells."""
    crew = Crew(0)
    crew.warm_up()
    before = crew.account.idle_bytes
    crew.private[0] += 20 * MIB
    crew.speak(0)
    crew.read()
    assert crew.account.idle_bytes < before + MIB
    crew.read()  # in the same fetch: it may be what that fetch has for itself
    assert crew.account.idle_bytes < before + MIB
    crew.speak(0)
    crew.read()
    assert crew.account.idle_bytes >= before + 20 * MIB


def test_what_was_promised_to_fetches_is_no_growth() -> None:
    crew = Crew(0)
    crew.warm_up()
    before = crew.account.idle_bytes
    crew.private[0] += 20 * MIB
    for _ in range(3):
        crew.fetch(0)
        crew.read(promised={0: 20 * MIB})
    assert crew.account.idle_bytes == before


def test_exact_sums_between_readings_count_when_some_agree() -> None:
    crew = Crew(0)
    crew.warm_up()
    there = crew.account.idle_bytes
    for size in (40, 60, 30):
        crew.account.note_sum(there + size * MIB, 10 * MIB)
        assert crew.account.idle_bytes == there
    crew.account.note_sum(there + 50 * MIB, 10 * MIB)
    assert crew.account.idle_bytes == there + 20 * MIB
    crew.account.note_sum(there, 10 * MIB)
    assert crew.account.idle_bytes == there


def test_faults_of_any_kind_are_suspected_until_exact_sums_clear_them() -> None:
    crew = Crew(0)
    crew.warm_up()
    crew.fetch(0, passing=60)
    assert crew.account.fresh_bytes == 0
    assert crew.account.suspected_bytes == 60 * MIB
    for _ in range(6):
        crew.account.note_growth(0)
    assert crew.account.suspected_bytes < MIB


def test_growth_beyond_the_faults_that_were_counted_makes_them_count_more() -> None:
    crew = Crew(0)
    crew.warm_up()
    crew.private[0] += 8 * MIB
    crew.speak(0, 5)
    crew.read()
    before = crew.account.idle_bytes
    crew.speak(0, 10)
    assert crew.account.idle_bytes > before + 12 * MIB


def test_faults_that_mapped_a_block_are_excused() -> None:
    crew = Crew(0)
    crew.warm_up()
    crew.faults[0] += 30 * PAGES
    crew.account.note_report(0, None, crew.faults[0], 25 * MIB)
    assert crew.account.fresh_bytes == 5 * MIB


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 5), st.booleans()),
        max_size=60,
    )
)
def test_growth_that_is_kept_or_copied_is_never_missed(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """With the ratio at its first value the book is never below what there is."""
    crew = Crew(0, 1)
    crew.warm_up()
    for number, kept, copied, is_read in steps:
        crew.fetch(number, kept=kept, copied=copied)
        if is_read:
            crew.read()
            crew.account.ratio = 1.0
        there = 5 * MIB + sum(crew.private.values())
        assert crew.account.idle_bytes >= there


def test_counters_that_go_backwards_and_unknown_workers_do_no_harm() -> None:
    crew = Crew(0)
    crew.warm_up()
    crew.account.note_report(0, (0, 0, 0), 0)
    crew.account.note_report(9, None, 5)
    crew.private = {7: MIB}
    crew.read()
    assert crew.account.idle_bytes >= 0
    assert crew.account.grown_bytes >= 0
