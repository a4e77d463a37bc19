"""Who takes part: the loaders by name, each with torch's parameters.

Covers: building a loader for a contestant's name. Does not cover: the ceilings
of transport.py, which are not loaders.

torch takes part as it comes, and with `prefetch_factor=1`, the usual advice when
memory is short. forebay takes part with its defaults (`memory_budget="auto"`) and
with a budget in the name: `forebay:96MiB`; so it does with threads, as `forebay threads`.
"""

from __future__ import annotations

from typing import Any

import torch.utils.data

TORCH = "torch"
TORCH_PREFETCH_1 = "torch prefetch 1"
FOREBAY = "forebay"
FOREBAY_THREADS = "forebay threads"


def make_loader(contestant: str, dataset: Any, **arguments: Any) -> Any:
    """The loader called `contestant` over `dataset`.

    Raises:
        ValueError: if no contestant has that name.
    """
    name, _, setting = contestant.partition(":")
    if name == TORCH:
        return torch.utils.data.DataLoader(dataset, **arguments)
    if name == TORCH_PREFETCH_1:
        return torch.utils.data.DataLoader(dataset, prefetch_factor=1, **arguments)
    if name in {FOREBAY, FOREBAY_THREADS}:
        import forebay

        if name == FOREBAY_THREADS:
            arguments["worker_backend"] = "thread"
        return forebay.DataLoader(dataset, memory_budget=setting or "auto", **arguments)
    raise ValueError(
        f"no contestant is called {contestant!r}. Known: {TORCH!r}, {TORCH_PREFETCH_1!r}, "
        f"{FOREBAY!r}, {FOREBAY_THREADS!r}, or {FOREBAY + ':96MiB'!r} for a budget."
    )
