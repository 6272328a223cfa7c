"""Telling which rules and sentences a game file was made with, by the normalised content of its domain and grammar.

A game carries its own domain (PDDL) and grammar (TWL2). The engine plays them only if every action and every sentence
is one it implements; `digests.py` holds digests of those, so that none of ALFWorld's text has to be kept here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from gigpo_lightning.envs.alfworld.digests import DOMAIN_DIGESTS, GRAMMAR_DIGESTS
from gigpo_lightning.envs.alfworld.pddl import parse_expressions
from gigpo_lightning.envs.alfworld.text import TASK_PREFIX

DOMAIN_MARKER = "alfred-text-domain/0.4"
GRAMMAR_MARKER = "alfred-text-grammar/0.4"
REFUSAL = "use engine: textworld (pip install -c constraints.txt '.[textworld]')"

_BLOCK = re.compile(r'\s*(?:#[^\n]*\n\s*)*(?:grammar\s*::\s*"""(.*?)"""\s*;|action\s+([\w/-]+)\s*\{)', re.DOTALL)
_FIELD = re.compile(r'\s*(?:(?:pddl|grammar)\s*::\s*"""(.*?)"""|(template|feedback)\s*::\s*"([^"]*)")\s*;', re.DOTALL)
_CLOSE = re.compile(r"\s*\}")
_REFERENCE = re.compile(r"#([\w()/!<>\-\s,.]+)#")
# Plain characters only: the stock grammar reads the others as its own signs.
_TASK = re.compile(re.escape(TASK_PREFIX) + r"""([^;|"<>\[\]#{}\t\n/]+\.)""")
_BOOKKEEPING = ("increase", "checked", "examined")


def check_domain(domain: str) -> frozenset[str]:
    """The lower-case names of the domain's actions, all of which the engine implements.

    Raises:
        ValueError: The text is no PDDL domain, or has an action with other rules; the message names it.
    """
    digests = domain_digests(domain)
    missing = DOMAIN_DIGESTS.keys() - digests.keys() - {"help"}
    for name in [*digests, *sorted(missing)]:
        if digests.get(name) != DOMAIN_DIGESTS.get(name):
            what = "has no" if name in missing else "has an unknown"
            raise ValueError(f"the game's PDDL domain {what} '{name}' action: {REFUSAL}")
    return frozenset(digests) - {":types"}


def check_grammar(grammar: str, actions: frozenset[str]) -> tuple[dict[str, str], str]:
    """The variant of each command and sentence that is not the only one, and the task sentence.

    Args:
        grammar: TWL2 text.
        actions: The domain's actions; what the grammar says about others is never printed.

    Raises:
        ValueError: The text is no grammar, or has an unknown sentence; the message names it.
    """
    items, task = grammar_items(grammar, actions)
    variants = {}
    for name, content in items.items():
        known = GRAMMAR_DIGESTS.get(name, {})
        variant = known.get(_digest(content))
        if variant is None:
            raise ValueError(f"the game's grammar has an unknown '{name}': {REFUSAL}")
        if variant:
            variants[name] = variant
    return variants, task


def domain_digests(domain: str) -> dict[str, str]:
    """Digest of each action of a domain by its lower-case name, and of the types."""
    expressions = parse_expressions(domain)
    if len(expressions) != 1 or expressions[0][:1] != ["define"]:
        raise ValueError("a PDDL domain must be one '(define ...)' expression")
    digests = {}
    for part in expressions[0][1:]:
        if part[:1] == [":types"]:
            digests[":types"] = _digest(sorted(part[1:]))
        elif part[:1] == [":action"] and len(part) % 2 == 0:
            fields = dict(zip(part[2::2], part[3::2], strict=True))
            digests[part[1]] = _digest({name: _normal(field) for name, field in fields.items()})
        elif part[:1] == [":derived"]:
            raise ValueError(f"the game's PDDL domain has derived predicates: {REFUSAL}")
    return digests


def grammar_items(grammar: str, actions: frozenset[str]) -> tuple[dict[str, Any], str]:
    """The commands (`command NAME`) and sentences that a game with `actions` can show, and the task sentence."""
    rules: dict[str, Any] = {}
    items: dict[str, Any] = {}
    pending = ["intro"]
    for name, template, feedback, new_rules in _blocks(grammar):
        rules.update(new_rules)
        if name in actions:
            items[f"command {name}"] = [template, feedback]
            pending += _REFERENCE.findall(feedback)
    for name in actions:
        if f"command {name}" not in items:
            raise ValueError(f"the game's grammar has no action '{name}': {REFUSAL}")
    pending += ["list_empty", "list_separator", "list_last_separator"]
    task = ""
    while pending:
        name = pending.pop()
        if name in items or name not in rules:
            continue
        content = [[rule.get("condition", "").replace(" ", ""), rule["rhs"]] for rule in rules[name]]
        sentence = _TASK.fullmatch(content[0][1]) if name == "task" and len(content) == 1 else None
        if sentence is not None:
            task = sentence[1]
            continue
        items[name] = content
        pending += [reference for _, rhs in content for reference in _REFERENCE.findall(rhs)]
    return items, task


def _blocks(grammar: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """The blocks of a TWL2 text: lower-case action name ("" for a plain grammar), template, feedback, rules."""
    position = 0
    while grammar[position:].strip():
        block = _BLOCK.match(grammar, position)
        if block is None:
            shown = grammar[position:].strip()[:40]
            raise ValueError(f"the game's grammar is malformed at {shown!r}")
        position = block.end()
        if block[2] is None:
            yield "", "", "", _rules(block[1])
            continue
        fields = {"template": "", "feedback": ""}
        rules: dict[str, Any] = {}
        while field := _FIELD.match(grammar, position):
            position = field.end()
            if field[2]:
                fields[field[2]] = field[3]
            else:
                rules.update(_rules(field[1]))
        end = _CLOSE.match(grammar, position)
        if end is None:
            raise ValueError(f"the game's grammar is malformed in action {block[2]!r}")
        position = end.end()
        yield block[2].lower(), fields["template"], fields["feedback"], rules


def _rules(block: str) -> dict[str, Any]:
    text = "\n".join(line for line in block.split("\n") if not line.lstrip().startswith("#"))
    try:
        rules = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        raise ValueError(f"the game's grammar holds malformed JSON: {error}") from error
    if not isinstance(rules, dict):
        raise ValueError("the game's grammar must hold JSON objects of rules")
    return rules


def _normal(node: Any) -> Any:
    """A PDDL expression without costs and bookkeeping, the parts of and/or in a fixed order."""
    if not isinstance(node, list):
        return node
    parts = [_normal(part) for part in node]
    if parts and parts[0] in ("and", "or"):
        kept = [part for part in parts[1:] if not (isinstance(part, list) and part and part[0] in _BOOKKEEPING)]
        return [parts[0], *sorted(kept, key=json.dumps)]
    return parts


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
