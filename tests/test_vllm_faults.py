"""What must stop a run with vLLM, what is corrected in it, and what is refused before it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from gigpo_lightning.batch import MicroBatch, Minibatch
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.vllm import VLLM, VLLMEngine
from gigpo_lightning.policy.vllm_weights import PROBE_TOKENS, probe_tokens
from gigpo_lightning.rollout.context import SegmentRule
from tests import fake_vllm
from tests.fake_vllm import Faults, LLMEngine
from tests.test_engine import Tokens
from tests.test_vllm import LORAS, RULE, THINK, change, difference, play
from tests.tiny_lm import CHAT, made, save_tiny
from tests.toy_run import fit, make_policy, rollouts, sgd, weights

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


# -- correction --------------------------------------------------------------------------------------------------------


def trained(
    root: Path, source: str, epochs: int = 1, lora: LoRA | None = None, precision: str = "32-true", **data: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Updates of plain descent from the same start; the change of the weights, and the figures of the run."""
    policy = CausalLMPolicy(source, chat=CHAT, lora=lora)
    options = {"minibatches": 1, "engine": VLLM(), "segments": SegmentRule(max_tokens=200), **data}
    model = {"policy": policy, "optimizer": sgd, "gradient_clip": None}
    trainer, module, datamodule = fit(root, epochs=epochs, data=options, model=model, precision=precision)
    start = CausalLMPolicy(source, chat=CHAT, lora=lora)
    start.prepare()
    before = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module) - before, {**figures, **datamodule.report.metrics}


def test_a_fit_with_it_is_a_fit(tmp_path: Path, source: str, fake: Fake) -> None:
    step, figures = trained(tmp_path, source)
    assert float(step.abs().max()) > 1e-3
    assert figures["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert abs(figures["mismatch/kl_k1"]) < 1e-5 and figures["mismatch/truncated_frac"] == 0.0
    assert figures["mismatch/probe"] < 1e-4 and figures["time/rescore_s"] > 0
    assert figures["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert fake[1][0].calls[-1] == "shutdown"


def test_dropout_has_no_part_in_the_rating(tmp_path: Path, source: str, fake: Fake) -> None:
    """Lightning collects in training mode; in the second iteration the adapter matters."""
    step, figures = trained(tmp_path, source, epochs=2, lora=LoRA(r=4, alpha=32.0, dropout=0.5))
    assert float(step.abs().max()) > 1e-3
    assert figures["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("precision", "probe"), [("bf16-mixed", 1e-4), ("bf16-true", 0.1)])
def test_the_rating_is_in_the_precision_of_the_update(
    tmp_path: Path, source: str, fake: Fake, precision: str, probe: float
) -> None:
    """Else the ratio of the first update would hold what bfloat16 rounds."""
    _, figures = trained(tmp_path, source, precision=precision)
    assert figures["loss/mismatch"] < 1e-6
    # Weights are compared in their own type: autocast has no part in it.
    assert figures["mismatch/probe"] < probe
    assert figures["mismatch/kl_k3"] > 1e-7  # in the update's type policy and sampler differ by the rounding


@pytest.mark.parametrize(
    ("shift", "weight", "figures"),
    [
        # d = −0.5 for every token: k1 = 0.5, k3 = e^−0.5 + 0.5 − 1
        (0.5, 0.606531, {"kl_k1": 0.5, "kl_k3": 0.106531, "ratio_max": 0.606531, "truncated_frac": 0.0}),
        # d = 2: the ratio e² = 7.389 is cut to the cap
        (-2.0, 2.0, {"kl_k1": -2.0, "kl_k3": 4.389056, "ratio_max": 7.389056, "truncated_frac": 1.0}),
    ],
)
def test_a_mismatch_is_logged_and_weighs_the_update(
    tmp_path: Path, source: str, fake: Fake, shift: float, weight: float, figures: dict[str, float]
) -> None:
    """The same episodes with other log-probs: the ratio of the update still starts at 1, its gradient is scaled."""
    plain, _ = trained(tmp_path / "plain", source)
    fake[0].shift = shift
    # Micro-batches of one to three rows, whose order is not that of the file.
    shifted, found = trained(tmp_path / "shifted", source, max_tokens_per_batch=120)
    for name, value in figures.items():
        assert found[f"mismatch/{name}"] == pytest.approx(value, abs=1e-4)
    assert found["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert float((shifted - weight * plain).abs().max()) < 1e-3 * float(plain.abs().max())
    said = [[row["logprobs"] for row in rollouts(tmp_path / name)[0]] for name in ("plain", "shifted")]
    moved = [b - a for first, second in zip(*said, strict=True) for a, b in zip(first, second, strict=True) if a or b]
    assert moved == pytest.approx([shift] * len(moved), abs=1e-4)  # the file keeps what the sampler said


class Seen(pl.Callback):
    """Keeps the micro-batches of a fit."""

    def __init__(self, batches: list[MicroBatch]) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        self.batches += batch.micro_batches


def test_the_native_engine_needs_no_correction(tmp_path: Path, source: str) -> None:
    batches: list[MicroBatch] = []
    policy = CausalLMPolicy(source, chat=CHAT)
    _, _, datamodule = fit(tmp_path, model={"policy": policy}, callbacks=[Seen(batches)])
    assert batches and all(micro.importance is None for micro in batches)
    assert not [name for name in datamodule.report.metrics if name.startswith("mismatch/")]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_cap": 0.5}, r"importance_cap=0\.5: must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1\.5: must lie in \(0, 1\)"),
        ({"sync_tolerance": 0.0}, r"sync_tolerance=0\.0: must be positive, or null"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLM(**options)


@pytest.mark.parametrize(
    ("args", "message"),
    [({"dtype": "half"}, "data.engine.args has dtype: set"), ({"no_such": 1}, "data.engine.args: .*no_such")],
)
def test_bad_args_are_refused(source: str, fake: Fake, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(made(source), args=args).begin(1, 1.0)


def test_more_tokens_than_positions_are_refused(source: str, fake: Fake) -> None:
    with pytest.raises(ValueError, match="512 positions, but segments may grow to 600 tokens"):
        VLLM().make(made(source), 600, 5).begin(1, 1.0)


def test_ranks_without_kernels_are_refused_and_others_rounded_up(source: str, fake: Fake) -> None:
    engine_of(made(source, lora=LoRA(r=9))).begin(1, 1.0)
    assert fake[1][0].args.max_lora_rank == 16
    with pytest.raises(ValueError, match=r"policy\.lora\.r=513: vLLM has kernels up to 512"):
        engine_of(made(source, lora=LoRA(r=513), moved=False)).begin(1, 1.0)


def test_a_missing_package_ends_a_fit_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    policy = CausalLMPolicy("never/loaded")
    with pytest.raises(ValueError, match=r"needs vllm, which is not installed: pip install '\.\[vllm\]'"):
        fit(tmp_path, data={"engine": VLLM()}, model={"policy": policy})


def test_policies_that_it_cannot_sample_from_are_refused(fake: Fake) -> None:
    with pytest.raises(ValueError, match="not from ScratchPolicy"):
        VLLM().check(make_policy())
    with pytest.raises(ValueError, match=r"policy\.quantization='4bit' would sample from other weights"):
        VLLM().check(CausalLMPolicy("any", lora=LoRA(), quantization="4bit"))


def test_a_strategy_of_several_processes_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"set trainer\.devices to 1"):
        VLLM().check(CausalLMPolicy("any"))
