"""vLLM as the engine: what it samples is what is trained on, under the present weights, or the run stops.

The same tests run against a program that speaks vLLM's interface, and with `-m slow` against vLLM itself where it is
installed. What only a failing vLLM shows is in test_vllm_faults.py, fits and refusals are in test_vllm_fits.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gigpo_lightning.batch import MicroBatch, pack
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.vllm import VLLM, VLLMEngine
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.trajectory import Episode
from tests import fake_vllm
from tests.tiny_lm import CHAT, made, move, save_tiny
from tests.toy_run import fit
from tests.toy_world import BoxTasks

TASKS = BoxTasks(3)
TEMPERATURE = 1.3
RULE = SegmentRule(turns=2, max_tokens=200)
THINK = ChatText(system="take it", first="{instruction} , {observation}", format="think")
LORAS = [LoRA(r=4, alpha=8.0), None]
# Small keys and values, and nothing compiled: a start of vLLM takes seconds as it is.
ARGS = {"kv_cache_memory_bytes": 64 * 2**20, "enforce_eager": True, "block_size": 32}
REAL = pytest.param(
    "real",
    marks=[pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is missing")],
)


@pytest.fixture(params=["fake", REAL])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fake":
        fake_vllm.install(monkeypatch)
    return str(request.param)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of the smallest width that the CPU build attends with."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=32)


@pytest.fixture
def engines(vllm: str) -> Iterator[Any]:
    """Makes engines, closed at the end."""
    open_engines: list[VLLMEngine] = []

    def make(policy: CausalLMPolicy, **options: Any) -> VLLMEngine:
        open_engines.append(VLLM(args=ARGS, **options).make(policy, RULE.max_tokens + 64, 5))
        return open_engines[-1]

    yield make
    for engine in open_engines:
        engine.close()


def play(
    policy: CausalLMPolicy, engine: VLLMEngine, constrain: bool = True, rows: int = 5, n: int = 0, seed: int = 0
) -> list[Episode]:
    pool = InProcessPool(TASKS.make_env)
    collector = Collector(policy, pool, RULE, rows=rows, constrain=constrain, max_action_tokens=12, engine=engine)
    n = n or (20 if constrain and not policy.prompt.reasons else 4)  # for about as many choices
    jobs = [EpisodeJob(TASKS.get("train", i // 2), 5, (seed, i)) for i in range(n)]
    return [episode for _, episode in sorted(collector.run(jobs, TEMPERATURE))]


def batch_of(episodes: Sequence[Episode]) -> MicroBatch:
    return pack([pack_row(s, 1.0) for e in episodes for s in e.segments if any(s.response_mask)])


def difference(policy: CausalLMPolicy, episodes: Sequence[Episode]) -> float:
    """The largest difference between the policy's log-probs and those that the engine told."""
    batch = batch_of(episodes)
    with torch.no_grad():
        logprobs, _ = policy.chosen_logprobs(batch, TEMPERATURE)
    assert len(logprobs) > 30 and float(batch.old_logprobs.std()) > 0.3  # choices that are far from uniform
    return float((logprobs - batch.old_logprobs).abs().max())


def change(policy: CausalLMPolicy, seed: int) -> None:
    """As an update would."""
    if policy.lora is not None:
        move(policy, seed)
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize(("chat", "constrain"), [(CHAT, True), (CHAT, False), (THINK, True), (THINK, False)])
def test_its_logprobs_are_the_policys(source: str, engines: Any, lora: Any, chat: ChatText, constrain: bool) -> None:
    """Among listed tokens, among all, and both in one answer; under a temperature, before and after an update."""
    policy = made(source, lora=lora, chat=chat)
    engine = engines(policy)
    episodes = play(policy, engine, constrain)
    assert difference(policy, episodes) < 1e-4
    assert engine.tokens > 0 and engine.figures["mismatch/probe"] < 1e-4
    free = batch_of(episodes).allowed_counts
    listed = 0 if free is None else int((free > 0).sum())
    assert (listed > 0) == constrain
    assert (free is None or bool((free == 0).any())) == (chat is THINK or not constrain)
    change(policy, seed=1)
    assert difference(policy, episodes) > 0.01  # the change matters
    assert difference(policy, play(policy, engine, constrain, seed=1)) < 1e-4


@pytest.mark.parametrize("constrain", [True, False])
def test_an_episode_does_not_depend_on_what_else_is_played(source: str, engines: Any, constrain: bool) -> None:
    policy = made(source)
    engine = engines(policy)
    together = play(policy, engine, constrain)
    alone = play(policy, engine, constrain, rows=1)
    other = play(policy, engine, constrain, seed=1)
    said = [[segment.token_ids for episode in played for segment in episode.segments] for played in (together, alone)]
    assert said[0] == said[1]
    assert said[0] != [segment.token_ids for episode in other for segment in episode.segments]


def test_a_group_reads_its_prompt_once(source: str, engines: Any) -> None:
    policy = made(source, chat=ChatText(system="you see a box . " * 16, first="{instruction} , {observation}"))
    engine = engines(policy)
    play(policy, engine, n=2, rows=1)
    # The second reads at most the last block of 64 tokens or more anew.
    assert engine.shared_tokens >= 64


def test_greedy_choices_have_log_probability_0(source: str, engines: Any) -> None:
    policy = made(source)
    engine = engines(policy)
    pool = InProcessPool(TASKS.make_env)
    collector = Collector(policy, pool, RULE, constrain=False, max_action_tokens=12, engine=engine)
    jobs = [EpisodeJob(TASKS.get("train", 0), 3, (i,)) for i in range(2)]
    first, second = (episode for _, episode in collector.run(jobs, 0.0))
    assert [s.token_ids for s in first.segments] == [s.token_ids for s in second.segments]
    assert not batch_of([first]).old_logprobs.any()


def test_the_process_is_not_disturbed(source: str, engines: Any) -> None:
    policy = made(source)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    engine = engines(policy)
    engine.begin(2, 1.0)
    assert torch.rand(3).tolist() == expected.tolist()
    assert (torch.set_num_threads, torch.get_num_threads()) == (set_threads, threads)
    assert not policy.training and all(p.device.type == "cpu" for p in policy.parameters())


def test_a_second_engine_can_follow_the_first(source: str, engines: Any, tmp_path: Path) -> None:
    """As in a fit that is followed by a test."""
    policy = made(source)
    for _ in range(2):
        engine = engines(policy)
        assert difference(policy, play(policy, engine)) < 1e-4
        engine.close()
        engine.close()  # twice does no harm


def test_a_whole_fit_and_the_test_after_it(source: str, vllm: str, tmp_path: Path) -> None:
    policy = CausalLMPolicy(source, chat=CHAT, lora=LoRA(r=4, alpha=32.0))
    data = {"engine": VLLM(args=ARGS), "segments": RULE, "passes": 2}
    trainer, module, datamodule = fit(tmp_path, epochs=2, data=data, model={"policy": policy, "kl_coef": 0.01})
    figures = datamodule.report.metrics
    assert figures["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert abs(figures["mismatch/kl_k1"]) < 1e-4 and figures["mismatch/probe"] < 1e-4
    assert float(trainer.callback_metrics["loss/skipped_updates"]) == 0.0
    trainer.test(module, datamodule=datamodule, verbose=False)
    assert len(module.results) > 0
