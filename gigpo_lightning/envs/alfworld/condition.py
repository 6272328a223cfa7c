"""Goals made fast: a quantified PDDL condition becomes a small formula over ground atoms that can still change.

Facts that no action changes (types, affordances, where receptacles stand) are decided here, once per game. Knows
nothing about commands or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gigpo_lightning.envs.alfworld.pddl import Expression, Fact

# A formula is True, False, ("atom", fact), ("not", formula), ("and", formulas) or ("or", formulas).
Formula = Any


class Grounder:
    """Expands conditions over the objects of one problem.

    Args:
        objects: Object ids with their types. Everything is an `object`, as in the ALFRED domain's flat hierarchy.
        facts: The facts of the initial state; they decide every predicate that is not in `fluents`.
        fluents: Predicates that actions change; their atoms stay in the formula.
    """

    def __init__(self, objects: Mapping[str, str], facts: frozenset[Fact], fluents: frozenset[str]) -> None:
        self._fluents = fluents
        self._facts = facts
        self._by_type: dict[str, list[str]] = {"object": list(objects)}
        for name, kind in objects.items():
            if kind != "object":
                self._by_type.setdefault(kind, []).append(name)

    def ground(self, node: Expression, binding: Mapping[str, str] | None = None) -> Formula:
        """The formula of `node` under `binding` (variable to object id)."""
        binding = binding or {}
        head = node[0]
        if head == "and":
            return _join("and", (self.ground(part, binding) for part in node[1:]))
        if head == "or":
            return _join("or", (self.ground(part, binding) for part in node[1:]))
        if head == "not":
            return _negate(self.ground(node[1], binding))
        if head == "imply":
            return _join("or", iter((_negate(self.ground(node[1], binding)), self.ground(node[2], binding))))
        if head == "exists":
            return _join("or", (self.ground(node[2], bound) for bound in self._bindings(node[1], node[2], binding)))
        if head == "forall":
            choices = self._bindings(node[1], ("and",), binding)
            return _join("and", (self.ground(node[2], bound) for bound in choices))
        fact = (head, *(binding.get(term, term) for term in node[1:]))
        if head == "=":
            return fact[1] == fact[2]
        if head in self._fluents:
            return ("atom", fact)
        return fact in self._facts

    def _bindings(self, variables: Any, body: Expression, binding: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Every way to bind `variables` that the static facts required by `body` allow, fewest choices first."""
        if not variables:
            yield dict(binding)
            return
        required = _static_conjuncts(body, self._fluents)
        choices = [(self._candidates(name, kind, required, binding), name) for name, kind in variables]
        found, name = min(choices, key=lambda choice: len(choice[0]))
        rest = tuple(variable for variable in variables if variable[0] != name)
        for candidate in found:
            yield from self._bindings(rest, body, {**binding, name: candidate})

    def _candidates(self, name: str, kind: str, required: list[Expression], binding: Mapping[str, str]) -> list[str]:
        found = self._by_type.get(kind, [])
        for atom in required:
            terms = [binding.get(term, term) for term in atom[1:]]
            if name not in terms or any(term.startswith("?") and term != name for term in terms):
                continue
            found = [one for one in found if (atom[0], *(one if t == name else t for t in terms)) in self._facts]
        return found


def atoms(formula: Formula) -> Iterator[Fact]:
    """The ground atoms that `formula` still depends on, with repetitions."""
    if isinstance(formula, bool):
        return
    if formula[0] == "atom":
        yield formula[1]
    elif formula[0] == "not":
        yield from atoms(formula[1])
    else:
        for part in formula[1]:
            yield from atoms(part)


def compile_formula(formula: Formula, compile_atom: Callable[[Fact], Callable[[Any], bool]]) -> Callable[[Any], bool]:
    """A function of the state that evaluates `formula`; `compile_atom` gives the same for one atom."""
    if isinstance(formula, bool):
        return lambda state: formula
    kind, content = formula
    if kind == "atom":
        return compile_atom(content)
    if kind == "not":
        inner = compile_formula(content, compile_atom)
        return lambda state: not inner(state)
    checks = [compile_formula(part, compile_atom) for part in content]
    stop = kind == "or"

    def check(state: Any) -> bool:
        for one in checks:
            if one(state) is stop:
                return stop
        return not stop

    return check


def _static_conjuncts(body: Expression, fluents: frozenset[str]) -> list[Expression]:
    if body[0] == "and":
        return [atom for part in body[1:] for atom in _static_conjuncts(part, fluents)]
    if body[0] in ("or", "not", "imply", "exists", "forall", "=") or body[0] in fluents:
        return []
    return [body]


def _negate(formula: Formula) -> Formula:
    return not formula if isinstance(formula, bool) else ("not", formula)


def _join(kind: str, parts: Iterator[Formula]) -> Formula:
    """The conjunction or disjunction of `parts` without constants; parts are not evaluated after a deciding one."""
    decisive = kind == "or"
    kept: dict[Formula, None] = {}
    for part in parts:
        if part is decisive:
            return decisive
        if not isinstance(part, bool):
            kept[part] = None
    if not kept:
        return not decisive
    return next(iter(kept)) if len(kept) == 1 else (kind, tuple(kept))
