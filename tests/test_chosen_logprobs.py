"""Log-probs of rows in which some tokens were chosen among listed ones and others among the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.policy.scratch import ScratchPolicy
from tests.toy_world import BoxTasks

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = ScratchPolicy(hidden_size=32, layers=1, initializer_range=0.2)
    made.prepare(BoxTasks(3))
    return made.eval()


# Two rows; of the first the tokens at 2, 3, 4 were chosen, of the second that at its place 1.
MIXED = MicroBatch(
    token_ids=torch.tensor([2, 9, 7, 11, 5, 2, 8, 4]),
    lengths=(5, 3),
    chosen=torch.tensor([2, 3, 4, 6]),
    turn=torch.tensor([0, 0, 0, 1]),
    old_logprobs=torch.zeros(4),
    advantages=torch.ones(4),
    allowed_ids=torch.tensor([3, 7, 5, 6, 10]),
    allowed_counts=torch.tensor([2, 0, 3, 0]),
)


def test_each_token_is_rated_among_what_it_was_chosen_from(policy: ScratchPolicy) -> None:
    with torch.no_grad():
        logprobs, entropy = policy.chosen_logprobs(MIXED, TEMPERATURE)
    model = policy.model  # the oracle: transformers' own attention, row by row, and softmax by hand
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [model(input_ids=part[None]).logits[0] / TEMPERATURE for part in MIXED.token_ids.split(MIXED.lengths)]
    model.set_attn_implementation("gigpo_ragged")
    every = range(rows[0].shape[1])
    cases = ((rows[0][1], 7, [3, 7]), (rows[0][2], 11, every), (rows[0][3], 5, [5, 6, 10]), (rows[1][0], 8, every))
    for found, spread, (scores, token, among) in zip(logprobs, entropy, cases, strict=True):
        log_p = scores[list(among)].log_softmax(0)
        assert float(found) == pytest.approx(float(log_p[list(among).index(token)]), abs=1e-5)
        assert float(spread) == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-5)


def test_gradients_flow_to_both_kinds(policy: ScratchPolicy) -> None:
    """The gradient of the mixed batch is the sum of those of its parts."""

    def gradient(batch: MicroBatch) -> torch.Tensor:
        policy.zero_grad()
        policy.chosen_logprobs(batch, TEMPERATURE)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    def only(index: list[int], **fields: torch.Tensor | None) -> MicroBatch:
        return replace(MIXED, chosen=MIXED.chosen[index], **fields)  # type: ignore[arg-type]

    listed, free = only([0, 2], allowed_counts=torch.tensor([2, 3])), only([1, 3], allowed_counts=None)
    torch.testing.assert_close(gradient(MIXED), gradient(listed) + gradient(free), atol=1e-5, rtol=1e-5)
