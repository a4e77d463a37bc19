"""One contestant, one transport workload, one line of JSON.

Run as a program in a fresh process:

    python benchmarks/transport.py --contestant torch --workload "3.1 MB"

Covers: the rate at which batches reach a consumer that touches every page of
them, with a dataset that does no work, and two ceilings for that rate. Does not
cover: rounds, ratios and spreads (run.py, report.py).

The ceilings copy the same samples, fetched once, without any loader:
`ceiling: in-process` stacks them into one warm buffer and touches it;
`ceiling: two processes` lets two bare processes stack them into five warm shared
buffers in turn, with no fetching, no consumer and nobody waiting for anybody, so
no loader with two workers on two cores is expected to pass it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from contestants import make_loader
from workloads import BATCH_SAMPLES, TRANSPORT_WORKLOADS, TransportWorkload, touch

CEILING_IN_PROCESS = "ceiling: in-process"
CEILING_TWO_PROCESSES = "ceiling: two processes"
WORKERS = 2
CEILING_BUFFERS = 5  # what torch's default keeps alive with two workers: 2 x 2 + 1
WARM_UP_BATCHES = 12  # more than any contestant keeps in flight


def measure_loader(
    contestant: str, workload: TransportWorkload, seconds: float, warm_up_s: float
) -> dict[str, float]:
    """Batches per second that `contestant` delivers."""
    loader = make_loader(
        contestant, workload.make_dataset(), batch_size=BATCH_SAMPLES, num_workers=WORKERS
    )
    expected = expected_sum(workload)
    batches = iter(loader)

    def step() -> None:
        if touch(next(batches)) != expected:
            raise RuntimeError(f"{contestant} delivered a wrong batch of {workload.name}")

    return _time_steps(step, seconds, warm_up_s)


def measure_in_process(
    workload: TransportWorkload, seconds: float, warm_up_s: float
) -> dict[str, float]:
    """The rate of one process that collates into one warm buffer and touches it."""
    torch.set_num_threads(1)  # as in a worker of torch's loader
    samples = _fetch_samples(workload)
    buffer = _empty_batch(samples[0], shared=False)

    def step() -> None:
        _collate_into(buffer, samples)
        touch(buffer)

    return _time_steps(step, seconds, warm_up_s)


def measure_two_processes(
    workload: TransportWorkload, seconds: float, warm_up_s: float
) -> dict[str, float]:
    """The sum of the rates of two bare processes over the same span of time."""
    context = multiprocessing.get_context("fork")
    rates = context.SimpleQueue()
    together = context.Barrier(WORKERS)

    def collate_alone() -> None:
        torch.set_num_threads(1)
        samples = _fetch_samples(workload)
        buffers = [_empty_batch(samples[0], shared=True) for _ in range(CEILING_BUFFERS)]
        turn = itertools.cycle(buffers)

        def step() -> None:
            _collate_into(next(turn), samples)

        together.wait()
        rates.put(_time_steps(step, seconds, warm_up_s))

    processes = [context.Process(target=collate_alone, daemon=True) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    answers = [rates.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        "batches_per_s": sum(answer["batches_per_s"] for answer in answers),
        "batches": sum(answer["batches"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
    }


def expected_sum(workload: TransportWorkload) -> float:
    """What `touch` must return for every batch of `workload`."""
    return touch(torch.utils.data.default_collate(_fetch_samples(workload)))


def _time_steps(step: Callable[[], None], seconds: float, warm_up_s: float) -> dict[str, float]:
    warm_at = time.perf_counter() + warm_up_s
    for number in itertools.count(1):
        step()
        if number >= WARM_UP_BATCHES and time.perf_counter() >= warm_at:
            break
    started = time.perf_counter()
    now, batches = started, 0
    while now < started + seconds:
        step()
        batches += 1
        now = time.perf_counter()
    return {
        "batches_per_s": batches / (now - started),
        "batches": batches,
        "seconds": now - started,
    }


def _fetch_samples(workload: TransportWorkload) -> list[Any]:
    dataset = workload.make_dataset()
    return [dataset[index] for index in range(BATCH_SAMPLES)]


def _empty_batch(sample: Any, *, shared: bool) -> Any:
    if isinstance(sample, dict):
        return {name: _empty_batch(value, shared=shared) for name, value in sample.items()}
    batch = torch.zeros((BATCH_SAMPLES, *sample.shape), dtype=sample.dtype)
    return batch.share_memory_().zero_() if shared else batch


def _collate_into(batch: Any, samples: list[Any]) -> None:
    if isinstance(batch, dict):
        for name, field in batch.items():
            torch.stack([sample[name] for sample in samples], out=field)
    else:
        torch.stack(samples, out=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--workload", required=True, choices=TRANSPORT_WORKLOADS)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up-s", type=float, default=0.5)
    options = parser.parse_args()
    workload = TRANSPORT_WORKLOADS[options.workload]
    span = (options.seconds, options.warm_up_s)
    if options.contestant == CEILING_IN_PROCESS:
        values = measure_in_process(workload, *span)
    elif options.contestant == CEILING_TWO_PROCESSES:
        values = measure_two_processes(workload, *span)
    else:
        values = measure_loader(options.contestant, workload, *span)
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
