"""Texts as vectors: the policy's hidden states, by hand, in any company, cut and empty."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gigpo_lightning.policy import embed
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.embed import embed_texts
from tests.tiny_lm import made, save_tiny
from tests.toy_run import make_policy
from tests.toy_world import BoxTasks

TEXTS = ["you see 3 box .", "in it is a cup .", "", "you see 3 box .", "nothing happens ."]


@pytest.fixture(params=["scratch", "pretrained"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> BasePolicy:
    if request.param == "pretrained":
        return made(save_tiny(tmp_path))
    scratch = make_policy()
    scratch.prepare(BoxTasks())
    return scratch


def alone(policy: BasePolicy, text: str, tokens: int | None = None) -> torch.Tensor:
    """The oracle: feed the text token by token, keep each final hidden state, and average."""
    ids = policy.prompt.tokenizer.encode(text, add_special_tokens=False)[:tokens]
    policy.eval()
    with torch.no_grad():
        cache = policy.new_cache(1, 64)
        return torch.stack([policy.feed(cache, [[token]])[0] for token in ids]).mean(0)


def test_a_vector_is_the_mean_of_the_hidden_states(policy: BasePolicy) -> None:
    vectors = embed_texts(policy, TEXTS)
    assert vectors.dtype == torch.float32
    assert vectors.shape == (5, policy.model.config.hidden_size)
    for text, vector in zip(TEXTS, vectors, strict=True):
        wanted = alone(policy, text) if text else torch.zeros_like(vector)
        torch.testing.assert_close(vector, wanted)
    assert not torch.allclose(vectors[0], vectors[1])


def test_only_the_first_tokens_are_read(policy: BasePolicy) -> None:
    torch.testing.assert_close(embed_texts(policy, TEXTS[:1], max_tokens=2)[0], alone(policy, TEXTS[0], 2))


def test_company_and_mode_change_nothing(policy: BasePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = embed_texts(policy, TEXTS)
    policy.train()
    monkeypatch.setattr(embed, "BATCH_TOKENS", 1)  # every text by itself
    torch.testing.assert_close(embed_texts(policy, TEXTS), wanted)
    assert policy.training
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_no_texts_give_no_vectors(policy: BasePolicy) -> None:
    assert embed_texts(policy, []).shape == (0, policy.model.config.hidden_size)
    assert not embed_texts(policy, [""]).any()


def test_a_text_longer_than_the_model_is_cut(policy: BasePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = alone(policy, TEXTS[0], 3)
    monkeypatch.setattr(policy.model.config, "max_position_embeddings", 3)
    torch.testing.assert_close(embed_texts(policy, TEXTS[:1])[0], wanted)


def test_no_token_is_too_few(policy: BasePolicy) -> None:
    with pytest.raises(ValueError, match="max_tokens: 0; at least one"):
        embed_texts(policy, TEXTS, max_tokens=0)
