"""A small policy made on the spot: a Llama of 0.1 to 10 M parameters and a tokenizer built from the world's vocabulary.

It needs no model hub and no GPU. Words and fixed phrases of the world are one token each, so that prompts stay short.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.policy.base import BasePolicy, KeptTurn, PromptFormat
from gigpo_lightning.policy.plain_text import plain_ids
from gigpo_lightning.policy.ragged import ATTENTION_NAME
from gigpo_lightning.suggest import did_you_mean

SPECIAL = ("<pad>", "<unk>", "<bos>", "<task>", "<act>", "<end>")
# Printable ASCII one by one: what the vocabulary lacks is spelled, so that no two actions ever share their tokens.
FALLBACK = tuple(chr(code) for code in range(33, 127))
MAX_PARAMETERS = 50_000_000


def build_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per entry of `vocabulary` (words and phrases), longest match first, spaces dropped."""
    entries = sorted({entry.strip() for entry in vocabulary if entry.strip()} - set(FALLBACK) - set(SPECIAL))
    if not entries:
        raise ValueError("vocabulary is empty: the task set must name its words")
    ids = {token: i for i, token in enumerate((*SPECIAL, *FALLBACK, *entries))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    longest_first = sorted(entries, key=lambda e: (-len(e), e))
    # A word ends where its letters end: "pen" is not found inside "pencil".
    known = "|".join(
        (r"(?<!\w)" if e[0].isalnum() else "") + re.escape(e) + (r"(?!\w)" if e[-1].isalnum() else "")
        for e in longest_first
    )
    split = pre_tokenizers.Split(Regex(f"{known}|\\S"), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )


class ScratchPrompt(PromptFormat):
    """`<bos> observation <task> instruction <act> action <end> observation <task> instruction <act> …`.

    With `repeat_instruction` the goal stands at the same short distance before every answer, which one attention layer
    can find; without it the goal stands once, after `<bos>`. An action that starts with a word of `verb_last` is
    written with that word at its end (`mug 1 from shelf 2 take`): whether its object is there is then a question of the
    words allowed, not one that the policy must answer before it names the object. Encodings are remembered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, repeat_instruction: bool, verb_last: Sequence[str] = ()):
        self.tokenizer, self.repeat_instruction = tokenizer, repeat_instruction
        self._verb_last = {self._single(verb) for verb in verb_last}
        special = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
        self._bos, self._task, self._act = special["<bos>"], special["<task>"], special["<act>"]
        self._end = special["<end>"]
        self._encoded: dict[str, tuple[int, ...]] = {}

    @property
    def end_id(self) -> int:
        return self._end

    def _single(self, verb: str) -> int:
        """The id of an entry of the vocabulary; special tokens and single characters, which spell, are none."""
        first = len(SPECIAL) + len(FALLBACK)
        entries = {entry: token for entry, token in self.tokenizer.get_vocab().items() if token >= first}
        if verb not in entries:
            hint = did_you_mean(verb, sorted(entries), quote="'")
            raise ValueError(f"policy.verb_last has {verb!r}: it must be one entry of the world's vocabulary{hint}")
        return int(entries[verb])

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._encoded.get(text)
        if ids is None:
            if len(self._encoded) > 200_000:
                self._encoded.clear()
            ids = self._encoded[text] = plain_ids(self.tokenizer, text)
        return ids

    def header(
        self,
        instruction: str,
        kept: Sequence[KeptTurn],
        observation: str,
        admissible: Sequence[str] | None = None,
    ) -> list[int]:
        ids = [self._bos]
        if not self.repeat_instruction:
            ids += [self._task, *self._encode(instruction)]
        for turn in kept:
            ids += [*self._encode(turn.observation), self._act, *turn.action_ids]
        return ids + self.continuation(instruction, observation)

    def continuation(self, instruction: str, observation: str, admissible: Sequence[str] | None = None) -> list[int]:
        reminder = [self._task, *self._encode(instruction)] if self.repeat_instruction else []
        return [*self._encode(observation), *reminder, self._act]

    def action_ids(self, action: str) -> tuple[int, ...]:
        ids = self._encode(action)
        if ids and ids[0] in self._verb_last:
            ids = (*ids[1:], ids[0])
        elif ids and ids[-1] in self._verb_last:
            raise ValueError(f"action {action!r} ends with a word of policy.verb_last: it could not be read back")
        return (*ids, self._end)

    def action_text(self, token_ids: Sequence[int]) -> str:
        kept = [i for i in token_ids if i != self._end]
        if kept and kept[-1] in self._verb_last:
            kept = [kept[-1], *kept[:-1]]
        return str(self.tokenizer.decode(kept))


def start_copying(model: LlamaForCausalLM, copy: float, recency: float) -> None:
    """Add a start to the attention weights in which every head copies what was read last.

    *Copying*: in each layer the value and output projections of key/value head j become copy · P_j and copy · P_jᵀ / g
    (g query heads share it), with the P_j slices of one random orthogonal matrix. With tied embeddings a head that
    attends to a word then raises that word's own logit: only where to look must be learned.
    *Recency*: query and key biases of c add 2c² Σ_i cos(θ_i Δ) / √d to the score of a token Δ back: highest for near
    ones. Source: in the spirit of mimetic initialisation (arXiv 2305.09828).
    """
    config = model.config
    width, group = config.hidden_size, config.num_attention_heads // config.num_key_value_heads
    head = width // config.num_attention_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            basis = torch.linalg.qr(torch.randn(width, width)).Q
            for j in range(config.num_key_value_heads):
                part = basis[j * head : (j + 1) * head]
                attention.v_proj.weight[j * head : (j + 1) * head] += copy * part
                for h in range(j * group, (j + 1) * group):
                    attention.o_proj.weight[:, h * head : (h + 1) * head] += copy * part.T / group
            attention.q_proj.bias.fill_(recency)
            attention.k_proj.bias.fill_(recency)


def count_parameters(config: LlamaConfig) -> int:
    """Weights of a Llama with tied embeddings and attention biases, known before any is made."""
    width, key_width = config.hidden_size, config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    attention = 2 * (width * width + width) + 2 * (width * key_width + key_width)  # queries and output, keys and values
    layer = attention + 3 * width * config.intermediate_size + 2 * width  # feed-forward part; two norms
    return config.vocab_size * width + config.num_hidden_layers * layer + width


class ScratchPolicy(BasePolicy):
    """A Llama-architecture model initialised at random, for worlds that name their vocabulary.

    Args:
        hidden_size: Width; a multiple of `heads`.
        layers: Number of layers.
        heads: Attention heads.
        kv_heads: Key/value heads; divides `heads`.
        intermediate_size: Width of the feed-forward part; null for 3 × `hidden_size`.
        max_positions: Longest sequence in tokens; `data.segments.max_tokens` and one answer must fit.
        initializer_range: Standard deviation of the initial weights, in (0, 1].
        copy_init: Scale of an initial attention that copies the words it attends to; 0 for none.
        recency_init: Initial preference of attention for near tokens; 0 for none.
        repeat_instruction: Show the goal before every answer instead of once per segment.
        verb_last: First words of actions that the policy writes at the end: what to act on is chosen before the deed.
        rope_theta: Base of the rotary position code; small bases suit short segments.
        init_seed: Seed of the initial weights.
    """

    def __init__(
        self,
        hidden_size: int = 64,
        layers: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        intermediate_size: int | None = None,
        max_positions: int = 4096,
        initializer_range: float = 0.07,
        copy_init: float = 1.0,
        recency_init: float = 1.0,
        repeat_instruction: bool = True,
        verb_last: Sequence[str] = (),
        rope_theta: float = 1000.0,
        init_seed: int = 0,
    ):
        super().__init__()
        for name, value in (
            ("hidden_size", hidden_size),
            ("layers", layers),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("intermediate_size", 1 if intermediate_size is None else intermediate_size),
            ("max_positions", max_positions),
        ):
            if value < 1:
                raise ValueError(f"policy.{name}={value}: must be at least 1")
        if hidden_size % (2 * heads) or heads % kv_heads:
            raise ValueError(
                f"policy.hidden_size={hidden_size}, heads={heads}, kv_heads={kv_heads}: hidden_size must be a multiple "
                "of 2 × heads, and heads of kv_heads"
            )
        _check_start(initializer_range, copy_init, recency_init, rope_theta, init_seed)
        _check_words(verb_last)
        self.options = {
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": 3 * hidden_size if intermediate_size is None else intermediate_size,
            "max_position_embeddings": max_positions,
            "initializer_range": initializer_range,
            "attention_bias": True,
        }
        self.copy_init, self.recency_init = copy_init, recency_init
        self.repeat_instruction = repeat_instruction
        self.verb_last = sorted(verb_last)
        self.rope_theta = rope_theta
        self.init_seed = init_seed
        self._vocabulary_digest = ""

    def prepare(self, tasks: TaskSet) -> None:
        if self._vocabulary_digest:
            return
        vocabulary = sorted(set(tasks.vocabulary()))
        tokenizer = build_tokenizer(vocabulary)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,  # naming a thing that was read is then copying, which a small model learns fast
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation=ATTENTION_NAME,
            **self.options,
        )
        parameters = count_parameters(config)
        if parameters > MAX_PARAMETERS:
            raise ValueError(f"policy has {parameters:,} parameters; a scratch policy may have {MAX_PARAMETERS:,}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            self.model = LlamaForCausalLM(config)
            start_copying(self.model, self.copy_init, self.recency_init)
        self.prompt = ScratchPrompt(tokenizer, self.repeat_instruction, self.verb_last)
        self._vocabulary_digest = hashlib.sha256("\n".join(vocabulary).encode()).hexdigest()[:16]

    def identity(self) -> dict[str, Any]:
        return {
            **self.options,
            "rope_theta": self.rope_theta,
            "repeat_instruction": self.repeat_instruction,
            "verb_last": self.verb_last,
            "vocabulary": self._vocabulary_digest,
        }


def _check_start(
    initializer_range: float, copy_init: float, recency_init: float, rope_theta: float, init_seed: int
) -> None:
    """Refuse numbers that the initial weights or the position code cannot have."""
    if not 0 < initializer_range <= 1:
        raise ValueError(f"policy.initializer_range={initializer_range}: must lie in (0, 1], 0.07 is usual")
    for name, value in (("copy_init", copy_init), ("recency_init", recency_init)):
        if not 0 <= value < math.inf:
            raise ValueError(f"policy.{name}={value}: must be at least 0; 0 is off, 1 is usual")
    if not 0 < rope_theta < math.inf:
        raise ValueError(f"policy.rope_theta={rope_theta}: must be positive, 1000 is usual")
    if not 0 <= init_seed < 2**63:
        raise ValueError(f"policy.init_seed={init_seed}: must lie in [0, 2^63)")


def _check_words(verb_last: Sequence[str]) -> None:
    """Refuse what is no list of words, and words listed twice."""
    if verb_last is None or isinstance(verb_last, str):
        raise ValueError(f"policy.verb_last={verb_last!r}: must be a list of words, e.g. [take]; [] for none")
    twice = [verb for verb in verb_last if list(verb_last).count(verb) > 1]
    if twice:
        raise ValueError(f"policy.verb_last: {twice[0]!r} is listed twice; name each word once")
