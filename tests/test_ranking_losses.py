"""Losses of reward models and process reward models."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.loss.ranking import bradley_terry, stepwise, stepwise_two_class


def test_c47_centring_adds_the_mean_square_of_the_sums():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.5, -1.0])
    extra = bradley_terry(chosen, rejected, center_coefficient=0.01) - bradley_terry(chosen, rejected)
    assert float(extra.mean()) == pytest.approx(0.01625)
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([0.474077, 0.313262], abs=1e-6)


def test_c47_the_margin_is_honoured():
    found = bradley_terry(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]))
    assert float(found) == pytest.approx(math.log1p(math.exp(1.5)))


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_extremes_are_finite(size: float):
    rewards = torch.tensor([size, 0.0], requires_grad=True)
    loss = bradley_terry(rewards, torch.zeros(2), center_coefficient=0.01)
    (loss.sum() + stepwise(rewards, torch.tensor([True, False])).sum()).backward()
    assert loss.isfinite().all() and rewards.grad.isfinite().all()


def test_stepwise_by_hand():
    logits = torch.tensor([0.0, 2.0])
    wanted = [math.log(2), 2 + math.log1p(math.exp(-2))]
    assert stepwise(logits, torch.tensor([True, False])).tolist() == pytest.approx(wanted)
    two = torch.stack([torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0])], 1)
    assert stepwise_two_class(two, torch.tensor([True, False])).tolist() == pytest.approx(wanted)
    assert torch.nn.functional.cross_entropy(two, torch.tensor([1, 0]), reduction="none").tolist() == pytest.approx(
        wanted
    )
