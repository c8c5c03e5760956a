"""nn.Module -> global Program: one functional FX graph with whole shapes, one row per storage."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.arguments import Arguments, Slot
from autopar.compat import FakeTensorMode, InputKind, OutputKind, pytree, schema_of
from autopar.errors import CaptureError, InputError
from autopar.layout import Mesh
from autopar.program import (
    Input,
    NodeInfo,
    Output,
    Program,
    State,
    copied,
    graph_module,
    set_info,
)
from autopar.promotion import Promotion

__all__ = ["capture", "empty_like", "skeleton"]

_TORCH_DIR = os.path.dirname(torch.__file__)
_OWN_DIR = os.path.dirname(os.path.abspath(__file__))


@dataclass(slots=True)
class _Result:
    """Structure of what the module returned; export restores a module's own attributes."""

    leaves: list[Any] = field(default_factory=list)
    spec: pytree.TreeSpec | None = None
    opaque: list[str] = field(default_factory=list)


def skeleton(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of `model` whose parameters and buffers have shapes but no data.

    Ties are kept. Parameters on the meta device become ones on the CPU.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            fake = empty_like(tensor, mode)
            if isinstance(tensor, nn.Parameter):
                with mode:
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise CaptureError(
            f"The model cannot be copied: {str(error).splitlines()[0]}",
            expected="tensors in attributes that are parameters, buffers or have no history",
            hint="use torch.nn.utils.parametrizations.weight_norm in place of the old weight_norm",
        ) from error


def empty_like(tensor: Tensor, mode: FakeTensorMode, shape: Any = None) -> Tensor:
    """A fake tensor like `tensor`, or of another shape."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        return torch.empty(
            tuple(tensor.shape) if shape is None else shape, dtype=tensor.dtype, device=device
        )


class _Traced(nn.Module):
    """Calls the user's module on flat tensors and keeps the structure of what it returns."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        loss: Callable[..., Any] | None,
        promotes: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self._arguments = arguments
        self._loss = loss
        self._promotes = promotes
        self.result = _Result()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._arguments.rebuild(tensors)
        with Promotion() if self._promotes else contextlib.nullcontext():
            if self._loss is None:
                result = self.model(*args, **kwargs)
            else:
                targets = kwargs.pop("targets")
                result = self._loss(self.model(*args, **kwargs), targets)
        leaves, spec = pytree.tree_flatten(result)
        slots: list[Any] = []
        kept: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                slots.append(Slot(len(kept)))
                kept.append(leaf)
            elif isinstance(leaf, (int, float, bool, str, type(None))):
                slots.append(leaf)
            else:  # a cache object, say: not part of the training step
                self.result.opaque.append(type(leaf).__name__)
                slots.append(None)
        self.result.leaves, self.result.spec = slots, spec
        return tuple(kept)


def capture(
    model: nn.Module,
    arguments: Arguments,
    mesh: Mesh,
    *,
    loss: Callable[..., Any] | None = None,
    known: Callable[[Any], bool] = lambda target: False,
    promotes: bool = False,
) -> Program:
    """Trace `model` called with `arguments` to a functional graph of aten operations.

    `known` tells the operations that later passes understand as they come out of export, `promotes`
    whether calls may mix dtypes (see `Promotion`). The training flag of each module decides between
    training and evaluation behaviour.

    Raises:
        CaptureError: the model cannot be traced, with the user's line.
    """
    if loss is not None and "targets" not in arguments.rebuild(arguments.tensors)[1]:
        raise InputError(
            "The module was made with loss=, but the call has no targets.",
            expected="model(inputs, targets=...): the loss is computed as loss(outputs, targets)",
        )
    traced = _Traced(model, arguments, loss, promotes)
    traced.training = model.training  # not of what is inside: a frozen norm has its own flag
    try:
        with warnings.catch_warnings(), _own_backwards_refused():
            warnings.simplefilter("ignore")
            exported = torch.export.export(traced, arguments.tensors, strict=False)
            if not _functional(exported.graph_module, known):
                _inline_submodules(exported.graph_module)  # it would forget no_grad regions
                exported = exported.run_decompositions({})
    except Exception as error:
        raise _capture_error(error) from error
    return _program(exported, traced, arguments, mesh, model.training)


def _functional(gm: fx.GraphModule, known: Callable[[Any], bool]) -> bool:
    """Whether every call is a known operation that writes nowhere.

    Functionalising traces the model once more, so it is left out where it would change nothing.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            name = str(node.target)
            if "wrap_with_set_grad_enabled" in name or "_assert" in name:
                continue
            if name == "aten.detach_.default" and "lift_fresh" in str(node.args[0].target):
                node.target = torch.ops.aten.detach.default  # a constant made in forward
            schema = schema_of(node.target)
            if schema is None or schema.is_mutable or not known(node.target):
                return False
    return True


@contextlib.contextmanager
def _own_backwards_refused() -> Iterator[None]:
    """Tracing keeps what a `torch.autograd.Function` computes, and would derive that instead."""
    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":  # these are true derivatives
            return apply.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"{cls.__module__}.{cls.__qualname__} is an autograd.Function: its own backward would "
            "be lost, and the derivative of its forward used instead.",
            expected="operations that PyTorch differentiates, or an operator with its own gradient",
            hint="for a straight-through estimate write x + (f(x) - x).detach(); else make it a "
            "torch.library.custom_op with register_autograd, which keeps its gradient",
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _capture_error(error: Exception) -> CaptureError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH_DIR, _OWN_DIR, "<"))]
    where = ""
    if own:
        f = own[-1]
        where = f"{f.filename}:{f.lineno} in {f.name}: {f.line}"
    if isinstance(error, CaptureError):
        message, expected, hint = error.what, error.expected, error.hint
        return CaptureError(message, where=error.where or where, expected=expected, hint=hint)
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    dependent = any(
        w in str(error) or w in type(error).__name__
        for w in ("data-dependent", "DataDependent", "Could not guard", "nonzero", "u0")
    )
    if dependent:
        return CaptureError(
            "The model takes a decision from tensor values, so it has no single graph.",
            where=where,
            expected="control flow that depends on shapes and Python values only",
            hint=f"write the choice with torch.where or a mask, or move it out of forward ({text})",
        )
    return CaptureError(
        f"The model could not be traced: {text}",
        where=where,
        hint="check that the model runs on these inputs by itself, on the same device",
    )


def _check_sizes(graph: fx.Graph) -> None:
    """Every size must be a number; one that depends on values shows up as a symbol."""
    for node in graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            sizes = val.shape if isinstance(val, Tensor) else (val,)
            if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in sizes):
                raise CaptureError(
                    "The size of a tensor depends on the values of another, so the model has no "
                    "single graph.",
                    where=f"{node.target} at {_source(node)}",
                    expected="sizes that depend on shapes and Python values only",
                    hint="keep all elements and mark the ones that count with torch.where or a "
                    "mask, in place of nonzero, masked_select or x[mask]",
                )


def _program(
    exported: Any, traced: _Traced, arguments: Arguments, mesh: Mesh, training: bool
) -> Program:
    graph: fx.Graph = exported.graph
    _inline_submodules(exported.graph_module)
    _check_sizes(graph)
    for node in list(graph.nodes):
        if "_assert" in str(node.target):  # holds by construction once shapes are fixed
            graph.erase_node(node)
    named = dict(traced.model.named_parameters(remove_duplicate=False))
    named_buffers = dict(traced.model.named_buffers(remove_duplicate=False))
    every: dict[str, Any] = {**named, **named_buffers}
    by_id: dict[int, list[str]] = {}
    for name, value in every.items():
        by_id.setdefault(id(value), []).append(name)

    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    states: list[State] = []
    inputs: list[Input] = []
    constants: dict[str, Tensor] = {}
    first: dict[int, fx.Node] = {}
    fqn_of: dict[str, str] = {}
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        val = node.meta["val"]
        if spec.kind == InputKind.USER_INPUT:
            name = arguments.names[len(inputs)]
            inputs.append(Input(name, node.name, tuple(val.shape), val.dtype))
            continue
        target = str(spec.target)
        fqn = target.removeprefix("model.")
        tensor = every.get(fqn)
        if tensor is None:
            tensor = exported.constants[target]
            fqn = f"constant.{target}"
            constants[fqn] = tensor
            by_id[id(tensor)] = [fqn]
        if id(tensor) in first:
            node.replace_all_uses_with(first[id(tensor)])
            graph.erase_node(node)
            continue
        first[id(tensor)] = node
        names = by_id[id(tensor)]
        fqn_of[target] = names[0]
        states.append(
            State(
                names[0],
                node.name,
                tuple(val.shape),
                val.dtype,
                isinstance(tensor, nn.Parameter),
                bool(tensor.requires_grad),
                tuple(names[1:]),
            )
        )
    for names in by_id.values():
        for alias in names:
            fqn_of.setdefault(f"model.{alias}", names[0])

    out_node = graph.output_node()
    results: list[fx.Node] = []
    mutated: list[tuple[str, int]] = []
    late: list[tuple[str, fx.Node]] = []
    for value, spec in zip(out_node.args[0], exported.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append(value)
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            late.append((fqn_of[str(spec.target)], value))
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            named_input = next((i.name for i in inputs if i.node == spec.target), spec.target)
            raise CaptureError(
                "The model writes into one of its arguments.",
                where=f"argument {named_input}; last written by {_source(value) or 'the model'}",
                expected="arguments that the model only reads",
                hint="clone the argument in forward before changing it in place",
            )
    for name, value in late:
        mutated.append((name, len(results)))
        results.append(value)
    out_node.args = (tuple(results),)

    outputs: list[Output] = []
    loss_seen = False
    for leaf in traced.result.leaves:
        if not isinstance(leaf, Slot):
            outputs.append(Output(-1, constant=leaf))
            continue
        val = results[leaf.index].meta["val"]
        is_loss = not loss_seen and val.dim() == 0 and val.dtype.is_floating_point
        loss_seen = loss_seen or is_loss
        outputs.append(Output(leaf.index, is_loss=is_loss))

    for node in graph.nodes:
        set_info(node, NodeInfo(source=_source(node), module=_module(node)))
        _refuse_hidden_writes(node)
    assert traced.result.spec is not None, "forward has run"
    sizes = [i.shape[0] for i in inputs if i.shape]
    batch = max(set(sizes), key=lambda n: (sizes.count(n), -sizes.index(n))) if sizes else 0
    gm = graph_module(_clean_copy(graph))
    return Program(
        gm,
        mesh,
        "global",
        tuple(states),
        tuple(inputs),
        tuple(outputs),
        traced.result.spec,
        tuple(mutated),
        training,
        batch,
        constants,
    )


def _refuse_hidden_writes(node: fx.Node) -> None:
    """Export forgets that instance norm updates its running statistics in training.

    And an embedding with max_norm shortens rows of its weight in place, outside the gradient.
    """
    if "embedding_renorm" in str(node.target):
        raise CaptureError(
            "An embedding with max_norm changes its weight in every call, which tracing loses.",
            where=" · ".join(w for w in (_module(node), _source(node)) if w),
            expected="max_norm=None",
            hint="shorten the rows after each optimizer step, under torch.no_grad()",
        )
    if node.target is not torch.ops.aten.instance_norm.default:
        return
    _, _, _, running_mean, _, use_input_stats = node.args[:6]
    if running_mean is not None and use_input_stats:
        raise CaptureError(
            "Instance norm with tracked statistics is updated in training, which tracing loses.",
            where=" · ".join(w for w in (_module(node), _source(node)) if w),
            expected="track_running_stats=False, or the module in eval mode",
            hint="keep the statistics in a buffer that forward assigns, or use BatchNorm",
        )


def _clean_copy(graph: fx.Graph) -> fx.Graph:
    """The graph with only what the compiler uses in `meta`."""
    new, mapping = copied(graph)
    for node in (*mapping.values(), new.output_node()):
        node.meta = {k: node.meta[k] for k in ("val", "autopar") if k in node.meta}
    return new


def _inline_submodules(gm: fx.GraphModule) -> None:
    """Put the body of a grad-mode or autocast region in place of its call.

    Operands of a region without gradients are detached: what it writes into them is, too.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or "wrap_with" not in str(node.target):
            continue
        body_at = next(i for i, a in enumerate(node.args) if _is_module(gm, a))
        body = getattr(gm, node.args[body_at].target)
        _inline_submodules(body)
        operands = node.args[body_at + 1 :]
        no_grad = "set_grad_enabled" in str(node.target) and node.args[0] is False
        inner_inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        mapping = dict(zip(inner_inputs, operands, strict=True))
        with gm.graph.inserting_before(node):
            for inner in inner_inputs if no_grad else ():
                mapping[inner] = gm.graph.call_function(
                    torch.ops.aten.detach.default, (mapping[inner],)
                )
                mapping[inner].meta = dict(inner.meta)
            for inner in body.graph.nodes:
                if inner.op in ("placeholder", "output"):
                    continue
                mapping[inner] = gm.graph.node_copy(inner, mapping.__getitem__)
                mapping[inner].meta = dict(inner.meta)
            outs = body.graph.output_node().args[0]
            values = [mapping[o] for o in (outs if isinstance(outs, (list, tuple)) else [outs])]
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(values[user.args[1]])
                gm.graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(values[0])
        gm.graph.erase_node(node)


def _is_module(gm: fx.GraphModule, value: Any) -> bool:
    return (
        isinstance(value, fx.Node)
        and value.op == "get_attr"
        and isinstance(getattr(gm, str(value.target), None), fx.GraphModule)
    )


def _source(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [f for f in found if not f[0].startswith((_TORCH_DIR, _OWN_DIR))]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    return str(names[-1]).removeprefix("model").removeprefix(".") if names else ""
