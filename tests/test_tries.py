"""The tries that are remembered: the same for the same actions, the oldest given up first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gigpo_lightning.policy import tries
from gigpo_lightning.policy.tries import TrieCache


def cache() -> tuple[TrieCache, list[str]]:
    """A cache, and the actions in the order in which they were spelled."""
    spelled: list[str] = []

    def spell(action: str) -> tuple[int, ...]:
        spelled.append(action)
        return (*map(ord, action), 0)

    prompt: Any = SimpleNamespace(action_ids=spell)
    return TrieCache(prompt), spelled


def test_a_trie_is_built_once_and_an_action_spelled_once() -> None:
    kept, spelled = cache()
    first = kept.get(("look", "take"))
    assert kept.get(("look", "take")) is first
    kept.get(("go", "look"))
    assert spelled == ["look", "take", "go"]


def test_the_oldest_trie_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "TRIES_KEPT", 2)
    kept, _ = cache()
    oldest, second = kept.get(("a",)), kept.get(("b",))
    third = kept.get(("c",))
    assert kept.get(("b",)) is second and kept.get(("c",)) is third
    assert kept.get(("a",)) is not oldest


def test_spellings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "SPELLED_KEPT", 2)
    kept, spelled = cache()
    kept.get(("a", "b", "c"))
    kept.get(("a", "c"))
    assert spelled == ["a", "b", "c", "a"]  # the third emptied what was remembered
