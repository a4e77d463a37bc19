"""A small residual network, sized so that two cores can train it while you watch.

Covers: the model of the demo and its shape.
Does not cover: data (photos.py), the training loop (demo_job.py).

He et al. 2016, "Deep residual learning for image recognition": basic blocks,
batch norm, a projection where the shape changes. Two things differ from a
ResNet-18, for speed and for a small memory of its own: one block a stage, and a
stem that cuts 224 pixels into 28 patches of 8 at once. A step over 64 pictures
then takes about 0.3 s of one core (measured on a virtual machine with two).
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import nn
from torch.nn import functional

WIDTHS: Final = (32, 64, 128, 256)
"""Channels of the four stages. Chosen so that one core trains slower than one core
decodes: the usual case in front of an accelerator too, and the one in which a
loader that does not look at bytes piles batches up."""


@final
class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inward, outward, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outward)
        self.second = nn.Conv2d(outward, outward, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outward)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inward != outward:
            self.around = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, inward, H, W) -> (N, outward, H / stride, W / stride)."""
        inner = functional.relu(self.first_norm(self.first(features)), inplace=True)
        inner = self.second_norm(self.second(inner))
        return functional.relu(inner + self.around(features), inplace=True)


@final
class SmallResNet(nn.Module):
    """Pictures to scores: float32 (N, 3, H, W) -> (N, classes), H and W at least 64."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stem = WIDTHS[0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 8, stride=8, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(inplace=True),
        )
        inwards = (stem, *WIDTHS)
        self.stages = nn.Sequential(
            *(
                ResidualBlock(inward, outward, stride=1 if index == 0 else 2)
                for index, (inward, outward) in enumerate(zip(inwards, WIDTHS, strict=False))
            )
        )
        self.head = nn.Linear(WIDTHS[-1], classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """The scores of a batch of pictures."""
        features = self.stages(self.stem(pictures))
        scores: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return scores
