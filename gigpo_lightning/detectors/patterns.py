"""Patterns of turns that the user wrote down: regular expressions and predicates, and the label of a turn that matches.

Knows nothing of step groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gigpo_lightning.trajectory import Turn

Label = tuple[Hashable, ...]


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class Pattern:
    r"""Turns that the user names. Of several parts all must match.

    Args:
        observation: Regular expression, searched in the observation before the action; `^` and `$` stand for its ends.
        action: Regular expression, searched in the action.
        predicate: `package.module:function`, called with the turn (gigpo_lightning.trajectory.Turn). False or None is
            no match; of another value than True, turns with equal values match alike.
    """

    observation: str | None = None
    action: str | None = None
    predicate: str | None = None


def matcher(option: str, patterns: Sequence[Pattern]) -> Callable[[Turn], Label | None]:
    """From a turn to its label: the number of the first pattern that matches, and what that captured.

    None is no match; turns with equal labels match alike. What is captured are the groups of the expressions, in
    order, and the predicate's value.

    Args:
        option: Where the patterns were given, for messages.
        patterns: At least one part each.

    Raises:
        ValueError: A pattern without a part, an expression that is none, or a predicate that cannot be had.
    """
    tests = [_test(f"{option}[{number}]", pattern) for number, pattern in enumerate(patterns)]

    def label(turn: Turn) -> Label | None:
        for number, test in enumerate(tests):
            captured = test(turn)
            if captured is not None:
                return (number, *captured)
        return None

    return label


def _test(option: str, pattern: Pattern) -> Callable[[Turn], Label | None]:
    """From a turn to what the pattern captured, or None."""
    if (pattern.observation, pattern.action, pattern.predicate) == (None, None, None):
        raise ValueError(f"{option}: a pattern needs an observation, an action or a predicate")
    observation = _expression(f"{option}.observation", pattern.observation)
    action = _expression(f"{option}.action", pattern.action)
    predicate = _function(f"{option}.predicate", pattern.predicate)

    def test(turn: Turn) -> Label | None:
        captured: list[Hashable] = []
        for expression, text in ((observation, turn.observation), (action, turn.action)):
            if expression is not None:
                found = expression.search(text)
                if found is None:
                    return None
                captured += found.groups()
        if predicate is not None:
            value = predicate(turn)
            if value is None or value is False:
                return None
            captured.append(value)
        return tuple(captured)

    return test


def _expression(option: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ValueError(f"{option}={text!r}: not a regular expression: {error}") from None


def _function(option: str, path: str | None) -> Callable[[Turn], Any] | None:
    if path is None:
        return None
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{option}={path!r}: must be package.module:function")
    try:
        function = getattr(import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{option}={path!r}: {module} cannot be imported: {error}") from error
    except AttributeError:
        raise ValueError(f"{option}={path!r}: {module} has no {name}") from None
    if not callable(function):
        raise ValueError(f"{option}={path!r}: {name} is a {type(function).__name__}, not a function")
    return function
