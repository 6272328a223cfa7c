"""The seam between the trainer and a language model.

A policy owns a transformers causal model and a prompt format. Everything that samples or trains goes through the few
methods here, so that rollout and update compute the same probabilities. Knows nothing about environments or credit.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.functional.logprobs import TokenLogprobs, constrained_logprobs_from_hidden
from gigpo_lightning.functional.vocabulary import vocabulary_logprobs
from gigpo_lightning.policy.critic import Critic
from gigpo_lightning.policy.generation import OutputLayer
from gigpo_lightning.policy.ragged import KVCache, PackedRows, run_ragged


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """An earlier turn as a header shows it: what was read, and the very token ids of the answer."""

    observation: str
    action_ids: tuple[int, ...]


class Reading(NamedTuple):
    """An answer as it was meant: the action, and whether the answer kept to the format and was ended.

    `text` is the whole answer where it says more than the action, else empty.
    """

    action: str
    well_formed: bool
    text: str = ""


class PromptFormat(ABC):
    """Text to token ids. What is appended never changes what stands before it (prefix-stable by construction)."""

    tokenizer: PreTrainedTokenizerBase

    @abstractmethod
    def header(
        self,
        instruction: str,
        kept: Sequence[KeptTurn],
        observation: str,
        admissible: Sequence[str] | None = None,
    ) -> list[int]:
        """The ids that open a segment, up to the place where the policy answers.

        Args:
            instruction: The goal.
            kept: Earlier turns to show, oldest first.
            observation: What is read now.
            admissible: The actions that are possible now, for prompts that show them; None where the world does not
                list them. Kept turns are shown without theirs.
        """

    @abstractmethod
    def continuation(self, instruction: str, observation: str, admissible: Sequence[str] | None = None) -> list[int]:
        """The ids between the end of one answer and the start of the next; arguments as of `header`."""

    @abstractmethod
    def action_ids(self, action: str) -> tuple[int, ...]:
        """The ids of an action as the policy would say it, end token included; after `<action>` if it `reasons`."""

    @abstractmethod
    def action_text(self, token_ids: Sequence[int]) -> str:
        """The action that freely sampled ids spell, end token removed."""

    def read(self, token_ids: Sequence[int]) -> Reading:
        """The action that freely sampled ids spell, and whether they keep to the format of an answer."""
        return Reading(self.action_text(token_ids), self.end_id in token_ids)

    @property
    def reasons(self) -> bool:
        """Whether an answer is `<think>…</think><action>…</action>`."""
        return False

    @property
    def opened(self) -> str:
        """What the prompt itself says of every answer's text: `<think>` or nothing."""
        return ""

    @property
    @abstractmethod
    def end_id(self) -> int:
        """The id that ends an answer."""


class BasePolicy(nn.Module, ABC):
    """A causal language model with a prompt format, both there after `prepare`."""

    model: PreTrainedModel
    prompt: PromptFormat

    def __init__(self) -> None:
        super().__init__()
        self.critic: Critic | None = None

    @abstractmethod
    def prepare(self, tasks: TaskSet) -> None:
        """Build or load what the policy needs for these tasks; a second call changes nothing."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain values that a checkpoint must share with this policy, by name of the option or fact."""

    def add_critic(self, detach: bool) -> None:
        """Put a value head on the prepared model; a second call changes nothing.

        Args:
            detach: Whether the value loss trains the head alone.
        """
        if self.critic is None:
            self.critic = Critic(self.model.config.hidden_size, detach).to(next(self.parameters()).device)

    def trained_parts(self) -> dict[str, list[nn.Parameter]]:
        """What is trained, by the prefix of its figures: the model, and the value head where there is one."""
        head = [] if self.critic is None else list(self.critic.parameters())
        own = {id(parameter) for parameter in head}
        model = [p for p in self.parameters() if p.requires_grad and id(p) not in own]
        return {"": model, "critic_": head} if head else {"": model}

    def state_dict_without_critic(self) -> dict[str, Any]:
        """The weights that a copy without a critic has, too."""
        return {name: weight for name, weight in self.state_dict().items() if not name.startswith("critic.")}

    def make_reference(self) -> BasePolicy | None:
        """A frozen copy of the policy as it is, for the KL; None where `reference_logprobs` needs none."""
        return copy.deepcopy(self).requires_grad_(False).eval()

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Log-probabilities [N] that the KL is measured against: a frozen copy's own.

        A policy whose `make_reference` gives None answers here as it was before training.
        """
        return self.chosen_logprobs(batch, temperature)[0]

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model can read, in tokens; None where it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens.

        Raises:
            ValueError: The model has fewer positions than `capacity`.
        """
        positions = self.positions
        if positions is not None and capacity > positions:
            raise ValueError(
                f"the policy has {positions} positions, but segments may grow to {capacity} tokens: lower "
                "data.segments.max_tokens, or give the policy more positions"
            )
        weight = self.model.get_output_embeddings().weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return KVCache(self.model.config, rows, capacity, dtype, weight.device)

    def feed(self, cache: KVCache, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to the first rows of the cache; returns the final hidden state of each row's last one.

        Args:
            cache: From `new_cache`.
            token_ids: New tokens of each row, from the first; a row without any is passed over.

        Returns:
            [rows that got tokens, hidden], in the model's type.
        """
        counts = [len(ids) for ids in token_ids]
        flat = torch.tensor([i for ids in token_ids for i in ids], device=cache.keys.device)
        position = cache.append(counts)
        hidden = run_ragged(self.model, flat, position, cache)
        last = torch.tensor([count for count in counts if count], device=hidden.device).cumsum(0) - 1
        return hidden[last]

    def output_layer(self) -> OutputLayer:
        """The scores of next tokens under the present weights."""
        return OutputLayer(self.model.get_output_embeddings())

    def chosen_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the chosen tokens, under the constraint that held when sampling."""
        return self._rate(self._run(batch), batch, temperature)

    def values(self, batch: MicroBatch) -> Tensor:
        """What the critic says of the states [K] of `batch.values`, float32."""
        assert self.critic is not None and batch.values is not None
        return self.critic(self._run(batch)[batch.values.states])

    def logprobs_and_values(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """`chosen_logprobs` and `values` from one pass through the model."""
        assert self.critic is not None and batch.values is not None
        hidden = self._run(batch)
        return (*self._rate(hidden, batch, temperature), self.critic(hidden[batch.values.states]))

    def _run(self, batch: MicroBatch) -> Tensor:
        """The final hidden states [T] of all tokens."""
        packed = PackedRows.from_lengths(batch.lengths, batch.token_ids.device)
        return run_ragged(self.model, batch.token_ids, packed.position, packed)

    def _rate(self, hidden: Tensor, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the chosen tokens."""
        # The token at position i was chosen from the state after position i − 1.
        before, ids = hidden[batch.chosen - 1], batch.token_ids[batch.chosen]
        if batch.allowed_counts is None:
            return self._among_all(before, ids, temperature)
        listed, free = (batch.allowed_counts > 0).nonzero()[:, 0], (batch.allowed_counts == 0).nonzero()[:, 0]
        if not len(free):
            return self._among_listed(before, ids, batch.allowed_ids, batch.allowed_counts, temperature)
        counts = batch.allowed_counts[listed]
        parts = (
            self._among_listed(before[listed], ids[listed], batch.allowed_ids, counts, temperature),
            self._among_all(before[free], ids[free], temperature),
        )
        place = torch.cat([listed, free]).argsort()
        logprobs, entropy = (torch.cat(pair)[place] for pair in zip(*parts, strict=True))
        return logprobs, entropy

    def _among_listed(
        self, hidden: Tensor, token_ids: Tensor, allowed_ids: Tensor, allowed_counts: Tensor, temperature: float
    ) -> TokenLogprobs:
        """Log-probabilities and entropies [N] of tokens chosen among the allowed ones."""
        head = self.model.get_output_embeddings()
        return constrained_logprobs_from_hidden(
            hidden, head.weight, token_ids, allowed_ids, allowed_counts, temperature, head.bias
        )

    def _among_all(self, hidden: Tensor, token_ids: Tensor, temperature: float) -> TokenLogprobs:
        """Log-probabilities and entropies [N] of tokens chosen among the whole vocabulary."""
        head = self.model.get_output_embeddings()
        return vocabulary_logprobs(hidden, head.weight, token_ids, temperature=temperature, bias=head.bias)
