"""Masked reductions: what does not count must not leak, neither as a value nor as a gradient."""

from __future__ import annotations

import pytest
import torch

from gigpo_lightning.functional.masked import masked_max, masked_mean, masked_sum

NAN = float("nan")
VALUES = [[1.0, 2.0, NAN], [NAN, NAN, NAN], [-4.0, NAN, 5.0]]
MASK = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])


def test_over_everything() -> None:
    values = torch.tensor(VALUES)
    assert masked_sum(values, MASK) == 4.0  # 1 + 2 − 4 + 5
    assert masked_mean(values, MASK) == 1.0  # 4 entries
    assert masked_max(values, MASK) == 5.0


def test_over_a_dimension() -> None:
    values = torch.tensor(VALUES)
    assert masked_sum(values, MASK, 1).tolist() == [3.0, 0.0, 1.0]
    assert masked_mean(values, MASK, 1).tolist() == [1.5, 0.0, 0.5]
    assert masked_max(values, MASK, 1).tolist() == [2.0, -torch.inf, 5.0]


def test_empty_mask() -> None:
    values, mask = torch.tensor([NAN, 1.0]), torch.tensor([False, False])
    assert masked_sum(values, mask) == 0.0
    assert masked_mean(values, mask) == 0.0
    assert masked_max(values, mask) == -torch.inf
    assert masked_max(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == -torch.inf


def test_gradient_only_where_it_counts() -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    masked_mean(values, MASK).backward()
    assert torch.equal(values.grad, 0.25 * MASK.float())


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.0]), torch.tensor([True]), torch.tensor([1, 0])])
def test_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"mask: .*expected torch.bool of shape \(2,\)"):
        masked_sum(torch.zeros(2), mask)
