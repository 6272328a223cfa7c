"""Tokens per second of the decoding engine and of `model.generate` in lock step: same model, same episodes.

    python -m benchmarks.decoding [--rows 64] [--ways engine generate static] [--model FOLDER] [--out FILE.json]

The workload: episodes of many turns in groups of 8 that share their first prompt. Numbers of turns (mean 15, longest
50), lengths of answers and observations are drawn once, observations are fixed random tokens that cost nothing, and
every way of decoding says the same number of tokens in every turn. *engine*: each row at its own pace, a finished
episode's row taken by the next; log-probs and all. *generate*: at every turn the whole conversations of all live
episodes, padded on the left, as many new tokens as the longest answer of that turn, each answer then cut to its own
length; finished episodes leave the batch; no log-probs. *static*: the same with a static cache. A token counts when it
is part of an answer. Where there are fewer rows than episodes, `generate` plays them in batches of that size, as they
come. The ways take turns, and the best of `--repeats` counts. The table is of processor seconds, to which other work on
the machine matters less; the JSON has wall time, too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.machine import machine
from gigpo_lightning.policy.answering import Answer
from gigpo_lightning.policy.base import BasePolicy, Reading
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.engine import DecodingEngine
from gigpo_lightning.policy.ragged import ATTENTION_NAME

MEMBERS = 8
PROMPT_TOKENS = (180, 220)
OBSERVATION_TOKENS = (20, 60)
ANSWER_TOKENS = (4, 40)
MEAN_ANSWER_TOKENS = 16


class Plan(NamedTuple):
    """An episode: its first prompt; of every turn the length of the answer, and the tokens that are read after it."""

    prompt: list[int]
    answers: list[int]
    observations: list[list[int]]


class OfLength(Answer):
    """Any tokens, a given number of them."""

    __slots__ = ("_left",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def begin(self) -> list[int]:
        return []

    def take(self, token_id: int) -> list[int]:
        self._left -= 1
        self.is_complete = self._left == 0
        return []

    def reading(self, token_ids: Sequence[int]) -> Reading:
        return Reading("", True)


class RandomLlama(BasePolicy):
    """A Llama with random weights, without a tokenizer."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(width // 192, 1),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            attn_implementation=ATTENTION_NAME,
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config)

    def prepare(self, tasks: TaskSet) -> None:
        """It is ready."""

    def identity(self) -> dict[str, Any]:
        return {}


def draw_turns(rng: np.random.Generator, episodes: int, mean: float, longest: int) -> list[int]:
    """Numbers of turns with about this mean, from 1 to `longest`, which one of them has: exponential, cut off."""
    drawn = rng.exponential(size=episodes)
    low, high = 0.0, 10.0 * longest
    for _ in range(60):
        scale = (low + high) / 2
        turns = np.clip(np.ceil(drawn * scale), 1, longest)
        turns[drawn.argmax()] = longest
        low, high = (scale, high) if turns.mean() < mean else (low, scale)
    return [int(n) for n in turns]


def draw_plans(seed: int, episodes: int, vocabulary: int, mean_turns: float, longest: int) -> list[Plan]:
    """The workload."""
    rng = np.random.default_rng(seed)
    turns = draw_turns(rng, episodes, mean_turns, longest)

    def text(low: int, high: int) -> list[int]:
        return [int(i) for i in rng.integers(3, vocabulary, rng.integers(low, high + 1))]

    plans: list[Plan] = []
    for i, count in enumerate(turns):
        prompt = plans[-1].prompt if i % MEMBERS else text(*PROMPT_TOKENS)
        low, high = ANSWER_TOKENS
        answers = np.clip(low + rng.geometric(1 / (MEAN_ANSWER_TOKENS + 1 - low), count) - 1, low, high)
        observations = [text(*OBSERVATION_TOKENS) for _ in range(count)]
        plans.append(Plan(prompt, [int(n) for n in answers], observations))
    return plans


def longest_tokens(plans: Sequence[Plan]) -> int:
    """Tokens of the longest conversation."""
    return max(len(p.prompt) + sum(p.answers) + sum(map(len, p.observations)) for p in plans)


def engine_says(engine: DecodingEngine, plans: Sequence[Plan], rows: int) -> int:
    """Play all episodes with the engine; returns the tokens of their answers."""
    engine.begin(rows, 1.0)
    queue = list(enumerate(plans))[::-1]
    free = list(range(rows))
    live: dict[int, Any] = {}
    said_tokens = 0
    while queue or live:
        while queue and free:
            number, plan = queue.pop()
            slot = free.pop()
            live[slot] = (plan, 0, list(plan.prompt), np.random.default_rng(number))
            engine.ask(slot, plan.prompt, OfLength(plan.answers[0]), live[slot][3])
        for said in engine.step():
            plan, turn, ids, random = live.pop(said.slot)
            said_tokens += len(said.token_ids)
            ids += [*said.token_ids, *plan.observations[turn]]
            if turn + 1 == len(plan.answers):
                engine.leave(said.slot)
                free.append(said.slot)
            else:
                live[said.slot] = (plan, turn + 1, ids, random)
                engine.ask(said.slot, ids, OfLength(plan.answers[turn + 1]), random)
    engine.end()
    return said_tokens


def generate_says(model: Any, plans: Sequence[Plan], rows: int, options: dict[str, Any]) -> int:
    """Play all episodes in batches of `rows` with `model.generate`, a turn of all of them at a time."""
    said_tokens = 0
    for start in range(0, len(plans), rows):
        live = [(plan, list(plan.prompt)) for plan in plans[start : start + rows]]
        turn = 0
        while live:
            longest = max(len(ids) for _, ids in live)
            padded = torch.tensor([[0] * (longest - len(ids)) + ids for _, ids in live])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in live])
            new = max(plan.answers[turn] for plan, _ in live)
            out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=new, **options)
            for (plan, ids), answer in zip(live, out[:, longest:].tolist(), strict=True):
                ids += [*answer[: plan.answers[turn]], *plan.observations[turn]]
                said_tokens += plan.answers[turn]
            turn += 1
            live = [(plan, ids) for plan, ids in live if len(plan.answers) > turn]
    return said_tokens


def timed(work: Callable[[], int]) -> tuple[float, float, int]:
    """Processor seconds, wall seconds, and what `work` returns."""
    processor, wall = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        tokens = work()
    return time.process_time() - processor, time.perf_counter() - wall, tokens


def measure(policy: BasePolicy, plans: Sequence[Plan], rows: int, repeats: int, ways: Sequence[str]) -> dict[str, Any]:
    """For every way of decoding its sampled tokens per second, of processor and of wall time; alternating."""
    model = policy.model
    engine = DecodingEngine(policy, longest_tokens(plans))
    sampling = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    kinds: dict[str, dict[str, Any]] = {"generate": {}, "static": {"cache_implementation": "static"}}
    best: dict[str, list[float]] = {}
    for _ in range(repeats):
        for way in ways:
            if way == "engine":
                model.set_attn_implementation(ATTENTION_NAME)
                found = timed(lambda: engine_says(engine, plans, rows))
            else:
                model.set_attn_implementation("sdpa")
                options = {**sampling, **kinds[way]}
                found = timed(lambda options=options: generate_says(model, plans, rows, options))  # type: ignore[misc]
            assert found[2] == sum(sum(plan.answers) for plan in plans)
            rates = [found[2] / found[0], found[2] / found[1]]
            best[way] = [max(pair) for pair in zip(best.get(way, rates), rates, strict=True)]
            print(
                f"  {rows} rows, {way}: {rates[0]:.0f} tokens/s of processor, {rates[1]:.0f} of wall time", flush=True
            )
    model.set_attn_implementation(ATTENTION_NAME)
    return {way: {"per_processor_s": round(cpu, 1), "per_wall_s": round(wall, 1)} for way, (cpu, wall) in best.items()}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--mean_turns", type=float, default=15.0)
    parser.add_argument("--longest", type=int, default=50, help="turns of the longest episode")
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="episodes under way at once")
    parser.add_argument("--width", type=int, default=384, help="hidden size of the random model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--model", help="folder of a pretrained model, instead of the random one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ways", nargs="+", default=["engine", "generate"], choices=["engine", "generate", "static"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to which the result is added")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the result."""
    options = parse()
    policy: BasePolicy
    if options.model:
        policy = CausalLMPolicy(options.model, dtype=options.dtype)
        policy.prepare()
    else:
        policy = RandomLlama(options.width, options.layers, options.vocabulary).to(getattr(torch, options.dtype))
    policy.eval()
    plans = draw_plans(
        options.seed, options.episodes, policy.model.config.vocab_size, options.mean_turns, options.longest
    )
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]  # folders are nobody's business
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.decoding", *words]),
        **machine("transformers"),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in policy.parameters()),
        "episodes": len(plans),
        "turns": sum(len(plan.answers) for plan in plans),
        "sampled_tokens": sum(sum(plan.answers) for plan in plans),
        "longest_conversation": longest_tokens(plans),
        "rows": {},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))
    for rows in options.rows:
        result["rows"][str(rows)] = measure(policy, plans, rows, options.repeats, options.ways)
    for rows, found in result["rows"].items():
        figures = "  ".join(f"{way} {rate['per_processor_s']:.0f}" for way, rate in found.items())
        ratio = found["engine"]["per_processor_s"] / found.get("generate", found["engine"])["per_processor_s"]
        print(f"{rows:>4} rows: {figures}  tokens per second of processor, ratio {ratio:.2f}")
    if options.out:
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
        options.out.write_text(json.dumps([*before, result], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
