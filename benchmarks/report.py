"""From the raw measures of a run to the tables of the README.

Covers: medians, spreads, ratios between neighbours in time, and markdown; pure,
and no torch. Run as a program it prints the tables of a file of results, by default
the newest, or writes them between the two marker lines of a page:

    python benchmarks/report.py [results/FILE.json ...] [--page README.md]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path

from record import Measure, Record, load, newest

TRANSPORT = "transport"
JPEG = "jpeg"
SLOW = "slow consumer"
SPAWN = "spawn"
TORCH = "torch"
FOREBAY = "forebay"
FOREBAY_THREADS = "forebay threads"
BEGIN = "<!-- benchmark: begin -->"
NOTHING = "-"
END = "<!-- benchmark: end -->"


class Readings:
    """The measures of one run, by line, workload and contestant."""

    def __init__(self, measures: Iterable[Measure]) -> None:
        self.measures = tuple(measures)

    def workloads(self, line: str) -> list[str]:
        """The workloads of a line, in the order in which they were measured."""
        return list(dict.fromkeys(m.workload for m in self.measures if m.line == line))

    def contestants(self, line: str, workload: str) -> list[str]:
        """Who was measured on a workload, in that order."""
        found = (m for m in self.measures if m.line == line and m.workload == workload)
        return list(dict.fromkeys(m.contestant for m in found))

    def by_round(self, line: str, workload: str, contestant: str, value: str) -> dict[int, float]:
        """The readings of one value, by round; rounds that failed are missing."""
        wanted = (line, workload, contestant)
        return {
            m.round: m.values[value]
            for m in self.measures
            if (m.line, m.workload, m.contestant) == wanted and value in m.values
        }

    def ratios(self, line: str, workload: str, contestant: str, value: str) -> list[float]:
        """`contestant` over torch, round by round."""
        base = self.by_round(line, workload, TORCH, value)
        other = self.by_round(line, workload, contestant, value)
        return [other[number] / base[number] for number in sorted(base.keys() & other.keys())]

    def failures(self) -> list[str]:
        """A sentence for each measure that gave no values."""
        return [
            f"{m.workload}, {m.contestant}, round {m.round + 1}: {m.error}"
            for m in self.measures
            if m.error
        ]


def number(values: Iterable[float]) -> str:
    """The median in three or so figures; a dash without values."""
    found = list(values)
    return _figures(statistics.median(found)) if found else NOTHING


def spread(values: Iterable[float], unit: str = "") -> str:
    """The median, and in brackets the least and the most where there are several."""
    found = sorted(values)
    if not found:
        return NOTHING
    middle = f"{_figures(statistics.median(found))}{unit}"
    if len(found) == 1:
        return middle
    return f"{middle} ({_figures(found[0])} to {_figures(found[-1])})"


def _figures(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a markdown table; the first column is text, the others are figures."""
    rule = ["---", *["--:" for _ in header[1:]]]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def render_transport(readings: Readings) -> list[str]:
    """Batches per second of each size, and how far from what copying alone would give."""

    def values(workload: str, contestant: str) -> list[float]:
        found = readings.by_round(TRANSPORT, workload, contestant, "batches_per_s")
        return list(found.values())

    rows = []
    for workload in readings.workloads(TRANSPORT):
        ours = values(workload, FOREBAY)
        ceiling = values(workload, "ceiling: two processes")
        share = [statistics.median(ours) / statistics.median(ceiling)] if ours and ceiling else []
        ratios = readings.ratios(TRANSPORT, workload, FOREBAY, "batches_per_s")
        in_threads = readings.ratios(TRANSPORT, workload, FOREBAY_THREADS, "batches_per_s")
        rows.append(
            [
                workload,
                number(values(workload, TORCH)),
                number(values(workload, "torch prefetch 1")),
                number(ours),
                f"**{spread(ratios, ' x')}**" if ratios else NOTHING,
                number(values(workload, FOREBAY_THREADS)),
                spread(in_threads, " x"),
                number(values(workload, "ceiling: in-process")),
                number(ceiling),
                f"{share[0]:.0%}" if share else NOTHING,
            ]
        )
    header = ["batch", "torch", "torch, prefetch 1", "forebay", "forebay / torch"]
    header += ["in threads", "in threads / torch"]
    header += ["copying in one process", "in two", "forebay of two"]
    return table(header, rows)


def render_feeding(readings: Readings, line: str) -> list[str]:
    """Rate and footprint of each contestant of a feeding line."""
    slow = line == SLOW
    rate = "step_ms" if slow else "samples_per_s"
    rows = []
    for contestant in readings.contestants(line, line):
        rates = readings.by_round(line, line, contestant, rate)
        peaks = readings.by_round(line, line, contestant, "peak_footprint_mib")
        rows.append(
            [
                _contestant_words(contestant),
                spread(rates.values()),
                number(readings.ratios(line, line, contestant, rate)),
                spread(peaks.values()),
                number(readings.ratios(line, line, contestant, "peak_footprint_mib")),
            ]
        )
    unit = "ms a step" if slow else "samples/s"
    return table(["", unit, "/ torch", "peak footprint, MiB", "/ torch"], rows)


def render_starting(readings: Readings) -> list[str]:
    """Time to the first batch and memory, for each number of workers."""
    rows = []
    for workload in readings.workloads(SPAWN):
        for contestant in readings.contestants(SPAWN, workload):
            first = readings.by_round(SPAWN, workload, contestant, "first_batch_s")
            peak = readings.by_round(SPAWN, workload, contestant, "peak_footprint_mib")
            held = readings.by_round(SPAWN, workload, contestant, "end_footprint_mib")
            cells = [f"{workload}, {contestant}", spread(first.values())]
            rows.append([*cells, number(held.values()), number(peak.values())])
    return table(["", "first batch, s", "then held, MiB", "peak, MiB"], rows)


def _contestant_words(contestant: str) -> str:
    name, _, budget = contestant.partition(":")
    if name == FOREBAY:
        return f'forebay, `memory_budget="{budget or "auto"}"`'
    return "two bare processes, no loader" if name == "ceiling" else contestant


def render_conditions(record: Record, readings: Readings) -> list[str]:
    """Where, when and with what: the sentence below every table."""
    machine, versions = record.machine, record.versions
    rounds = max((m.round + 1 for m in readings.measures), default=0)
    kind = "virtual machine" if machine["virtual"] else "machine"
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    return [
        (
            f"Measured {record.date[:10]} on a {kind} with {machine['cpus']} cores "
            f"({machine['processor']}, {machine['memory_gib']:.0f} GiB, {machine['system']}); "
            f"{names}; commit `{record.commit}`. Each contestant in a fresh process, in turn, "
            f"up to {rounds} rounds; medians, in brackets the least and the most; ratios are "
            "taken within a round. Touching a fresh page is dear in a virtual machine: expect "
            "smaller gains on bare metal."
        )
    ]


def render_markdown(record: Record) -> str:
    """All tables of a run, as the README shows them."""
    readings = Readings(record.measures)
    lines: list[str] = []
    if readings.workloads(TRANSPORT):
        lines += ["**Moving batches**, batches per second, 2 workers, no work in the dataset:", ""]
        lines += [*render_transport(readings), ""]
    if readings.workloads(JPEG):
        source = record.notes.get("photographs", "")
        lines += [f"**Decoding JPEGs** ({source}), 2 workers, batches of 64 x 3 x 224 x 224:", ""]
        lines += [*render_feeding(readings, JPEG), ""]
    if readings.workloads(SLOW):
        lines += ["**A consumer that needs 0.1 s a step**, 4 workers, 8.0 MB batches:", ""]
        lines += [*render_feeding(readings, SLOW), ""]
    if readings.workloads(SPAWN):
        lines += ["**Starting by spawn with a dataset of small dicts**:", ""]
        lines += [*render_starting(readings), ""]
    lines += render_conditions(record, readings)
    if failures := readings.failures():
        lines += ["", "Gave no answer:", "", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines)


def write_page(page: Path, markdown: str) -> None:
    """Put `markdown` between the marker lines of `page`.

    Raises:
        ValueError: if the page lacks one of the two markers.
    """
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the tables. Add the lines {BEGIN} and {END}.")
    page.write_text(f"{head}{BEGIN}\n\n{markdown}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="runs, one after the other")
    parser.add_argument("--page", type=Path, help="write there, between the marker lines")
    options = parser.parse_args()
    found = newest("full") or newest()
    paths = options.files or ([found] if found else [])
    if not paths:
        raise SystemExit("There are no results yet. Run: python benchmarks/run.py")
    markdown = "\n\n".join(render_markdown(load(path)) for path in paths)
    if options.page:
        write_page(options.page, markdown)
    else:
        print(markdown)


if __name__ == "__main__":
    main()
