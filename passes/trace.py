"""The graph of one call together with its vector-Jacobian product."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import collective_of, ops
from autopar.compat import FakeTensorMode, make_fx, schema_of, settings_of_tracing
from autopar.errors import AutoparError
from autopar.program import ancestors, shares_memory
from autopar.sizes import Sizes, at_place, has_sizes

__all__ = ["TRANSPARENT", "Request", "Trace", "Traces", "fake_like"]

aten = torch.ops.aten
TRANSPARENT = (aten.detach.default, aten.alias.default, ops.vary.default)
"""Calls that give back their operand."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The graph of one call: operands and cotangents -> results and gradients of the operands."""

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: tuple[Any, ...]
    gradients: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What a trace is made of.

    Args:
        args, kwargs: arguments with operands as `_Ref`.
        operands: fake operands.
        grads: which of them need a gradient.
        mask: results that have a cotangent.
        cotangents: fake cotangents.
        probe: the same call with primes in place of the pieces of uneven cuts, see `sizes`.
        lists: of a call with a probe, its lists of integers, each with its form there.
    """

    target: Any
    args: Any
    kwargs: Any
    operands: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    mask: tuple[int, ...]
    cotangents: tuple[Tensor, ...]
    probe: Request | None = None
    lists: tuple[Any, ...] = ()

    def key(self) -> Any:
        """Equal for requests with the same trace."""
        looks = tuple(map(_look, self.operands)), tuple(map(_look, self.cotangents))
        call = (self.target, _frozen(self.args), _frozen(self.kwargs), looks, self.grads, self.mask)
        return call if self.probe is None else (call, self.probe.key(), repr(self.lists))

    def alone(self) -> Request:
        """The call at the first place alone."""
        return self if self.probe is None else dataclasses.replace(self, probe=None, lists=())

    def backed(
        self, grads: tuple[bool, ...], mask: tuple[int, ...], seeds: Sequence[tuple[Any, Any]]
    ) -> Request:
        """The same call with gradients of the results in `mask`.

        Args:
            seeds: cotangents, each with its form in the trace with primes.
        """
        probe = self.probe
        if probe is not None:
            later = tuple(s for _, s in seeds)
            probe = dataclasses.replace(probe, grads=grads, mask=mask, cotangents=later)
        given = tuple(s for s, _ in seeds)
        return dataclasses.replace(self, grads=grads, mask=mask, cotangents=given, probe=probe)

    def results(self, operands: list[Tensor]) -> list[Any]:
        """Run the call."""
        out = self.target(*_filled(self.args, operands), **_filled(self.kwargs, operands))
        return [out] if isinstance(out, Tensor) else list(out)

    def joint(
        self, operands: list[Tensor], cotangents: list[Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Results, and gradients of the operands that need one."""
        values = [
            v.detach().requires_grad_(True) if g else v
            for v, g in zip(operands, self.grads, strict=True)
        ]
        out = self.results(values)
        wanted = [v for v, g in zip(values, self.grads, strict=True) if g]
        pairs = zip((out[i] for i in self.mask), cotangents, strict=True)
        live = [(root, seed) for root, seed in pairs if root.requires_grad]  # zeros_like has none
        if not live:
            return out, [None] * len(wanted)
        roots, seeds = zip(*live, strict=True)
        return out, list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))


@dataclass(slots=True)
class _Known:
    """Traces and fake results of calls that have the same sizes everywhere, by what decides them.

    They are functions of their request and of the settings alone, so that all compilations of a
    thread share them: the next shape, mesh or model asks mostly for what one before has asked for.
    """

    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode())
    table: dict[Any, Trace] = field(default_factory=dict)
    fakes: dict[Any, list[Any]] = field(default_factory=dict)


class _Shared(threading.local):
    """What is known, apart for each thread: two cannot be within one fake mode at once."""

    def __init__(self) -> None:
        self.known: dict[Any, _Known] = {}

    def here(self) -> _Known:
        """What is known under the settings of torch now; begun anew where it has grown large."""
        settings = settings_of_tracing()
        found = self.known.get(settings)
        if found is None or len(found.table) + len(found.fakes) > _MANY:
            found = self.known[settings] = _Known()
        return found


_MANY = 20_000
"""Traces and results kept, some 50 MB: those of a few hundred programs."""

_shared = _Shared()


@dataclass(slots=True)
class Traces:
    """Traces and fake results of the calls of a compilation.

    Args:
        sizes: those that differ between places, if there are any.
        known: what earlier compilations have traced, too.
        joined: traces of calls with such sizes.
    """

    sizes: Sizes | None = None
    known: _Known = field(default_factory=lambda: _shared.here())
    joined: dict[Any, Trace] = field(default_factory=dict)

    @property
    def mode(self) -> FakeTensorMode:
        """The mode of all fake values."""
        return self.known.mode

    def request(
        self, node: fx.Node, operands: list[Tensor], probes: list[Tensor] | None = None
    ) -> Request:
        """The call at `node` on fake operands, nothing differentiated.

        Args:
            probes: the operands with primes in place of pieces.
        """
        index = {n: i for i, n in enumerate(node.all_input_nodes)}
        refer: Any = lambda n: _Ref(index[n])  # noqa: E731
        args, kwargs = fx.map_arg((node.args, node.kwargs), refer)
        none = (False,) * len(operands)
        differ = has_sizes((args, kwargs)) or any(
            a.shape != b.shape for a, b in zip(operands, probes or operands, strict=True)
        )
        if self.sizes is None or probes is None or not differ:
            return Request(node.target, args, kwargs, tuple(operands), none, (), ())
        pieces = collective_of(node) is not None
        later = self.sizes.probed(args, pieces), self.sizes.probed(kwargs, pieces)
        probe = Request(node.target, later[0], later[1], tuple(probes), none, (), ())
        plain = (v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple)))
        lists = tuple((v, self.sizes.probed(v, pieces)) for v in plain)
        first = at_place(args, 0), at_place(kwargs, 0)
        given = tuple(operands)
        return Request(node.target, first[0], first[1], given, none, (), (), probe, lists)

    def results(self, request: Request) -> list[Any]:
        """Fake results of a call."""
        request = request.alone()
        key, fakes = request.key(), self.known.fakes
        if key not in fakes:
            with self.mode, torch.no_grad():
                fakes[key] = request.results(list(request.operands))
        return fakes[key]

    def prepare(self, requests: Iterable[Request]) -> None:
        """Trace what is not yet traced, all in one go: starting a trace costs as much as a call."""
        requests = list(requests)
        probed = [r for r in requests if r.probe is not None]
        self._prepare([*(r.alone() for r in requests), *(r.probe for r in probed if r.probe)])
        for r in probed:
            if r.key() not in self.joined:
                self.joined[r.key()] = self._joined(r)

    def _joined(self, request: Request) -> Trace:
        """The trace of a call at all places, from those of the first and with primes."""
        assert request.probe is not None and self.sizes is not None, "only for probed calls"
        table = self.known.table
        first, later = table[request.alone().key()], table[request.probe.key()]
        try:
            return _Join(self.sizes, request.lists).run(first, later)
        except AutoparError as error:
            raise AutoparError(
                f"{request.target} cannot be written for all ranks at once.\n{error}",
                hint="make the uneven sizes divide the mesh, or report this",
            ) from None

    def _prepare(self, requests: Iterable[Request]) -> None:
        table = self.known.table
        new = {key: r for r in requests if (key := r.key()) not in table}
        if not new:
            return

        def run(values: list[list[Tensor]]) -> list[Any]:
            return [
                r.joint(v[: len(r.operands)], v[len(r.operands) :])
                for r, v in zip(new.values(), values, strict=True)
            ]

        with self.mode:
            values = [[fake_like(v) for v in (*r.operands, *r.cotangents)] for r in new.values()]
            traced = make_fx(run)(values)
            graph = traced.graph
            _without_writes(graph)
            if any(map(_writes, graph.nodes)):  # into views: this knows which
                traced.recompile()
                with torch.no_grad():
                    graph = make_fx(torch.func.functionalize(traced))(values).graph
        _clean(graph)
        placeholders = iter([n for n in graph.nodes if n.op == "placeholder"])
        out = iter(graph.output_node().args[0])  # type: ignore[arg-type]
        order = {n: i for i, n in enumerate(graph.nodes)}
        for key, r in new.items():
            inputs = [next(placeholders) for _ in r.operands]
            tangents = [next(placeholders) for _ in r.cotangents]
            results = [next(out) for _ in range(self.count(r))]
            gradients = [next(out) for g in r.grads if g]
            trace = _parted(inputs, tangents, results, gradients, order)
            _check_writes(r, trace)
            table[key] = trace

    def count(self, request: Request) -> int:
        """Number of results of a call."""
        none = (False,) * len(request.grads)
        bare = dataclasses.replace(request.alone(), grads=none, mask=(), cotangents=())
        return len(self.results(bare))

    def of(self, request: Request) -> Trace:
        """The trace of a request."""
        self.prepare([request])
        return (self.known.table if request.probe is None else self.joined)[request.key()]


class _Join:
    """Joins two traces of a call, of other shapes, into one with sizes.

    Args:
        lists: lists of integers among the arguments of the call, which come back as they are,
            each with its form in the later trace.
    """

    def __init__(self, sizes: Sizes, lists: Sequence[Any]) -> None:
        self.sizes = sizes
        self.lists = {(_plain(at_place(v, 0)), _plain(later)): v for v, later in lists}
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.twins: dict[fx.Node, fx.Node] = {}

    def run(self, first: Trace, later: Trace) -> Trace:
        """The joined trace."""
        pairs = [
            (first.inputs, later.inputs),
            (first.tangents, later.tangents),
            (first.forward, later.forward),
            (first.backward, later.backward),
        ]
        if any(len(a) != len(b) for a, b in pairs):
            raise self.differ()
        made = [[self.node(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        results, gradients = (
            tuple(self.value(a, b) for a, b in zip(x, y, strict=True))
            for x, y in ((first.results, later.results), (first.gradients, later.gradients))
        )
        inputs, tangents, forward, backward = map(tuple, made)
        return Trace(inputs, tangents, forward, backward, results, gradients)

    def node(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """The joined call."""
        if a.op != b.op or a.target is not b.target and a.op != "placeholder":
            raise self.differ()
        if a.op == "placeholder":
            new = self.graph.placeholder(a.name)
        else:
            args = self.value(list(a.args), list(b.args))
            if a.kwargs.keys() != b.kwargs.keys():
                raise self.differ()
            kwargs = {k: self.value(v, b.kwargs[k]) for k, v in a.kwargs.items()}
            new = self.graph.create_node("call_function", a.target, tuple(args), kwargs, a.name)
        new.meta = {"val": a.meta.get("val"), "probe": b.meta.get("val")}
        self.nodes[a] = new
        self.twins[a] = b
        return new

    def value(self, a: Any, b: Any) -> Any:
        """The joined argument."""
        if isinstance(a, fx.Node):
            if self.twins[a] is not b:
                raise self.differ()
            return self.nodes[a]
        if isinstance(a, (list, tuple)):
            known = self.lists.get((_plain(a), _plain(b)))
            if known is not None and not isinstance(a, tuple):
                return known
            if not isinstance(b, (list, tuple)) or len(a) != len(b):
                raise self.differ()
            return type(a)(self.value(x, y) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int:
            return self.sizes.between(a, b)
        if a != b and not (a != a and b != b):
            raise AutoparError(
                f"An argument is {a!r} on the first rank and {b!r} for other pieces."
            )
        return a

    @staticmethod
    def differ() -> AutoparError:
        """Other calls for other sizes."""
        return AutoparError("It is made of other operations where its pieces are larger.")


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _without_writes(graph: fx.Graph) -> None:
    """Turn writes into new values: composite operations fill what they have just made in place.

    Only where the written tensor is fresh and nothing views it; `_check_writes` refuses the others.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not shares_memory(node):
            continue
        name = node.target.overloadpacket.__name__
        functional = getattr(getattr(aten, name[:-1], None), str(node.target).split(".")[-1], None)
        written = node.args[0] if node.args else None
        if not name.endswith("_") or functional is None or not isinstance(written, fx.Node):
            continue
        fresh = written.op == "call_function" and not shares_memory(written)
        others = [u for u in written.users if u is not node]
        if not fresh or any(shares_memory(u) for u in others):
            continue
        node.target = functional
        order = {n: i for i, n in enumerate(graph.nodes)}
        for user in others:
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable)


def _check_writes(request: Request, trace: Trace) -> None:
    """Refuse a call that is made of operations which write in place: tracing loses gradients."""
    for node in (*trace.forward, *trace.backward):
        if _writes(node):
            raise AutoparError(
                f"The gradient of {request.target} cannot be traced: it writes in place by "
                f"{node.target}.",
                expected="an operation made of functional ones",
                hint="write it in simpler operations in the model, and report it",
            )


def _parted(
    inputs: list[fx.Node], tangents: list[fx.Node], results: list[Any], gradients: list[Any],
    order: dict[fx.Node, int],
) -> Trace:  # fmt: skip
    """Part a joint trace: forward is what the results need, backward the rest."""
    forward = ancestors(r for r in results if isinstance(r, fx.Node))
    every = forward | ancestors(g for g in gradients if isinstance(g, fx.Node))
    forward |= {n for n in every if n.target is operator.getitem and n.args[0] in forward}
    calls = sorted((n for n in every if n.op == "call_function"), key=lambda n: order[n])
    return Trace(
        tuple(inputs),
        tuple(tangents),
        tuple(n for n in calls if n in forward),
        tuple(n for n in calls if n not in forward),
        tuple(results),
        tuple(gradients),
    )


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands for an operand in frozen arguments."""

    index: int


def _filled(value: Any, values: list[Tensor]) -> Any:
    if isinstance(value, _Ref):
        return values[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(v, values) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, values) for k, v in value.items()}
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value).__name__, value)


def _look(val: Tensor) -> Any:
    return (tuple(val.shape), val.stride(), val.dtype, val.device)


def fake_like(val: Tensor) -> Tensor:
    """A fresh tensor of the looks of `val`, fake inside a fake mode."""
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _clean(graph: fx.Graph) -> None:
    """Drop what does nothing at run time; views may copy, as strides may differ from the traced."""
    for node in list(graph.nodes):
        if node.target in TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
            source: Any = node.args[0]
            if source.target is aten.clone.default:  # it copies itself where strides ask for it
                node.update_arg(0, source.args[0])
        elif node.target is aten.native_layer_norm_backward.default and node.args[6] is not None:
            # it asks only whether there is a bias, which need not be kept for that
            node.update_arg(6, node.args[5])
        elif node.target is aten.convolution_backward.default and not node.args[10][0]:
            shape = list(node.args[2].meta["val"].shape)  # nothing but the shape is read of it
            with graph.inserting_before(node):
                shaped = graph.call_function(aten.new_empty.default, (node.args[0], shape))
            shaped.meta["val"] = node.args[2].meta["val"]
            node.update_arg(2, shaped)
    graph.eliminate_dead_code()
