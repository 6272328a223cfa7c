"""What must stop a run with vLLM, and what its requests must not depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.vllm import VLLM, VLLMEngine
from gigpo_lightning.policy.vllm_weights import PROBE_TOKENS, probe_tokens
from tests import fake_vllm
from tests.fake_vllm import Faults, LLMEngine
from tests.test_engine import Tokens
from tests.test_vllm import LORAS, RULE, THINK, change, difference, play
from tests.tiny_lm import CHAT, made, save_tiny

Fake = tuple[Faults, list[LLMEngine]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def engine_of(policy: CausalLMPolicy, **options: Any) -> VLLMEngine:
    return VLLM(**options).make(policy, RULE.max_tokens + 64, 5)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", LORAS)
def test_stale_weights_stop_the_run(source: str, fake: Fake, lora: Any) -> None:
    policy = made(source, lora=lora)
    engine = engine_of(policy)
    engine.begin(2, 1.0)
    fake[0].is_stale = True
    engine.begin(2, 1.0)  # nothing has changed
    change(policy, seed=1)
    with pytest.raises(RuntimeError, match=r"not sample from the present weights: on 63 probe tokens .* by \d\.\d+ on"):
        engine.begin(2, 1.0)


@pytest.mark.parametrize("lora", LORAS)
def test_so_do_those_that_differ_by_less_than_rounding_may(source: str, fake: Fake, lora: Any) -> None:
    """vLLM's log-probs are then nearer to the former weights' than to the present ones'."""
    policy = made(source, lora=lora)
    engine = engine_of(policy, sync_tolerance=100.0)
    engine.begin(2, 1.0)
    fake[0].is_stale = True
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 1e-4 if weight.requires_grad else 0.0
    with pytest.raises(RuntimeError, match=r"from those of the former weights they differ by \d"):
        engine.begin(2, 1.0)
    fake[0].is_stale = False
    engine.begin(2, 1.0)
    assert engine.figures["mismatch/probe"] < 1e-5


def test_an_output_layer_that_shares_the_embedding_is_handed_over(source: str, fake: Fake) -> None:
    policy = made(source, lora=None)
    assert policy.model.lm_head.weight is policy.model.get_input_embeddings().weight
    engine = engine_of(policy)
    engine.begin(2, 1.0)
    with torch.no_grad():
        policy.model.lm_head.weight *= 1.5
    engine.begin(2, 1.0)
    head = fake[1][0].model.lm_head.weight
    assert torch.equal(head, policy.model.lm_head.weight)


def test_log_probs_of_other_weights_from_the_start_are_noticed(source: str, fake: Fake, tmp_path: Path) -> None:
    """The first hand-over has no former one to compare with: the tolerance must do."""
    policy = made(source, lora=None)
    change(policy, seed=1)
    fake[0].is_stale = True
    with pytest.raises(RuntimeError, match=r"where 0\.01 is allowed \(data\.engine\.sync_tolerance\)$"):
        engine_of(policy).begin(2, 1.0)


def test_keys_and_values_of_former_weights_stop_the_run(source: str, fake: Fake) -> None:
    fake[0].keeps_cache = True
    with pytest.raises(RuntimeError, match="kept keys and values"):
        engine_of(made(source)).begin(2, 1.0)


def test_the_adapter_is_read_from_the_disk_once_per_collection_and_removed(source: str, fake: Fake) -> None:
    policy = made(source)
    engine = engine_of(policy)
    play(policy, engine)
    play(policy, engine)
    folder = Path(engine._weights.adapter.lora_path)  # type: ignore[union-attr]
    assert fake[1][0].calls == ["add_lora", "add_lora"]
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    engine.close()
    assert not folder.exists() and fake[1][0].calls[-1] == "shutdown"


def test_the_probe_is_the_same_in_every_run_and_all_over_the_vocabulary(source: str) -> None:
    policy = made(source)
    ids = probe_tokens(policy)
    assert ids == probe_tokens(made(source)) and len(ids) == PROBE_TOKENS
    assert ids[:4] == policy.prompt.header("probe", (), "probe")[:4]
    assert len(set(ids)) > 30 and max(ids) < policy.model.config.vocab_size


def test_it_sleeps_between_collections_on_a_gpu(source: str, fake: Fake) -> None:
    policy = made(source)
    here, there = engine_of(policy), engine_of(policy)
    assert not here._sleeps  # on the CPU nothing is won
    there._sleeps = True
    for engine in (here, there):
        play(policy, engine)
        assert difference(policy, play(policy, engine)) < 1e-4
    assert fake[1][0].calls == ["add_lora", "add_lora"] and not fake[1][0].args.enable_sleep_mode
    assert fake[1][1].calls == ["add_lora", "sleep", "wake_up", "add_lora", "sleep"]


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [CHAT, THINK])
@pytest.mark.parametrize("constrain", [True, False])
def test_tokens_may_come_several_at_a_time(source: str, fake: Fake, chat: Any, constrain: bool) -> None:
    """Those beyond an answer, or beyond the place where it goes on otherwise, are dropped."""
    policy = made(source, chat=chat)
    engine = engine_of(policy)
    single = play(policy, engine, constrain)
    fake[0].tokens_per_step = 5
    several = play(policy, engine, constrain)
    assert [s.token_ids for e in single for s in e.segments] == [s.token_ids for e in several for s in e.segments]
    assert difference(policy, several) < 1e-4


def test_a_collection_that_broke_off_leaves_nothing_behind(source: str, fake: Fake) -> None:
    policy = made(source)
    engine = engine_of(policy)
    engine.begin(2, 1.0)
    engine.ask(0, policy.prompt.header("a", (), "b"), Tokens(), numbers())
    engine.ask(1, policy.prompt.header("a", (), "b"), Tokens(), numbers())
    assert engine.step() == [] and len(fake[1][0].requests) == 2
    engine.leave(1)
    assert len(fake[1][0].requests) == 1
    engine.begin(2, 1.0)
    assert not fake[1][0].requests


def test_an_answer_that_never_ends_is_an_error(source: str, fake: Fake) -> None:
    policy = made(source)
    engine = VLLM().make(policy, 40, 1)
    engine.begin(1, 1.0)
    engine.ask(0, policy.prompt.header("a", (), "b"), Tokens(), numbers())
    with pytest.raises(ValueError, match="outgrew the 40 tokens"):
        drain(engine)


def test_tokens_are_counted(source: str, fake: Fake) -> None:
    policy = made(source)
    engine = engine_of(policy)
    engine.begin(2, 1.0)
    ids = [*range(6, 46)]  # 40 tokens: two blocks of 16 are kept
    for slot in range(2):
        engine.ask(slot, ids, Tokens(3), numbers())
        drain(engine)
    # The first reads 40 and says 3; the second reads 8.
    assert (engine.tokens, engine.shared_tokens) == (40 + 3 + 8 + 3, 32)
    before = engine.tokens
    engine.ask(0, [*ids, *engine._rows[0].token_ids[40:], *range(50, 60)], Tokens(1), numbers())
    engine.step()
    # 53 tokens; 42 were read, of which 32 are whole blocks. A turn that goes on shares nothing.
    assert (engine.tokens - before, engine.shared_tokens) == (53 - 32 + 1, 32)


def drain(engine: VLLMEngine) -> None:
    while not engine.step():
        pass


def numbers() -> np.random.Generator:
    return np.random.default_rng(0)
