"""Checkpoints of another policy: one sentence says of which, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from gigpo_lightning.policy.identity import check_same_policy, identity_of


class Named:
    """Stands in for a policy."""

    def __init__(self, **options: Any):
        self.options = options

    def identity(self) -> dict[str, Any]:
        return self.options


class Other(Named):
    """Another class of policy."""


def refusal(saved: Any, policy: Any) -> str:
    with pytest.raises(ValueError, match="checkpoint") as caught:
        check_same_policy(saved, policy)
    return str(caught.value)


def test_the_same_policy_passes_also_where_the_class_was_not_noted() -> None:
    check_same_policy(identity_of(Named(a=1)), Named(a=1))  # type: ignore[arg-type]
    check_same_policy({"a": 1}, Named(a=1))  # type: ignore[arg-type]


def test_spread_weights_make_no_other_policy() -> None:
    spread = type("FSDPNamed", (FSDPModule, Named), {"__new__": lambda cls, **_: object.__new__(cls)})
    assert identity_of(spread(a=1)) == identity_of(Named(a=1))  # type: ignore[arg-type]


def test_another_class_is_named_and_not_its_options() -> None:
    text = refusal(identity_of(Other(a=1, b=2)), Named(a=2))  # type: ignore[arg-type]
    assert "of another policy: Other, this run has Named; name a checkpoint file" in text
    assert "there" not in text
    assert text.count(". ") == 0  # one sentence


def test_at_most_three_options_are_spelled_out() -> None:
    text = refusal(identity_of(Named(a=1, b=1, c=1, d=1, e=1, same=0)), Named(a=2, b=2, c=2, d=2, e=2, same=0))  # type: ignore[arg-type]
    assert "(a: 1 there, 2 here; b: 1 there, 2 here; c: 1 there, 2 here; and 2 more)" in text
    assert "same" not in text


def test_a_foreign_checkpoint_is_told() -> None:
    assert "it names no policy" in refusal(None, Named())
