"""Training on a machine with 512 MB: MobileNetV3-small on real photographs, start to end.

    python examples/small_machine.py                     forebay, its budget followed by itself
    python examples/small_machine.py --loader torch      torch's loader, by the article's recipe

The whole job runs in a memory group of 512 MiB without swap (Linux, as root), so it is what a
small board would do: interpreter, torch, model, optimiser, loader. The task needs no labels:
the model says by how many quarter turns a photograph was rotated. `--no-limit` runs it as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import forebay
from forebay.bench.cgroup import MemoryGroup
from forebay.bench.photos import default_cache_dir, list_images, make_photos

LIMIT_BYTES = 512 * 1024**2
SIDE = 128
BATCH = 8


class Rotated(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Photographs, cut square, turned by a number of quarter turns that is the label."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            small = image.convert("RGB").resize((SIDE, SIDE))
        turns = index % 4
        pixels = np.rot90(np.asarray(small, dtype=np.float32), turns).transpose(2, 0, 1)
        return torch.from_numpy(pixels / 255 - 0.5), turns


# -- MobileNetV3-small (Howard and others, 2019, table 2) -------------------------------------


class Squeeze(nn.Module):
    """Weighs channels by what the whole picture says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(8, width // 4)
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, width, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape: (batch, width, height, width)."""
        return x * self.weigh(x)


class Bottleneck(nn.Module):
    """Widen, filter each channel, squeeze, narrow; with a way around where shapes allow it."""

    def __init__(
        self, width: int, inner: int, out: int, kernel: int, stride: int, squeezes: bool, hard: bool
    ) -> None:
        super().__init__()
        bend: type[nn.Module] = nn.Hardswish if hard else nn.ReLU
        self.is_round = stride == 1 and width == out
        self.body = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), bend()),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            *(nn.BatchNorm2d(inner), bend()),
            *((Squeeze(inner),) if squeezes else ()),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, h, w) to (batch, out, h / stride, w / stride)."""
        return x + self.body(x) if self.is_round else self.body(x)


# inner, out, kernel, stride, squeezes, hard
LAYERS = (
    *((16, 16, 3, 2, True, False), (72, 24, 3, 2, False, False), (88, 24, 3, 1, False, False)),
    *((96, 40, 5, 2, True, True), (240, 40, 5, 1, True, True), (240, 40, 5, 1, True, True)),
    *((120, 48, 5, 1, True, True), (144, 48, 5, 1, True, True)),
    *((288, 96, 5, 2, True, True), (576, 96, 5, 1, True, True), (576, 96, 5, 1, True, True)),
)


def make_mobilenet(classes: int) -> nn.Sequential:
    """MobileNetV3-small: (batch, 3, h, w) float32 to (batch, classes)."""
    parts: list[nn.Module] = [
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
    ]
    width = 16
    for inner, out, kernel, stride, squeezes, hard in LAYERS:
        parts.append(Bottleneck(width, inner, out, kernel, stride, squeezes, hard))
        width = out
    parts += [
        *(nn.Conv2d(width, 576, 1, bias=False), nn.BatchNorm2d(576), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(576, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, classes)),
    ]
    return nn.Sequential(*parts)


# -- the job ----------------------------------------------------------------------------------


def make_loader(name: str, dataset: Rotated) -> Any:
    """The loader that is asked for; torch's by the article's rule for small machines."""
    if name == "torch":
        return torch.utils.data.DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=2,
            prefetch_factor=1,
            persistent_workers=True,
        )
    return forebay.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=2, worker_backend=name, memory_budget="auto"
    )


def train(name: str, steps: int | None) -> None:
    """One epoch, or as many steps."""
    warnings.simplefilter("ignore", UserWarning)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = make_loader(name, Rotated(list(list_images(default_cache_dir()))))
    model = make_mobilenet(4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    began, losses = time.monotonic(), []
    for step, (images, turns) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(images), turns)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
        if steps is not None and step + 1 >= steps:
            break
    took_s = time.monotonic() - began
    print(f"finished {len(losses)} steps in {took_s:.0f} s, last loss {losses[-1]:.3f}")
    if isinstance(loader, forebay.DataLoader):
        print(loader.explain())


def main() -> int:
    """Run the job, in a group of its own unless told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loader", choices=["process", "thread", "auto", "torch"], default="auto")
    parser.add_argument("--steps", type=int, help="stop after so many; default: one epoch")
    parser.add_argument("--no-limit", action="store_true")
    options = parser.parse_args()
    make_photos(default_cache_dir(), lambda *_: None)
    if options.no_limit:
        train(options.loader, options.steps)
        return 0
    command = [sys.executable, __file__, "--no-limit", "--loader", options.loader]
    command += ["--steps", str(options.steps)] if options.steps else []
    with MemoryGroup(limit_bytes=LIMIT_BYTES) as group:
        status = subprocess.run(group.enter_command(command), check=False).returncode
        kills = group.read().oom_kills
    print(f"exit status {status}, processes killed by the kernel: {kills}")
    return 1 if status or kills else 0


if __name__ == "__main__":
    sys.exit(main())
