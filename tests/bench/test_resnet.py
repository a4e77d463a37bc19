"""The demo's model is small, and learns."""

from __future__ import annotations

import torch

from forebay.bench.resnet import SmallResNet


def test_pictures_become_scores() -> None:
    assert SmallResNet(4)(torch.zeros(2, 3, 64, 64)).shape == (2, 4)


def test_every_weight_gets_a_gradient() -> None:
    model = SmallResNet(4)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
