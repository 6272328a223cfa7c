"""The three ratios of the surrogate: gradients by hand, GSPO's definition, identities."""

from __future__ import annotations

import pytest
import torch

from gigpo_lightning.functional.losses import policy_loss, token_weights

# Two turns, of two tokens and of one; a masked token in between.
TURN = torch.tensor([3, 3, 3, 8])
MASK = torch.tensor([True, True, False, True])
OLD = torch.tensor([-1.0, -2.0, 0.0, -0.5])
NEW = torch.tensor([-0.9, -1.7, 5.0, -1.0])
ADVANTAGES = torch.tensor([2.0, 2.0, 0.0, -1.0])


def gradient(ratio: str, **options: float) -> tuple[torch.Tensor, float]:
    """Gradient by log-prob, and the loss."""
    logprobs = NEW.clone().requires_grad_()
    found = policy_loss(logprobs, OLD, ADVANTAGES, MASK, ratio=ratio, turn_ids=TURN, denominator=1.0, **options)
    found.loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad, float(found.loss)


def test_none_is_the_plain_policy_gradient() -> None:
    """−Σ A logp = −(2 · −0.9 + 2 · −1.7 − 1 · −1) = 4.2; the gradient is −A, however far the policy is from the old."""
    found, loss = gradient("none", clip_low=0.01, clip_high=0.01)
    assert found.tolist() == [-2.0, -2.0, 0.0, 1.0]
    assert loss == pytest.approx(4.2)


def test_sequence_is_one_ratio_per_turn() -> None:
    """Turn 3: s = exp((0.1 + 0.3) / 2) = e^0.2, each of its tokens has sA, whose gradient is −sA/2 twice; turn 8:
    s = e^−0.5. No bound is reached with ε = 10 (low: 0.99)."""
    found, loss = gradient("sequence", clip_low=0.99, clip_high=10.0)
    s, t = torch.tensor([0.2, -0.5]).exp().tolist()
    assert loss == pytest.approx(-(2 * s + 2 * s - t))
    assert found.tolist() == pytest.approx([-2 * s, -2 * s, 0.0, t])


def test_a_clipped_turn_has_no_gradient_in_any_of_its_tokens() -> None:
    """s = e^0.2 = 1.22 > 1.2 with A > 0, although its first token's own ratio e^0.1 is within the bounds."""
    found, _ = gradient("sequence", clip_low=0.5, clip_high=0.2)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[3] != 0
    by_token, _ = gradient("token", clip_low=0.5, clip_high=0.2)
    assert by_token[0] != 0
    assert by_token[1] == 0
    metrics = policy_loss(
        NEW, OLD, ADVANTAGES, MASK, ratio="sequence", turn_ids=TURN, clip_low=0.5, denominator=1.0
    ).metrics
    assert float(metrics["clip_frac"]) == pytest.approx(2 / 3)
    assert float(metrics["ratio_max"]) == pytest.approx(torch.tensor(0.2).exp().item())


def test_with_the_weights_of_turns_it_is_the_published_objective() -> None:
    """(1/G) Σ_i min(s_i A_i, clip(s_i) A_i) with s_i = (π / π_old)^(1 / length) of the whole answer."""
    weights, denominator = token_weights(MASK, TURN, "turn")
    found = policy_loss(
        NEW, OLD, ADVANTAGES, MASK, ratio="sequence", turn_ids=TURN, weights=weights, denominator=denominator
    )
    wanted = 0.0
    for turn, advantage in ((3, 2.0), (8, -1.0)):
        own = MASK & (turn == TURN)
        s = ((NEW[own].sum() - OLD[own].sum()) / int(own.sum())).exp()
        wanted += float(torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage)) / 2
    assert float(found.loss) == pytest.approx(-wanted)


def test_turns_of_one_token_have_the_ratio_of_tokens() -> None:
    options = {"denominator": 1.0, "turn_ids": torch.arange(4)}
    one, other = (policy_loss(NEW, OLD, ADVANTAGES, MASK, ratio=r, **options) for r in ("sequence", "token"))  # type: ignore[arg-type]
    torch.testing.assert_close(one.loss, other.loss)


def test_at_the_sampling_policy_all_three_have_one_gradient_with_turn_weights() -> None:
    weights, denominator = token_weights(MASK, TURN, "turn")
    found = []
    for ratio in ("token", "sequence", "none"):
        logprobs = OLD.clone().requires_grad_()
        policy_loss(
            logprobs, OLD, ADVANTAGES, MASK, ratio=ratio, turn_ids=TURN, weights=weights, denominator=denominator
        ).loss.backward()
        found.append(logprobs.grad)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="ratio: 'word' is unknown; choose one of token, sequence, none"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, ratio="word", denominator=1.0)
    with pytest.raises(ValueError, match="turn_ids: None with a mask"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, ratio="sequence", denominator=1.0)


def test_an_empty_mask_is_zero() -> None:
    nothing = torch.zeros(0)
    for ratio in ("token", "sequence", "none"):
        found = policy_loss(
            nothing,
            nothing,
            nothing,
            nothing.bool(),
            ratio=ratio,
            turn_ids=nothing.long(),
            denominator=1.0,
        )
        assert float(found.loss) == 0
        assert all(float(value) == 0 for value in found.metrics.values())
