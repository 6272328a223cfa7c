"""The value loss by hand and its gradient; the explained variance from sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gigpo_lightning.functional.values import explained_variance, value_loss


def test_by_hand() -> None:
    """ε = 0.2, D = 4. First: within ε, (0.1 − 1)² = 0.81. Second: held at 0.2, (0.2 − 1)² = 0.64 against 0.25. Third:
    moved away from its target, held at −0.2: 1.44 against 4. ½ (0.81 + 0.64 + 4) / 4 = 0.68125; one of 4 is clipped."""
    values = torch.tensor([0.1, 0.5, -1.0], requires_grad=True)
    found = value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2, denominator=4.0)
    assert float(found.loss) == pytest.approx(0.68125)
    assert float(found.metrics["value"]) == pytest.approx(0.68125)
    assert float(found.metrics["value_clip_frac"]) == 0.25
    found.loss.backward()
    # (V − T) / D, none for the clipped one
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.225, 0.0, -0.5])


def test_without_clipping_it_is_the_squared_error() -> None:
    values, targets = torch.tensor([0.1, 0.5, -1.0]), torch.ones(3)
    found = value_loss(values, torch.zeros(3), targets, clip=None, denominator=3.0)
    assert float(found.loss) == pytest.approx(0.5 * float(((values - targets) ** 2).mean()))
    assert float(found.metrics["value_clip_frac"]) == 0


def test_parts_of_a_minibatch_add_up() -> None:
    values, old, targets = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    whole = value_loss(values, old, targets, denominator=10.0)
    parts = [value_loss(values[i], old[i], targets[i], denominator=10.0) for i in (slice(0, 3), slice(3, 10))]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    assert float(parts[0].metrics["value_clip_frac"] + parts[1].metrics["value_clip_frac"]) == pytest.approx(
        float(whole.metrics["value_clip_frac"])
    )


def test_no_turns_give_zero_with_a_gradient() -> None:
    values = torch.zeros(0, requires_grad=True)
    found = value_loss(values, torch.zeros(0), torch.zeros(0), denominator=1.0)
    found.loss.backward()
    assert float(found.loss) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "clip: 0.0 is not positive"),
        ({"denominator": 0.0}, "denominator: 0.0 is not positive"),
        ({"targets": torch.zeros(2)}, r"values: shapes \(3,\), \(3,\), \(2,\)"),
    ],
)
def test_a_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"old_values": torch.zeros(3), "targets": torch.zeros(3), "denominator": 1.0}
    with pytest.raises(ValueError, match=message):
        value_loss(torch.zeros(3), **{**options, **change})


def test_explained_variance() -> None:
    random = np.random.default_rng(0)
    targets = random.normal(size=50) + 3

    def explained(values: np.ndarray) -> float:
        errors = targets - values
        sums = (x.sum() for x in (targets, targets**2, errors, errors**2))
        return explained_variance(50, *sums)

    assert explained(targets) == pytest.approx(1)
    assert explained(np.full(50, 7.0)) == pytest.approx(0)  # a constant explains nothing, wherever it lies
    assert explained(2 * targets.mean() - targets) == pytest.approx(1 - 4)  # T − V = 2 (T − mean)
    assert explained_variance(2, 2.0, 2.0, 0.0, 0.0) == 0  # equal targets
