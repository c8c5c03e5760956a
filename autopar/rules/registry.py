"""The operation table: looking a rule up and registering one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.errors import RuleError
from autopar.rules.spec import Call, Factors, Spec

__all__ = ["Rule", "find", "register", "rule_of", "table", "unknown"]

RuleFn = Callable[[Call], Spec]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: how to make the spec of a call, and the expansion for factors marked expand."""

    name: str
    make: RuleFn
    expansion: Callable[..., Any] | None = None


table: dict[str, Rule] = {}


def register(
    name: str,
    rule: str | RuleFn,
    *,
    expansion: Callable[..., Any] | None = None,
    linear: tuple[tuple[int, ...], ...] = (),
    lookup: Mapping[str, int] | None = None,
    heavy: bool = False,
) -> None:
    """Add a row to the operation table.

    Args:
        name: operator with overload, such as ``"aten.linear.default"`` or ``"mylib.op.default"``.
        rule: a factor string such as ``"b.. k, o k -> b.. o"``, or a function of a `Call`.
            In the string each operand's dims are factors; ``b..`` stands for any number of leading
            dims, ``x?`` after an operand for one that may be absent, ``!k`` for a factor that must
            stay whole and ``^k`` for one that may be cut through `expansion`. A factor that only
            operands have is contracted: the result is a partial sum.
        expansion: the same function in simpler operations, for factors marked ``^``.
        linear: sets of operands through which a partial sum passes.
        lookup: factor -> operand with the integer indices into it.
        heavy: the call is a product worth splitting.

    Raises:
        RuleError: the string does not parse.
    """
    if isinstance(rule, str):
        make = _parsed(name, rule, tuple(map(frozenset, linear)), dict(lookup or {}), heavy)
    else:
        make = rule
    table[name] = Rule(name, make, expansion)


def name_of(target: Any) -> str:
    """The key of an operator in the table."""
    return str(target).replace("torch.ops.", "")


def find(target: Any) -> Rule | None:
    """The row of an operator, or None."""
    return table.get(name_of(target))


def rule_of(node: fx.Node) -> Spec:
    """The spec of the call at `node`; an operation without a row is computed replicated."""
    rule = find(node.target)
    if rule is None:
        return unknown(Call.of(node))
    try:
        spec = rule.make(Call.of(node))
    except RuleError:
        raise
    except Exception as error:
        from autopar.program import call_text

        raise RuleError(
            f"The rule of {name_of(node.target)} failed: {type(error).__name__}: {error}",
            where=call_text(node),
            hint="register a corrected row with autopar.rules.register",
        ) from error
    return spec


def unknown(call: Call) -> Spec:
    """The spec that keeps every dim whole."""
    f = Factors()
    inputs = tuple(f.like(s, f"i{k}_") for k, s in enumerate(call.shapes))
    outputs = tuple(f.like(s, f"o{k}_") for k, s in enumerate(call.results))
    return Spec(f.sizes, inputs, outputs, whole=frozenset(f.sizes))


@dataclass(slots=True)
class _Side:
    """One operand or result of a factor string."""

    dims: list[str] = field(default_factory=list)
    optional: bool = False


def _parsed(
    name: str,
    text: str,
    linear: tuple[frozenset[int], ...],
    lookup: dict[str, int],
    heavy: bool,
) -> RuleFn:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"The rule of {name} has no '->'.", where=text)
    whole: set[str] = set()
    expand: set[str] = set()

    def side(part: str) -> _Side:
        part = part.strip()
        result = _Side(optional=part.endswith("?"))
        for word in part.removesuffix("?").split():
            clean = word.lstrip("!^")
            if word.startswith("!"):
                whole.add(clean)
            if word.startswith("^"):
                expand.add(clean)
            result.dims.append(clean)
        return result

    operands = [side(p) for p in left.split(",")]
    results = [side(p) for p in right.split(",")]

    def make(call: Call) -> Spec:
        sizes: dict[str, int] = {}
        ellipses: dict[str, int] = {}

        def bind(s: _Side, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
            words = list(s.dims)
            for i, w in enumerate(words):
                if w.endswith(".."):
                    n = len(shape) - len(words) + 1
                    base = w[:-2]
                    ellipses[base] = n
                    words[i : i + 1] = [f"{base}{j}_" for j in range(n)]
                    break
            if len(words) != len(shape):
                raise RuleError(
                    f"The rule of {name} does not fit a tensor of shape {list(shape)}.",
                    expected=" ".join(s.dims),
                )
            dims: list[tuple[str, ...]] = []
            for w, n in zip(words, shape, strict=True):
                if n == 1:
                    dims.append(())
                    continue
                if sizes.setdefault(w, int(n)) != n:
                    raise RuleError(
                        f"Factor '{w}' of the rule of {name} is {sizes[w]} and {n}.", where=text
                    )
                dims.append((w,))
            return tuple(dims)

        given = list(call.shapes)
        present = list(operands)
        for s in reversed(operands):  # optional operands are absent from the right
            if len(present) > len(given) and s.optional:
                present.remove(s)
        inputs = tuple(bind(s, shape) for s, shape in zip(present, given, strict=True))
        outputs = tuple(bind(s, shape) for s, shape in zip(results, call.results, strict=True))

        def named(marks: set[str]) -> frozenset[str]:
            full: set[str] = set()
            for m in marks:
                base = m[:-2] if m.endswith("..") else None
                if base is None:
                    full.add(m)
                else:
                    full.update(f"{base}{j}_" for j in range(ellipses.get(base, 0)))
            return frozenset(full & set(sizes))

        return Spec(
            sizes,
            inputs,
            outputs,
            named(whole),
            named(expand),
            {f: i for f, i in lookup.items() if f in sizes},
            linear,
            heavy=heavy,
        )

    return make
