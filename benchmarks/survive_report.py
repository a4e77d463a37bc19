"""From results of `forebay survive` to the table of the docs; no torch is started.

Prints the table of the named files, or writes it between the two marker lines of a page:

    python benchmarks/survive_report.py results/FILE.json ... [--page docs/survive.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forebay.bench.survive.outcome import make_cases
from forebay.bench.survive.record import describe_place, load, merge
from forebay.observe.survive_words import markdown, summarise_cases

BEGIN = "<!-- survive: begin -->"
END = "<!-- survive: end -->"


def render(paths: list[Path]) -> str:
    record = merge([load(path) for path in paths])
    cases = make_cases(record.outcomes, record.contestants)
    summary = [f"- {line}" for line in summarise_cases(cases)]
    return "\n".join([*summary, "", markdown(cases), "", "\n\n".join(describe_place(record.place))])


def write_page(page: Path, text: str) -> None:
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table. Add the lines {BEGIN} and {END}.")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="results; of a workload that is in several, the last counts",
    )
    parser.add_argument("--page", type=Path, help="write there, between the marker lines")
    options = parser.parse_args()
    text = render(options.files)
    if options.page:
        write_page(options.page, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
