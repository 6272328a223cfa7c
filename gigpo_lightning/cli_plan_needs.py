"""What a run will hold in memory, part by part, and which options would make it less.

Puts together what `HollowPolicy` counts; knows the options of a run, not the command line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.memory import GIB
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.hollow import HollowPolicy, MicroShape, UpdateBytes
from gigpo_lightning.rollout.collector import ACTION_ROOM_TOKENS
from gigpo_lightning.rollout.random_play import Work

# CUDA's context, kernels and cuBLAS's workspace: of a whole card that much is not there for tensors.
CONTEXT_BYTES = round(0.75 * GIB)
# Above this share of the memory a run is called tight: the allocator does not use every gap.
TIGHT_FRAC = 0.9
# Where no tokenizer is at hand to count with: the share of tokens that are chosen, ids to choose among (mean
# and most), a long prompt.
_CHOSEN_FRAC, _ALLOWED, _WIDEST, _PROMPT_TOKENS = 0.1, 8, 64, 640
# Tokens that a segment needs beside its longest prompt to be worth its prompt.
_SHORTEST_ANSWERS = 128


@dataclass(frozen=True)
class Setup:
    """The options of a run that its memory depends on.

    Attributes:
        policy: Not prepared.
        tasks, optimizer: As in the datamodule and the module; and the optimiser's name.
        kl: Whether the loss has a KL to a reference.
        rows, max_tokens, micro_tokens: Episodes under way; tokens of a segment, and of a micro-batch.
        constrain: Whether answers are chosen among the admissible ones.
        work: What an episode comes to at most; None where it could not be counted.
        on_gpu: Whether the run is on a GPU.
    """

    policy: BasePolicy
    tasks: TaskSet
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    optimizer_name: str
    kl: bool
    rows: int
    max_tokens: int
    micro_tokens: int
    constrain: bool
    work: Work | None
    on_gpu: bool

    @property
    def capacity(self) -> int:
        """Tokens of a row of the key-value cache."""
        return self.max_tokens + ACTION_ROOM_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """The longest text that a row reads at once."""
        return min(self.work.prompt_tokens if self.work else _PROMPT_TOKENS, self.max_tokens)

    @property
    def widest(self) -> int | None:
        """The most ids that a token is chosen among; None for the whole vocabulary."""
        return self.work.widest if self.work else _WIDEST if self.constrain else None

    @property
    def micro_shape(self) -> MicroShape:
        """The largest micro-batch: a row that is longer than `micro_tokens` makes one of its own."""
        rows = ceil(self.micro_tokens / self.max_tokens)
        length = self.max_tokens if rows == 1 else self.micro_tokens // rows
        if self.work is not None:
            share = rows * length / self.work.tokens
            listed, allowed, free = (share * n for n in (self.work.listed, self.work.allowed, self.work.free))
        else:
            chosen = rows * length * _CHOSEN_FRAC
            listed, allowed, free = (chosen, chosen * _ALLOWED, 0.0) if self.constrain else (0.0, 0.0, chosen)
        # More than there are rows: a dry run tells the two by their number.
        least = rows + 1 if listed else 0
        return MicroShape(rows, length, max(round(listed), least), max(round(allowed), 2 * least), round(free))


@dataclass(frozen=True)
class Needs:
    """Bytes of a run by part; `update`, `rollout` and `step` are peaks beyond what is held all the time.

    `update_otherwise` is `update` with gradient checkpointing switched the other way, where the policy has it. The
    `cache` of keys and values is there in the rollout, and on a CPU kept in the update (`cache_stays`).
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    update: UpdateBytes
    update_otherwise: UpdateBytes | None
    step: int
    cache: int
    cache_stays: bool
    rollout: int

    @property
    def held(self) -> int:
        """What is held all the time, the cache left out."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peaks(self) -> dict[str, int]:
        """All that is held at the peaks of the run."""
        kept = self.held + self.cache * self.cache_stays
        return {
            "the update": kept + self.update.peak,
            "the optimiser step": kept + self.step,
            "the rollout": self.held + self.cache + self.rollout,
        }

    @property
    def total(self) -> int:
        """The peak of the run."""
        return max(self.peaks.values())


class Planner:
    """Counts needs; remembers the models that it has built, as the options to compare share them."""

    def __init__(self) -> None:
        self._hollow: dict[Any, HollowPolicy] = {}
        self._counted: dict[Any, Any] = {}

    def needs(self, setup: Setup, compare: bool = True) -> Needs:
        """The needs of a run.

        Args:
            setup: The run.
            compare: Whether to count the update without (or with) gradient checkpointing, too.

        Raises:
            ValueError: Model or adapter cannot be built, or the optimiser cannot be tried.
        """
        hollow = self._build(setup)
        optimizer, step = hollow.optimizer_bytes(setup.optimizer)
        return Needs(
            parameters=hollow.parameters,
            trained=hollow.trained,
            weights=hollow.weight_bytes,
            gradients=hollow.trained_bytes,
            optimizer=optimizer,
            reference=hollow.reference_bytes if setup.kl else 0,
            update=self._update(setup),
            update_otherwise=self._update(_switched(setup)) if compare and _is_pretrained(setup) else None,
            step=step,
            cache=hollow.cache_bytes(setup.rows, setup.capacity),
            cache_stays=not setup.on_gpu,
            rollout=self._once(
                ("rollout", id(hollow), setup.rows, setup.capacity, setup.prompt_tokens, setup.widest),
                lambda: hollow.rollout_bytes(setup.rows, setup.capacity, setup.prompt_tokens, setup.widest),
            ),
        )

    def savings(self, setup: Setup) -> list[tuple[str, int]]:
        """Options that would lower the peak, with the bytes that each would save by itself, the largest first."""
        before = self.needs(setup, compare=False).total
        saved = [(name, before - self.needs(other, compare=False).total) for name, other in _alternatives(setup)]
        return sorted([(name, size) for name, size in saved if size > 0.01 * before], key=lambda pair: -pair[1])

    def _update(self, setup: Setup) -> UpdateBytes:
        hollow = self._build(setup)
        return self._once(
            ("update", id(hollow), setup.micro_shape, setup.kl),
            lambda: hollow.update_bytes(setup.micro_shape, setup.kl),
        )

    def _build(self, setup: Setup) -> HollowPolicy:
        policy = setup.policy
        options = [getattr(policy, name, None) for name in ("dtype", "lora", "quantization", "gradient_checkpointing")]
        key = repr(options)
        if key not in self._hollow:
            self._hollow[key] = HollowPolicy(policy, setup.tasks, setup.on_gpu)
        return self._hollow[key]

    def _once(self, key: Any, count: Callable[[], Any]) -> Any:
        if key not in self._counted:
            self._counted[key] = count()
        return self._counted[key]


def _is_pretrained(setup: Setup) -> bool:
    return isinstance(setup.policy, CausalLMPolicy)


def _with(setup: Setup, **options: Any) -> Setup:
    """The setup with other options of its policy."""
    policy = copy.deepcopy(setup.policy)
    for name, value in options.items():
        setattr(policy, name, value)
    return replace(setup, policy=policy)


def _switched(setup: Setup) -> Setup:
    """With gradient checkpointing the other way."""
    return _with(setup, gradient_checkpointing=not getattr(setup.policy, "gradient_checkpointing", False))


def _alternatives(setup: Setup) -> list[tuple[str, Setup]]:
    """What a user may change, one option at a time, as it would be written on the command line."""
    rows, micro, longest = setup.rows // 2, setup.micro_tokens // 2, setup.max_tokens // 2
    found: list[tuple[str, Setup]] = []
    if rows:
        found.append((f"--data.rows={rows}", replace(setup, rows=rows)))
    if micro >= 256:
        found.append((f"--data.max_tokens_per_batch={micro}", replace(setup, micro_tokens=micro)))
    if longest >= setup.prompt_tokens + _SHORTEST_ANSWERS:
        found.append((f"--data.segments.max_tokens={longest}", replace(setup, max_tokens=longest)))
    policy, prefix = setup.policy, "--model.policy.init_args."
    if not isinstance(policy, CausalLMPolicy):
        return found
    if not policy.gradient_checkpointing:
        found.append((f"{prefix}gradient_checkpointing=true", _switched(setup)))
    if policy.lora is None:
        found.append((f"{prefix}lora={{r: 16}}", _with(setup, lora=LoRA())))
    elif policy.quantization == "none":
        found += [(f"{prefix}quantization={q}", _with(setup, quantization=q)) for q in ("8bit", "4bit")]
    if policy.lora is not None and policy.dtype == "float32":
        found.append((f"{prefix}dtype=bfloat16", _with(setup, dtype="bfloat16")))
    eight_bit = _eight_bit_adam(setup)
    return found + ([("--model.optimizer=bitsandbytes.optim.AdamW8bit", eight_bit)] if eight_bit else [])


def _eight_bit_adam(setup: Setup) -> Setup | None:
    """With Adam's moments in 8 bit; None where bitsandbytes is missing."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return None
    return replace(setup, optimizer=lambda parameters: AdamW8bit(list(parameters)))
