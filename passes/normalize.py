"""Rewrite a captured graph to the few forms that the rules and strategies speak of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.passes.splice import Splicer
from autopar.program import Program, update_info
from autopar.rules import Call, find

__all__ = ["Normalize", "is_normalized", "mark_gradients"]

aten = torch.ops.aten
RANDOM = (torch.ops.autopar.uniform.default, torch.ops.autopar.keep_mask.default)
_MEAN, _SUM = 1, 2


@dataclass(frozen=True, slots=True)
class Normalize:
    """Means become sums over a global count, dropout an explicit mask, biases a separate add.

    Before:
        y = aten.linear(x, w, b)
        loss = aten.cross_entropy_loss(y, t)
    After:
        y0 = aten.linear(x, w); y = aten.add(y0, b)
        s = aten.cross_entropy_loss(y, t, None, 2); n = (t != -100).sum(); loss = s / n
    """

    name: str = "normalize"

    def run(self, program: Program) -> Program:
        """Rewrite a global program; the result is a global program."""
        program = program.copy()
        graph = program.graph.graph
        splicer = Splicer(graph)
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            handler = _HANDLERS.get(str(node.target))
            if handler is not None:
                handler(splicer, node)
        splicer.flush()
        graph.eliminate_dead_code()
        _number_sites(graph)
        mark_gradients(program)
        return program


def _number_sites(graph: fx.Graph) -> None:
    """Give every random call its site number, in graph order."""
    site = 0
    for node in graph.nodes:
        if node.target in RANDOM:
            node.args = (*node.args[:2], site, *node.args[3:])
            update_info(node, site=site)
            site += 1


_WITHOUT_GRADIENT = (
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
)  # fmt: skip
"""Calls whose result does not depend on the values of their operands, or not differentiably."""


def mark_gradients(program: Program) -> None:
    """Set `meta['requires_grad']` on every node that carries a gradient."""
    wanted = {s.node for s in program.states if s.requires_grad}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.name in wanted
        elif node.op == "call_function":
            val = node.meta["val"]
            floats = any(
                isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
                for v in (val if isinstance(val, (list, tuple)) else [val])
            )
            cut = node.target in _WITHOUT_GRADIENT
            node.meta["requires_grad"] = (
                floats
                and not cut
                and any(n.meta.get("requires_grad", False) for n in node.all_input_nodes)
            )


# --- handlers: each looks at one node and may replace it ---------------------------------------


def _drop(splicer: Splicer, node: fx.Node) -> None:
    splicer.drop(node)


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _keep(like: Tensor, p: float, shape: list[int] | None = None) -> Tensor:
    size = list(like.shape) if shape is None else shape
    text = f"[{', '.join(map(str, size))}]"
    mask: Tensor = torch.ops.autopar.keep_mask(size, text, 0, p, device=like.device)
    return mask


def _drop_out(x: Tensor, p: float) -> Tensor:
    if p >= 1.0:
        return x * torch.zeros_like(x)
    return x * _keep(x, p) * (1.0 / (1.0 - p))


def _drop_channels(x: Tensor, p: float) -> Tensor:
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)]
    return x * _keep(x, p, shape) * (1.0 / (1.0 - p))


def _dropout(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    x, p = node.args[0], call["p"]
    train = call.arguments.get("train", True)
    if not train or p == 0.0:
        return _drop(splicer, node)
    fn = _drop_channels if "feature" in str(node.target) else _drop_out
    splicer.replace(node, fn, x, p)


def _native_dropout(splicer: Splicer, node: fx.Node) -> None:
    x, p, train = [*node.args, True][:3]
    assert isinstance(p, float), "the probability is a number"

    def both(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        keep = _keep(x, p)
        return x * keep * (1.0 / (1.0 - p)), keep

    def whole(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)

    splicer.replace(node, both if train and p > 0 else whole, x, p)


def _random(splicer: Splicer, node: fx.Node) -> None:
    """rand, rand_like, bernoulli, randn, randn_like by the counter-based generator."""
    kind = str(node.target).split(".")[1]
    val = node.meta["val"]
    shape, dtype, device = list(val.shape), val.dtype, val.device
    text = f"[{', '.join(map(str, shape))}]"

    def uniform() -> Tensor:
        drawn: Tensor = torch.ops.autopar.uniform(shape, text, 0, dtype=dtype, device=device)
        return drawn

    def draw(*operands: Any) -> Tensor:
        if kind == "bernoulli":
            p = operands[0] if len(operands) < 2 or operands[1] is None else operands[1]
            kept: Tensor = uniform() < p
            return kept.to(dtype)
        if kind.startswith("randn"):  # Box and Muller 1958
            radius = (-2.0 * torch.log1p(-uniform())).sqrt()
            return radius * torch.cos(2.0 * math.pi * uniform())
        return uniform()

    operands = [a for a in node.args if isinstance(a, fx.Node)]
    p = [a for a in node.args[1:] if isinstance(a, float)]
    splicer.replace(node, draw, *(operands or [_fake_source(node)]), *p)


def _fake_source(node: fx.Node) -> fx.Node:
    """Some tensor of the graph, so a function without operands can be traced on its fake mode."""
    source: fx.Node = next(n for n in node.graph.nodes if n.op == "placeholder")
    return source


def _attention(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    p = call["dropout_p"]
    if not p:
        return

    def math_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        gqa: bool,
    ) -> Tensor:
        if gqa:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        factor = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
        score = torch.matmul(q * factor, k.transpose(-2, -1))
        if causal:
            ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            score = torch.where(ones.tril(), score, float("-inf"))
        if mask is not None:
            if mask.dtype == torch.bool:
                score = torch.where(mask, score, float("-inf"))
            else:
                score = score + mask
        return torch.matmul(_drop_out(torch.softmax(score, -1), p), v)

    splicer.replace(
        node, math_attention, call["query"], call["key"], call["value"], call["attn_mask"],
        call["is_causal"], call["scale"], call["enable_gqa"],
    )  # fmt: skip


def _linear(splicer: Splicer, node: fx.Node) -> None:
    if len(node.args) > 2 and node.args[2] is not None:
        x, w, b = node.args[:3]
        splicer.replace(node, lambda x, w, b: F.linear(x, w) + b, x, w, b)


def _addmm(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    alpha, beta = call["alpha"], call["beta"]
    product = torch.mm if "addmm" in str(node.target) else torch.bmm

    def apart(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = product(x, w)
        y = y if alpha == 1 else y * alpha
        return y + (b if beta == 1 else b * beta)

    splicer.replace(node, apart, *node.args[:3])


def _convolution(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    bias = call.arguments.get("bias")
    if bias is None:
        return
    fn: Callable[..., Tensor] = node.target  # type: ignore[assignment]
    space = len(call.shape("weight") or ()) - 2
    rest = node.args[3:]

    def apart(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fn(x, w, None, *rest, **node.kwargs) + b.view(-1, *[1] * space)

    splicer.replace(node, apart, *node.args[:2], bias)


def _mean(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    x, dim, keep = node.args[0], call.arguments.get("dim"), call.arguments.get("keepdim", False)
    dtype = call.arguments.get("dtype")

    def mean(x: Tensor) -> Tensor:
        dims = list(range(x.dim())) if not dim and dim != 0 else dim
        total = torch.sum(x, dims, keepdim=keep, dtype=dtype)
        return total / (x.numel() / max(total.numel(), 1))

    splicer.replace(node, mean, x)


def _pool_to_one(splicer: Splicer, node: fx.Node) -> None:
    """Adaptive average pooling to a single cell is a mean over space, which may be cut."""
    size = node.args[1]
    assert isinstance(size, (list, tuple))
    if any(n != 1 for n in size):
        return

    def pooled(x: Tensor) -> Tensor:
        dims = list(range(x.dim() - len(size), x.dim()))
        total = x.sum(dims, keepdim=True)
        return total / (x.numel() / max(total.numel(), 1))

    splicer.replace(node, pooled, node.args[0])


def _cross_entropy(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    if call["reduction"] != _MEAN:
        return
    ignore, smoothing = call["ignore_index"], call["label_smoothing"]

    def loss(x: Tensor, t: Tensor, w: Tensor | None) -> Tensor:
        total: Tensor = aten.cross_entropy_loss.default(x, t, w, _SUM, ignore, smoothing)
        if t.is_floating_point():
            return total / (x.numel() / x.shape[1 if x.dim() > 1 else 0])
        return total / _count(t, w, ignore, total.dtype)

    splicer.replace(node, loss, node.args[0], node.args[1], call["weight"])


def _count(t: Tensor, w: Tensor | None, ignore: int, dtype: torch.dtype) -> Tensor:
    """Denominator of a mean over classes: rows that are not ignored, by their class weight."""
    valid = t != ignore
    if w is None:
        return valid.sum().to(dtype)
    safe = torch.where(valid, t, 0)
    weights = w.detach().index_select(0, safe.reshape(-1)).reshape(safe.shape)
    return torch.where(valid, weights, torch.zeros_like(weights)).sum()


def _nll(splicer: Splicer, node: fx.Node) -> None:
    call = Call.of(node)
    if call["reduction"] != _MEAN:
        return
    fn: Callable[..., Tensor] = node.target  # type: ignore[assignment]
    ignore = call["ignore_index"]

    def loss(x: Tensor, t: Tensor, w: Tensor | None) -> Tensor:
        return fn(x, t, w, _SUM, ignore) / _count(t, w, ignore, x.dtype)

    splicer.replace(node, loss, node.args[0], node.args[1], call["weight"])


def _mean_loss(splicer: Splicer, node: fx.Node) -> None:
    """A loss whose mean divides by the number of elements: mse, l1, huber, bce, kl and so on."""
    call = Call.of(node)
    if call["reduction"] != _MEAN:
        return
    values = dict(call.arguments)
    operands = {n: v for n, v in values.items() if isinstance(v, fx.Node)}
    fn: Callable[..., Tensor] = node.target  # type: ignore[assignment]
    schema = node.target._schema.arguments  # type: ignore[union-attr]

    def loss(*tensors: Tensor) -> Tensor:
        full = {**values, **dict(zip(operands, tensors, strict=True)), "reduction": 0}
        args = [full[a.name] for a in schema if not a.kwarg_only]
        kwargs = {a.name: full[a.name] for a in schema if a.kwarg_only}
        rows = fn(*args, **kwargs)
        return rows.sum() / max(rows.numel(), 1)

    splicer.replace(node, loss, *operands.values())


def _equal_split(splicer: Splicer, node: fx.Node) -> None:
    """split and chunk into equal pieces become an unflatten and selects, which keep factors."""
    val = node.meta["val"]
    call = Call.of(node)
    shape = call.shapes[0]
    at = (call.arguments.get("dim") or 0) % len(shape)
    sizes = [v.shape[at] for v in val]
    n = len(sizes)
    if len(set(sizes)) != 1 or n < 2:
        return

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        y = x.reshape(*shape[:at], n, sizes[0], *shape[at + 1 :])
        return tuple(aten.select.int(y, at, i) for i in range(n))

    splicer.replace(node, apart, node.args[0])


def _view(splicer: Splicer, node: fx.Node) -> None:
    """Sizes are explicit, and the local piece may need a copy where the whole does not."""
    node.target = aten.reshape.default
    node.args = (node.args[0], list(node.meta["val"].shape))
    node.kwargs = {}


def _expand(splicer: Splicer, node: fx.Node) -> None:
    node.args = (node.args[0], list(node.meta["val"].shape))
    node.kwargs = {}


def _copy(splicer: Splicer, node: fx.Node) -> None:
    """Assignment to a slice, made functional; it has no derivative of its own."""

    def spread(target: Tensor, source: Tensor) -> Tensor:
        return source.to(target.dtype).expand(target.shape).clone()

    splicer.replace(node, spread, *node.args[:2])


def _repeat_interleave(splicer: Splicer, node: fx.Node) -> None:
    """repeat_interleave by a number is an unsqueeze, an expand and a reshape."""
    call = Call.of(node)
    n, dim = call["repeats"], call["dim"]
    if not isinstance(n, int) or dim is None:
        return

    def apart(x: Tensor) -> Tensor:
        at = dim % x.dim()
        y = x.unsqueeze(at + 1).expand(*x.shape[: at + 1], n, *x.shape[at + 1 :])
        return y.reshape(*x.shape[:at], x.shape[at] * n, *x.shape[at + 1 :])

    splicer.replace(node, apart, node.args[0])


def _to(splicer: Splicer, node: fx.Node) -> None:
    """to and type_as are a cast, or nothing."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    val = node.meta["val"]
    before = source.meta["val"]
    if before.dtype == val.dtype and before.device == val.device:
        return splicer.drop(node)
    node.target = aten._to_copy.default
    node.args = (source,)
    node.kwargs = {"dtype": val.dtype}
    if before.device != val.device:
        node.kwargs = {"dtype": val.dtype, "device": val.device}


# Written to by the call, though its schema does not say so: running statistics.
_STATEFUL = ("batch_norm", "instance_norm", "rrelu", "rnn", "lstm", "gru")


def is_normalized(target: Any) -> bool:
    """Whether an operation may come out of export without a pass over it."""
    name = str(target).replace("torch.ops.", "")
    if any(word in name for word in _STATEFUL):
        return False
    return name in _HANDLERS or find(target) is not None


Handler = Callable[[Splicer, fx.Node], None]
_HANDLERS: dict[str, Handler] = {
    f"aten.{name}": handler
    for names, handler in (
        ("alias.default lift_fresh_copy.default", _drop),
        ("dropout.default feature_dropout.default", _dropout),
        ("native_dropout.default", _native_dropout),
        (
            "rand.default rand_like.default randn.default randn_like.default bernoulli.default "
            "bernoulli.p",
            _random,
        ),
        ("scaled_dot_product_attention.default", _attention),
        ("linear.default", _linear),
        ("addmm.default baddbmm.default", _addmm),
        (
            "conv1d.default conv2d.default conv3d.default conv_transpose1d.default "
            "conv_transpose2d.input conv_transpose3d.input",
            _convolution,
        ),
        ("mean.default mean.dim", _mean),
        (
            "adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default",
            _pool_to_one,
        ),
        ("cross_entropy_loss.default", _cross_entropy),
        ("nll_loss.default nll_loss_nd.default nll_loss2d.default", _nll),
        (
            "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default "
            "binary_cross_entropy.default binary_cross_entropy_with_logits.default "
            "kl_div.default soft_margin_loss.default",
            _mean_loss,
        ),
        ("split.Tensor split_with_sizes.default chunk.default", _equal_split),
        (
            "view.default reshape.default _unsafe_view.default squeeze.default squeeze.dim "
            "squeeze.dims",
            _view,
        ),
        ("copy.default", _copy),
        ("to.dtype to.device to.dtype_layout to.other type_as.default", _to),
        ("expand.default", _expand),
        ("repeat_interleave.self_int", _repeat_interleave),
    )
    for name in names.split()
}
