"""bfloat16 by Lightning's precision: rollout and update agree, log-probs stay float32, float16 is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.placement import acting, settle_precision
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.casts import without_gradients
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.context import SegmentRule
from tests.test_resume import assert_equal
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_run import fit, make_data, make_module, make_policy, make_trainer
from tests.toy_world import BoxTasks

# A rounding to bfloat16 changes a number by 1/512 at most; log-probs after a few layers differ by a few of them.
ROUNDING = 0.02


class Watched(ScratchPolicy):
    """Notes the type that matrix products have while it samples and while it is trained."""

    seen: dict[str, set[torch.dtype]]

    def feed(self, *args: Any) -> Any:
        self.seen["rollout"].add(_product_type())
        return super().feed(*args)

    def chosen_logprobs(self, *args: Any) -> Any:
        self.seen["update"].add(_product_type())
        return super().chosen_logprobs(*args)


def _product_type() -> torch.dtype:
    return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def policy(kind: str, source: str) -> BasePolicy:
    if kind == "scratch":
        return make_policy(64)
    return CausalLMPolicy(source, "bfloat16" if kind == "bfloat16 LoRA" else "float32", LoRA(r=4, alpha=8.0), chat=CHAT)


@pytest.mark.parametrize("kind", ["scratch", "LoRA", "bfloat16 LoRA"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_rollout_and_update_agree_in_every_precision(tmp_path: Path, source: str, kind: str, precision: str) -> None:
    data = {"segments": SegmentRule(max_tokens=300), "passes": 2}
    trainer, module, _ = fit(
        tmp_path, 1, data=data, model={"policy": policy(kind, source), "kl_coef": 0.1}, precision=precision
    )
    figures = trainer.callback_metrics
    assert all(value.isfinite() for value in figures.values())
    assert figures["loss/approx_kl"] > 1e-5  # the second pass has moved away
    exact = kind != "bfloat16 LoRA" and precision == "32-true"
    assert figures["loss/mismatch"] < (1e-6 if exact else ROUNDING)
    assert exact or figures["loss/mismatch"] > 1e-7  # it is a figure of this precision
    trained = {p.dtype for p in module.policy.parameters() if p.requires_grad}
    assert trained == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


@pytest.mark.parametrize(("precision", "product"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_rollouts_are_played_in_the_precision_of_the_update(
    tmp_path: Path, precision: str, product: torch.dtype
) -> None:
    watched = Watched(16, layers=1, heads=2, kv_heads=1)
    watched.seen = {"rollout": set(), "update": set()}
    fit(tmp_path, model={"policy": watched}, precision=precision, limit_val_batches=1)
    assert watched.seen == {"rollout": {product}, "update": {product}}


def test_the_output_layer_is_float32_under_autocast() -> None:
    tiny = make_policy(64)
    tiny.prepare(BoxTasks())
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = tiny.output_layer().all(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert tiny.output_layer().all(hidden).equal(expected)
        assert not torch.nn.functional.linear(hidden, tiny.model.get_output_embeddings().weight).equal(expected)


def test_a_run_in_bfloat16_resumes_to_the_bit(tmp_path: Path) -> None:
    for folder, epochs in (("whole", (3,)), ("cut", (2, 3))):
        for number, last in enumerate(epochs):
            path = str(tmp_path / folder / "checkpoints/last.ckpt") if number else None
            fit(tmp_path / folder, last, [IterationCheckpoint()], ckpt_path=path, precision="bf16-true")
    both = [torch.load(tmp_path / f / "checkpoints/iteration=000003.ckpt", weights_only=True) for f in ("whole", "cut")]
    assert_equal(both[0]["state_dict"], both[1]["state_dict"], "weights")
    assert_equal(both[0]["optimizer_states"], both[1]["optimizer_states"], "optimizer")


def test_the_first_weights_do_not_depend_on_the_precision(tmp_path: Path) -> None:
    """Lightning makes bfloat16 the default type while it asks for the model."""
    module = make_module()
    trainer = make_trainer(tmp_path, precision="bf16-true")
    trainer.validate(module, make_data(), verbose=False)
    expected = make_policy()
    expected.prepare(BoxTasks())
    for name, weight in expected.named_parameters():
        assert dict(module.policy.named_parameters())[name].equal(weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    "plugin", [MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu")), HalfPrecision("16-true")]
)
def test_float16_is_refused(plugin: Any) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.precision={plugin.precision}: choose 32-true, bf16-mixed or bf16"):
        settle_precision(SimpleNamespace(precision_plugin=plugin))  # type: ignore[arg-type]


def test_converted_weights_are_kept_while_playing_and_change_no_bit() -> None:
    tiny = make_policy(64)
    tiny.prepare(BoxTasks())
    plugin = MixedPrecision("bf16-mixed", "cpu")

    def decoded() -> tuple[torch.Tensor, int]:
        """Hidden states of a few steps, and how often a weight was converted."""
        cache = tiny.new_cache(4, 16)
        states = []
        with Conversions() as made, without_gradients("cpu"):
            for step in range(5):
                states.append(tiny.feed(cache, [[step + 5]] * 4).clone())
        return torch.stack(states), made.count

    with plugin.forward_context():
        plain, often = decoded()
    with acting(tiny, plugin):
        kept, once = decoded()
        tiny_weights = sum(p.dim() == 2 for p in tiny.model.get_decoder().layers.parameters())
    assert kept.equal(plain)
    assert (once, often) == (tiny_weights, 5 * tiny_weights)
    with torch.no_grad():
        for weight in tiny.parameters():
            weight.mul_(1.5)
    with acting(tiny, plugin):  # nothing is left over of the weights before
        assert not decoded()[0].equal(kept)


class Conversions(TorchDispatchMode):
    """Counts the conversions of matrices to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter) and args[0].dim() == 2:
            self.count += 1
        return func(*args, **(kwargs or {}))
