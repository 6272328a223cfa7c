"""What is counted without values is what real policies hold, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.memory import LiveBytes, format_size, free_memory, int8_bytes, nf4_bytes, parse_size, storage_bytes
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.casts import kept_casts, without_gradients
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.generation import OutputLayer, choose_tokens
from gigpo_lightning.policy.hollow import HollowPolicy, MicroShape
from gigpo_lightning.policy.ragged import PackedRows, run_ragged
from gigpo_lightning.policy.scratch import ScratchPolicy
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_world import BoxTasks

LORA = LoRA(r=4, alpha=8.0)
SHAPE = MicroShape(rows=6, length=60, listed=100, allowed=300, free=0)
KINDS: dict[str, dict[str, Any]] = {
    "full": {"lora": None, "dtype": "float32"},
    "full bfloat16": {"lora": None, "dtype": "bfloat16"},
    "lora": {"lora": LORA, "dtype": "float32"},
    "lora bfloat16": {"lora": LoRA(r=4, targets=["q_proj", "down_proj"]), "dtype": "bfloat16"},
    "checkpointing": {"lora": LORA, "dtype": "bfloat16", "gradient_checkpointing": True},
    "4bit": {"lora": LORA, "dtype": "float32", "quantization": "4bit"},
    "8bit": {"lora": LORA, "dtype": "float32", "quantization": "8bit"},
}
EVERY = pytest.mark.parametrize("kind", ["scratch", *KINDS])
PRECISIONS = pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
pytestmark = pytest.mark.filterwarnings("ignore:policy.lora is null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of six layers, so that short models must speak for it; its sizes leave blocks of rounding unfilled."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=6, intermediate_size=136)


def policy_of(kind: str, folder: str) -> BasePolicy:
    return ScratchPolicy() if kind == "scratch" else CausalLMPolicy(folder, chat=CHAT, **KINDS[kind])


def real(kind: str, folder: str) -> tuple[BasePolicy, list[Tensor]]:
    """A prepared policy with gradients, and all that it holds."""
    policy = policy_of(kind, folder)
    policy.prepare(BoxTasks())
    held = [*policy.parameters(), *policy.buffers(), *rounding(policy)]
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            held.append(parameter.grad)
    return policy.train(), held


def rounding(policy: BasePolicy) -> list[Tensor]:
    """The tensors that bitsandbytes keeps beside its rounded weights."""
    found: list[Tensor] = []
    for module in policy.modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is not None:
            found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        scales = [getattr(owner, "SCB", None) for owner in (weight, getattr(module, "state", None))]
        found += [scale for scale in scales if isinstance(scale, Tensor)]
    return found


def micro_batch(shape: MicroShape) -> MicroBatch:
    """Random tokens; each chosen one is the first of three allowed ones."""
    generator = torch.Generator().manual_seed(0)
    each = shape.allowed // shape.listed
    allowed = torch.stack([torch.randperm(40, generator=generator)[:each] for _ in range(shape.listed)])
    chosen = torch.arange(1, shape.listed + 1) * 3
    token_ids = torch.randint(0, 40, (shape.rows * shape.length,), generator=generator)
    token_ids[chosen] = allowed[:, 0]
    numbers, counts = torch.zeros(shape.listed), torch.full((shape.listed,), each)
    lengths = (shape.length,) * shape.rows
    return MicroBatch(
        token_ids, lengths, chosen, torch.arange(shape.listed), numbers, numbers, allowed.flatten(), counts
    )


@EVERY
def test_what_is_held_all_the_time_is_exact(kind: str, folder: str) -> None:
    hollow, (policy, _) = HollowPolicy(policy_of(kind, folder), BoxTasks()), real(kind, folder)
    held = [*policy.parameters(), *policy.buffers(), *rounding(policy)]
    assert hollow.weight_bytes == storage_bytes(held)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert hollow.trained == sum(p.numel() for p in trained)
    assert hollow.trained_bytes == storage_bytes(trained)
    cache = policy.new_cache(7, 50)
    assert hollow.cache_bytes(7, 50) == storage_bytes([cache.keys, cache.values])
    copy = policy.make_reference()
    assert hollow.reference_bytes == (0 if copy is None else storage_bytes([*copy.parameters(), *copy.buffers()]))
    if "bit" not in kind:  # packed: fewer numbers than weights
        assert hollow.parameters == sum(p.numel() for p in policy.parameters())


@EVERY
def test_the_peaks_are_those_of_a_real_update_and_a_real_step_of_decoding(kind: str, folder: str) -> None:
    hollow, (policy, held) = HollowPolicy(policy_of(kind, folder), BoxTasks()), real(kind, folder)
    counted = hollow.update_bytes(SHAPE, with_reference=True)
    with LiveBytes(held) as live:
        rows = PackedRows.from_lengths([SHAPE.length] * SHAPE.rows)
        tokens = SHAPE.rows * SHAPE.length
        run_ragged(policy.model, torch.zeros(tokens, dtype=torch.int64), rows.position, rows).sum().backward()
    assert counted.activations == live.peak
    micro = micro_batch(SHAPE)
    with LiveBytes(held) as live:
        logprobs, entropies = policy.chosen_logprobs(micro, 1.0)
        (logprobs.sum() + entropies.sum() + policy.reference_logprobs(micro, 1.0).sum()).backward()
    # The hollow run makes its micro-batch while it is counted.
    given = storage_bytes([t for t in vars_of(micro) if isinstance(t, Tensor)])
    assert live.peak <= counted.peak <= live.peak + given + 400
    policy.eval()
    cache = policy.new_cache(7, 50)
    with torch.inference_mode(), LiveBytes([*held, cache.keys, cache.values]) as live:
        cache.lengths = [30] * 7
        policy.feed(cache, [[5] * 20] * 7)
    # In 8 bit, evaluation rounds its inputs in other pieces.
    assert hollow.rollout_bytes(7, 50, 20, 3) == pytest.approx(live.peak, rel=0.001 if kind == "8bit" else 0)


def vars_of(micro: MicroBatch) -> list[Any]:
    return [getattr(micro, name) for name in micro.__dataclass_fields__]


# -- precision -------------------------------------------------------------------------------------------------------


def in_precision(kind: str, folder: str, precision: str) -> tuple[BasePolicy, list[Tensor], Precision]:
    """The same as Lightning prepares it for a run, with what it computes under."""
    policy, _ = real(kind, folder)
    plugin = MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else HalfPrecision("bf16-true")
    policy = plugin.convert_module(policy)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return policy, [*policy.parameters(), *policy.buffers(), *rounding(policy), *gradients], plugin


@PRECISIONS
@pytest.mark.parametrize("kind", ["scratch", "full bfloat16", "lora bfloat16", "4bit"])
def test_what_is_held_follows_the_precision(kind: str, precision: str, folder: str) -> None:
    hollow = HollowPolicy(policy_of(kind, folder), BoxTasks(), precision=precision)
    policy, held, plugin = in_precision(kind, folder, precision)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert hollow.trained_bytes == storage_bytes(trained)
    assert hollow.weight_bytes + hollow.trained_bytes == storage_bytes(held)
    with plugin.forward_context():
        cache = policy.new_cache(7, 50)
    assert cache.keys.dtype == torch.bfloat16  # half of what it is in 32-true
    assert hollow.cache_bytes(7, 50) == storage_bytes([cache.keys, cache.values])
    optimizer = torch.optim.AdamW(trained, foreach=False)
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values()]
    assert hollow.optimizer_bytes(torch.optim.AdamW)[0] == storage_bytes(state)


@PRECISIONS
@pytest.mark.parametrize("kind", ["scratch", "full", "lora bfloat16"])
def test_the_peaks_follow_the_precision(kind: str, precision: str, folder: str) -> None:
    hollow = HollowPolicy(policy_of(kind, folder), BoxTasks(), precision=precision)
    policy, held, plugin = in_precision(kind, folder, precision)
    micro = micro_batch(SHAPE)
    with LiveBytes(held) as live, plugin.forward_context():
        logprobs, entropies = policy.chosen_logprobs(micro, 1.0)
        loss = logprobs.sum() + entropies.sum() + policy.reference_logprobs(micro, 1.0).sum()
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    given = storage_bytes([t for t in vars_of(micro) if isinstance(t, Tensor)])
    assert live.peak <= hollow.update_bytes(SHAPE, with_reference=True).peak <= live.peak + given + 400
    policy.eval()
    with plugin.forward_context(), without_gradients("cpu"), kept_casts():
        cache = policy.new_cache(7, 50)
        with LiveBytes([*held, cache.keys, cache.values]) as live:
            cache.lengths = [30] * 7
            policy.feed(cache, [[5] * 20] * 7)
    # Short models speak for six layers: copies of weights that one layer makes and the next releases differ a little.
    assert hollow.rollout_bytes(7, 50, 20, 3) == pytest.approx(live.peak, rel=0.01)


def test_mixed_precision_keeps_copies_of_frozen_weights_in_the_graph(folder: str) -> None:
    """Each product has its own bfloat16 copy of a float32 weight, which the gradient of its input needs."""
    plain, mixed = (HollowPolicy(policy_of("lora", folder), BoxTasks(), precision=p) for p in ("32-true", "bf16-mixed"))
    few = MicroShape(rows=1, length=8, listed=3, allowed=9, free=0)
    layers = [m for m in plain.policy.model.modules() if isinstance(m, torch.nn.Linear) and not m.weight.requires_grad]
    copies = sum(2 * m.weight.numel() for m in layers if m is not plain.policy.model.get_output_embeddings())
    assert mixed.update_bytes(few, False).activations > copies
    assert mixed.update_bytes(few, False).activations > plain.update_bytes(few, False).activations


def test_gradient_checkpointing_and_the_log_probs_of_free_answers(folder: str) -> None:
    plain = HollowPolicy(CausalLMPolicy(folder, lora=LORA), BoxTasks())
    saving = HollowPolicy(CausalLMPolicy(folder, lora=LORA, gradient_checkpointing=True), BoxTasks())
    one, other = plain.update_bytes(SHAPE, True), saving.update_bytes(SHAPE, True)
    assert other.activations < one.activations / 2
    assert other.logprobs == one.logprobs
    free = plain.update_bytes(MicroShape(6, 60, 0, 0, 100), True)
    vocabulary = plain.policy.model.config.vocab_size
    # At least the scores of every word for each of the 100 tokens, float32.
    assert free.logprobs >= 100 * vocabulary * 4
    # Longer rows of as many tokens hold no more: attention is fused on this machine.
    assert plain.update_bytes(MicroShape(3, 120, 100, 300, 0), True).activations <= 1.01 * one.activations


def test_choices_among_some_and_among_all_in_one_micro_batch(folder: str) -> None:
    shape = replace(SHAPE, listed=60, allowed=180, free=40)
    policy, held = real("lora", folder)
    micro = micro_batch(replace(SHAPE, listed=100, allowed=300))
    counts = micro.allowed_counts.clone()
    counts[60:] = 0  # the last forty were free
    micro = replace(micro, allowed_counts=counts, allowed_ids=micro.allowed_ids[:180])
    with LiveBytes(held) as live:
        sum(part.sum() for part in policy.chosen_logprobs(micro, 1.0)).backward()
    counted = HollowPolicy(policy_of("lora", folder), BoxTasks()).update_bytes(shape, with_reference=False)
    assert counted.peak == pytest.approx(live.peak, rel=0.002)


@pytest.mark.parametrize("widest", [None, 5])
def test_sampling_holds_no_more_than_is_planned(widest: int | None, tmp_path: Any) -> None:
    hidden, rows, vocabulary = 16, 64, 3000
    layer = torch.nn.Linear(hidden, vocabulary, bias=False).requires_grad_(False).bfloat16()
    states = torch.randn(rows, hidden).bfloat16()
    allowed = [None if widest is None else list(range(widest))] * rows
    with LiveBytes([layer.weight, states]) as live:
        choose_tokens(OutputLayer(layer), states, allowed, [0.5] * rows, 1.0)
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    few = save_tiny(tmp_path, vocab_size=vocabulary, **sizes)
    hollow = HollowPolicy(CausalLMPolicy(few, dtype="bfloat16"), BoxTasks())
    planned = hollow.rollout_bytes(rows, 8, 1, widest)
    assert live.peak <= planned
    if widest is None:
        assert planned <= 1.05 * live.peak  # sampling is what counts here


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "NAdam", "AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_the_state_of_optimisers_is_exact(name: str, tmp_path: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # Wide enough for tensors that are rounded (from 4,096 numbers) beside those that are not.
    folder = save_tiny(tmp_path, hidden_size=128)
    cls = getattr(torch.optim, name, None) or getattr(bitsandbytes.optim, name)
    counted, step = HollowPolicy(policy_of("full", folder), BoxTasks()).optimizer_bytes(lambda ps: cls(ps, lr=1e-3))
    policy, _ = real("full", folder)
    optimizer = cls(policy.parameters(), lr=1e-3)
    optimizer.is_paged = False  # pages need a GPU
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    assert counted == storage_bytes(state)
    assert step >= 0


def test_an_optimiser_that_needs_values_is_named(folder: str) -> None:
    class Stubborn(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no values")

    with pytest.raises(ValueError, match="Stubborn cannot be tried without values: no values"):
        HollowPolicy(policy_of("full", folder), BoxTasks()).optimizer_bytes(lambda ps: Stubborn(ps, lr=0.1))


def test_the_policy_that_is_planned_for_stays_unprepared(folder: str) -> None:
    policy = policy_of("lora", folder)
    HollowPolicy(policy, BoxTasks())
    assert not hasattr(policy, "model")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_live_bytes_are_counted_once_and_until_they_are_released() -> None:
    given = torch.zeros(10)
    with LiveBytes([given]) as live:
        one = torch.zeros(100)  # 400 bytes
        view, same = one[:50], given.view(2, 5)
        assert live.now == 400
        two = torch.zeros(25)  # 100 more
        del one
        assert live.now == 500  # the view holds it
        del view, two
        assert (live.now, live.peak) == (0, 500)
    del same


def test_rounded_weights() -> None:
    # 100 weights: 50 bytes; 2 scales of 1 byte; 1 scale of scales of 4; tables of (16 + 256 + 1) × 4 = 1,092.
    assert nf4_bytes(100) == 50 + 2 + 4 + 1092
    # 64 × 256 + 1 weights: 8,193 bytes (rounded up), 257 scales, 2 scales of scales.
    assert nf4_bytes(64 * 256 + 1) == 8193 + 257 + 8 + 1092
    assert int8_bytes(3, 5) == 15 + 12


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("0.5 gib", 2**29), ("80GB", 80 * 10**9), ("7", 7)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "24GiBB", "-1GiB", "0GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write a number and a unit"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    shown = [format_size(size) for size in (0, 2048, 5.5 * 2**20, 300 * 2**20, 2**30, 150 * 2**30)]
    assert shown == ["0 KiB", "2 KiB", "5.5 MiB", "300 MiB", "1.00 GiB", "150 GiB"]


def test_free_memory_of_the_cpu() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50
