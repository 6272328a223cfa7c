"""Reading PDDL: text in, nested tuples and a `Problem` out. Knows nothing about rooms, commands or the ALFRED domain.

Only what a problem file needs is read: typed objects, the facts of the initial state and the goal. Names are
lower-cased, as PDDL is case-insensitive; numbers (distances, costs) are skipped, as no text depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fact = tuple[str, ...]
Expression = tuple[Any, ...]

_COMMENT = re.compile(r";[^\n]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_QUANTIFIERS = ("exists", "forall")
_CONNECTIVES = {"and": None, "or": None, "not": 1, "imply": 2, "=": 2}


@dataclass(frozen=True)
class Problem:
    """A parsed problem: `objects` maps ids to types, `facts` are (predicate, argument, ...), `goal` is nested tuples.

    In the goal, quantifiers read `("exists", (("?o", "object"), ...), body)`, connectives `("and", part, ...)`,
    `("or", ...)`, `("not", part)`, `("imply", a, b)`, `("=", a, b)`; every other tuple is an atom.
    """

    name: str
    domain: str
    objects: Mapping[str, str]
    facts: tuple[Fact, ...]
    goal: Expression


def parse_expressions(text: str) -> list[Any]:
    """The top-level parenthesised expressions of `text` as nested lists of lower-case tokens.

    Raises:
        ValueError: Brackets that do not match, or text outside of brackets.
    """
    if ";" in text:
        text = _COMMENT.sub("", text)
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(text.lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError("PDDL text has a ')' without a '('")
            closed = stack.pop()
            stack[-1].append(closed)
        elif len(stack) == 1:
            raise ValueError(f"PDDL text has {token!r} outside of brackets")
        else:
            stack[-1].append(token)
    if len(stack) > 1:
        raise ValueError(f"PDDL text ends too early: {len(stack) - 1} bracket(s) left open")
    return stack[0]


def typed_list(tokens: list[Any], where: str) -> list[tuple[str, str]]:
    """`a b - t c` as `[(a, t), (b, t), (c, "object")]`. `where` names the list in errors."""
    result: list[tuple[str, str]] = []
    names: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if not isinstance(token, str):
            raise ValueError(f"{where} of the PDDL text must be names and types, found {_show(token)}")
        if token == "-":
            if position + 1 >= len(tokens) or not isinstance(tokens[position + 1], str):
                raise ValueError(f"{where} of the PDDL text has '-' without a type after {names[-1:]}")
            result += [(name, tokens[position + 1]) for name in names]
            names = []
            position += 2
        else:
            names.append(token)
            position += 1
    return result + [(name, "object") for name in names]


def parse_problem(text: str) -> Problem:
    """Parse the text of a PDDL problem.

    Raises:
        ValueError: The text is no PDDL problem; the message names the part that is wrong.
    """
    expressions = parse_expressions(text)
    if len(expressions) != 1 or expressions[0][:1] != ["define"]:
        raise ValueError("a PDDL problem must be one '(define ...)' expression")
    parts: dict[str, list[Any]] = {}
    for part in expressions[0][1:]:
        if not isinstance(part, list) or not part or not isinstance(part[0], str):
            raise ValueError(f"a PDDL problem must consist of '(keyword ...)' parts, found {_show(part)}")
        parts[part[0]] = part[1:]
    for keyword in ("problem", ":domain", ":objects", ":init", ":goal"):
        if keyword not in parts:
            raise ValueError(f"the PDDL problem has no '({keyword} ...)' part")
    if len(parts[":goal"]) != 1:
        raise ValueError("the (:goal ...) part of the PDDL problem must hold exactly one expression")
    objects = dict(typed_list(parts[":objects"], "the (:objects ...) part"))
    goal = _goal(parts[":goal"][0], objects, frozenset())
    return Problem(_word(parts["problem"]), _word(parts[":domain"]), objects, _facts(parts[":init"], objects), goal)


def _facts(init: list[Any], objects: Mapping[str, str]) -> tuple[Fact, ...]:
    facts: dict[Fact, None] = {}
    for entry in init:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise ValueError(f"the (:init ...) part of the PDDL problem must hold facts, found {_show(entry)}")
        if entry[0] in ("=", "not"):
            continue
        for argument in entry[1:]:
            if not isinstance(argument, str) or argument not in objects:
                raise ValueError(f"the fact {_show(entry)} names {_show(argument)}, which (:objects ...) does not list")
        facts[tuple(entry)] = None
    return tuple(facts)


def _goal(node: Any, objects: Mapping[str, str], bound: frozenset[str]) -> Expression:
    if not isinstance(node, list):
        raise ValueError(f"the (:goal ...) part of the PDDL problem must be nested brackets, found {_show(node)}")
    if not node:
        return ("and",)
    head, rest = node[0], node[1:]
    if head in _QUANTIFIERS:
        if len(rest) != 2 or not isinstance(rest[0], list):
            raise ValueError(f"the goal has a malformed quantifier: {_show(node)}")
        variables = tuple(typed_list(rest[0], "a quantifier"))
        return (head, variables, _goal(rest[1], objects, bound | {name for name, _ in variables}))
    if head in _CONNECTIVES and head != "=":
        count = _CONNECTIVES[head]
        if count is not None and len(rest) != count:
            raise ValueError(f"the goal has '{head}' with {len(rest)} part(s) instead of {count}: {_show(node)}")
        return (head, *(_goal(part, objects, bound) for part in rest))
    for term in rest:
        if not isinstance(term, str) or (term not in bound and term.startswith("?")):
            raise ValueError(f"the goal's atom {_show(node)} has the unbound or malformed term {_show(term)}")
    if not isinstance(head, str) or (head == "=" and len(rest) != 2):
        raise ValueError(f"the goal has a malformed atom: {_show(node)}")
    return tuple(node)


def _word(part: list[Any]) -> str:
    return part[0] if part and isinstance(part[0], str) else ""


def _show(node: Any) -> str:
    text = node if isinstance(node, str) else "(" + " ".join(map(_show, node)) + ")"
    return text if len(text) <= 80 else text[:77] + "..."
