"""Embeddings of observations by the policy, against transformers' own forward pass text by text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.embedding import observation_embeddings
from gigpo_lightning.policy.ragged import ATTENTION_NAME
from tests.tiny_lm import made, save_tiny
from tests.toy_run import make_policy
from tests.toy_world import BoxTasks

TEXTS = ["in it is a cup .", "you see 3 box .", "done .", "nothing happens ."]


@pytest.fixture(params=["scratch", "chat"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> BasePolicy:
    if request.param == "chat":
        return made(save_tiny(tmp_path))
    scratch = make_policy()
    scratch.prepare(BoxTasks())
    return scratch.eval()


def by_itself(policy: BasePolicy, ids: list[int], before: int) -> torch.Tensor:
    """The mean final hidden state of the ids after the first `before`, with transformers' own attention."""
    policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        hidden = policy.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    policy.model.set_attn_implementation(ATTENTION_NAME)
    return hidden[before:].mean(0)


def expected(policy: BasePolicy, text: str) -> torch.Tensor:
    """<bos>, what the prompt says before an observation, and the observation: the mean over the latter."""
    tokenizer = policy.prompt.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    said = "user :" if isinstance(policy.prompt, ChatPrompt) else ""
    opening = [tokenizer.bos_token_id, *tokenizer.encode(said, add_special_tokens=False)]
    return by_itself(policy, opening + ids, len(opening))


@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_each_is_the_mean_over_the_tokens_of_the_observation(policy: BasePolicy, max_tokens: int) -> None:
    found = observation_embeddings(policy, TEXTS, max_tokens)
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, torch.stack([expected(policy, text) for text in TEXTS]), atol=1e-5, rtol=1e-5)


def test_the_order_of_the_texts_does_not_matter(policy: BasePolicy) -> None:
    assert torch.equal(
        observation_embeddings(policy, TEXTS[::-1], 1000), observation_embeddings(policy, TEXTS, 1000).flip(0)
    )


def test_they_follow_the_weights(policy: BasePolicy) -> None:
    before = observation_embeddings(policy, TEXTS, 1000)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.5)  # tied to those that tokens are read with
    assert not torch.allclose(observation_embeddings(policy, TEXTS, 1000), before)


def test_an_empty_observation_has_one_too(policy: BasePolicy) -> None:
    assert observation_embeddings(policy, [""], 1000).isfinite().all()
    assert observation_embeddings(policy, [], 1000).shape[0] == 0


def test_a_long_observation_is_cut_to_the_models_positions(policy: BasePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(policy), "positions", 6)
    (found,) = observation_embeddings(policy, ["done . " * 9], 1000)
    opening = 3 if isinstance(policy.prompt, ChatPrompt) else 1
    ids = policy.prompt.tokenizer.encode("done . " * 3, add_special_tokens=False)[: 6 - opening]
    prefix = policy.prompt.tokenizer.encode("user :", add_special_tokens=False) if opening == 3 else []
    row = [policy.prompt.tokenizer.bos_token_id, *prefix, *ids]
    torch.testing.assert_close(found, by_itself(policy, row, opening), atol=1e-5, rtol=1e-5)
