"""What is compiled for known models: traffic of realistic sizes, and small programs in full.

The large models stand on the meta device; a golden of theirs holds counts and MiB of collectives.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import mark
from torch import Tensor, fx, nn

import autopar
from autopar.layout import Layout
from autopar.testing import Golden
from autopar.text import show

BATCH, TIME = 64, 1024
MIB = 2.0**20
SEQUENCE = pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])


def _gpt2(layers: int) -> nn.Module:
    """GPT-2 124M but for its depth, float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **drop))


def _llama(layers: int) -> nn.Module:
    """Llama-3-8B but for its depth, bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@functools.cache
def compiled(name: str, layers: int, mesh: str, sequence: bool) -> Any:
    """A large model for one batch of 64 x 1024 tokens."""
    with torch.device("meta"):
        model = {"gpt2": _gpt2, "llama": _llama}[name](layers).train()
        tokens = torch.empty(BATCH, TIME, dtype=torch.long)
    mark(model, f"large {name}")  # its graph is that of each mesh
    inputs = {"input_ids": tokens, "labels": tokens}
    return autopar.compile(model, mesh, inputs, sequence=sequence, strict=True)


def counts(name: str, layers: int, mesh: str, sequence: bool) -> Counter[tuple[str, str]]:
    """How often each collective over tp stands in each phase."""
    rows = compiled(name, layers, mesh, sequence).traffic()
    return Counter({(phase, kind): n for phase, axis, kind, n, _ in rows if axis == "tp"})


def moved(name: str, layers: int, mesh: str, sequence: bool) -> float:
    """MiB that a rank sends over tp in one step."""
    rows = compiled(name, layers, mesh, sequence).traffic()
    return sum(total for _, axis, _, _, total in rows if axis == "tp") / MIB


MESHES = ["tp=4", "dp=2, tp=2", "dp=8, tp=8"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_traffic_of_three_layers(name: str, mesh: str, golden: Golden) -> None:
    lines = []
    for sequence in (True, False):
        lines.append(f"# {name}, 3 layers, {BATCH} x {TIME} tokens, {mesh}, sequence={sequence}")
        for phase, axis, kind, n, total in compiled(name, 3, mesh, sequence).traffic():
            lines.append(f"# {phase:<8} {axis} {kind:<22} x{n:<3} {total / MIB:10.3f} MiB")
    golden("\n".join(lines))


LAYER_OFF = {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
LAYER_ON = {
    ("forward", "all_gather"): 2,
    ("forward", "reduce_scatter"): 2,
    ("backward", "all_gather_replicated"): 2,
    ("backward", "reduce_scatter"): 2,
}


@pytest.mark.parametrize(
    ("name", "mesh"),  # GPT-2's 12 heads do not fill tp=8
    [("gpt2", mesh) for mesh in MESHES[:2]] + [("llama", mesh) for mesh in MESHES],
)
@pytest.mark.parametrize(("sequence", "layer"), [(False, LAYER_OFF), (True, LAYER_ON)])
def test_layer_costs_megatrons_collectives(
    name: str, mesh: str, sequence: bool, layer: dict[tuple[str, str], int]
) -> None:
    """Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2."""
    depth = 12 if name == "gpt2" else 6
    few, more = (counts(name, n, mesh, sequence) for n in (depth, depth + 1))
    assert more - few == layer
    assert not few - more


def test_sequence_moves_the_bytes_of_all_reduces() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; both plans differ at the ends only."""
    on, off = (
        moved("llama", 4, "dp=8, tp=8", s) - moved("llama", 3, "dp=8, tp=8", s)
        for s in (True, False)
    )
    activation = BATCH / 8 * TIME * 4096 * 2 / MIB
    assert off == pytest.approx(4 * 2 * 7 / 8 * activation, rel=1e-3)
    assert on == pytest.approx(off, rel=1e-3)


def test_shallow_model_may_cut_the_residual_by_width() -> None:
    """On tp=4 three layers of Llama do so, six do not.

    It saves the exchange after the embedding once; each layer then takes more collectives, the
    same large ones and small ones for the norms.
    """
    layer = moved("llama", 4, "tp=4", True) - moved("llama", 3, "tp=4", True)
    activation = BATCH * TIME * 4096 * 2 / MIB
    assert layer == pytest.approx(4 * 2 * 3 / 4 * activation, rel=1e-3)


@SEQUENCE
def test_attention_is_cut_by_heads(sequence: bool) -> None:
    states = compiled("llama", 3, "dp=8, tp=8", sequence).plan["states"]
    for i in range(3):
        layer = f"model.layers.{i}"
        assert states[f"{layer}.self_attn.q_proj.weight"] == "[4096{tp}, 4096]"  # 4 heads of 128
        assert states[f"{layer}.self_attn.k_proj.weight"] == "[1024{tp}, 4096]"  # 1 head of 128
        assert states[f"{layer}.self_attn.v_proj.weight"] == "[1024{tp}, 4096]"
        assert states[f"{layer}.self_attn.o_proj.weight"] == "[4096, 4096{tp}]"
        assert states[f"{layer}.mlp.up_proj.weight"] == "[14336{tp}, 4096]"
        assert states[f"{layer}.mlp.down_proj.weight"] == "[4096, 14336{tp}]"


@pytest.mark.parametrize("mesh", MESHES[:2])
@SEQUENCE
def test_fused_attention_keeps_whole_heads_of_query_key_and_value(
    mesh: str, sequence: bool
) -> None:
    found = compiled("gpt2", 3, mesh, sequence)
    states = found.plan["states"]
    for i in range(3):
        weight = Layout.parse(states[f"transformer.h.{i}.attn.c_attn.weight"])
        assert str(weight) == "[768, 3*768{tp}]"  # a cut of each of the three
        local = weight.dims[1][-1].local_sizes(found.annotated.mesh, {"dp": 0, "tp": 0})
        assert local % 64 == 0  # the width of a head
        assert states[f"transformer.h.{i}.attn.c_attn.bias"] == "[3*768{tp}]"
        assert states[f"transformer.h.{i}.attn.c_proj.weight"] == "[768{tp}, 768]"


@pytest.mark.parametrize("mesh", MESHES[:2])
@SEQUENCE
def test_tied_vocabulary_is_cut_in_embedding_and_loss(mesh: str, sequence: bool) -> None:
    found = compiled("gpt2", 3, mesh, sequence)
    state = next(s for s in found.annotated.states if "wte" in s.name)
    assert state.aliases == ("lm_head.weight",)
    assert found.plan["states"][state.name] == "[50257{tp}, 768]"
    logits = max(
        (n for n in found.graph("forward").graph.nodes if n.op == "call_function"),
        key=lambda n: n.meta["val"].numel() if isinstance(n.meta["val"], Tensor) else 0,
    )
    rows = BATCH // found.annotated.mesh.sizes.get("dp", 1) * TIME
    cut = -(-50257 // found.annotated.mesh.sizes["tp"])
    assert logits.meta["val"].numel() <= rows * cut  # no rank ever holds whole logits
    statistics = 3 * rows * 4 * 2 / MIB  # maximum, sum and target of each row, all-reduced
    for phase, axis, kind, _, total in found.traffic():
        if (phase, axis, kind) == ("forward", "tp", "all_reduce") and sequence:
            assert total / MIB < statistics


@pytest.mark.parametrize(("rows", "parallel"), [(8, True), (64, False)])
@SEQUENCE
def test_lookup_is_vocabulary_parallel_where_the_table_outweighs_the_rows(
    rows: int, parallel: bool, sequence: bool
) -> None:
    """8 rows of 1024 x 768 are a sixth of the table; with 64 gathering the table is cheaper."""
    with torch.device("meta"):
        tokens = torch.empty(rows, TIME, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        found = autopar.compile(_gpt2(1).train(), "tp=4", inputs, sequence=sequence, strict=True)
    looked_up = [
        node
        for node in found.graph("spmd").graph.nodes
        if node.target is torch.ops.aten.embedding.default
        and node.args[0].meta["val"].shape[0] == -(-50257 // 4)
    ]
    assert bool(looked_up) == parallel


def _reductions(gradient: fx.Node, axis: str) -> set[tuple[fx.Node, int]]:
    """The (reduction, member) over `axis` that a gradient comes from, nearest ones only."""
    found: set[tuple[fx.Node, int]] = set()
    stack, seen = [gradient], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        source, member = node.args if node.target is getitem else (node, 0)
        name = str(source.target)
        if name.startswith("autopar.all_reduce") and source.args[1] == axis:
            found.add((source, member))
        else:
            stack.extend(node.all_input_nodes)
    return found


@SEQUENCE
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "dp=2, tp=2"), ("llama", "dp=8, tp=8")])
def test_every_gradient_is_reduced_once_over_dp(name: str, mesh: str, sequence: bool) -> None:
    found = compiled(name, 3, mesh, sequence)
    phases = found.of(0)
    graph = phases.backward.graph
    grads = graph.output_node().args[0]
    owners: dict[tuple[fx.Node, int], str] = {}
    for parameter, gradient in zip(phases.gradients, grads, strict=True):
        reductions = _reductions(gradient, "dp")
        assert len(reductions) == 1, (parameter, reductions)
        assert reductions.isdisjoint(owners), parameter
        owners.update(dict.fromkeys(reductions, parameter))
    members = 0
    for node in graph.nodes:
        if str(node.target).startswith("autopar.all_reduce") and node.args[1] == "dp":
            members += len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
    assert members == len(phases.gradients)


# --- small programs in full --------------------------------------------------------------------


class MLP(nn.Module):
    """Two products and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


class Attention(nn.Module):
    """Fused query, key and value, a product and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(512, 1536, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, 8, 64).transpose(1, 2) for part in self.qkv(x).split(width, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return y.square().mean()


def _stable(text: str) -> str:
    """Without line numbers, which move when this file is edited."""
    return re.sub(r"(\.py):\d+", r"\1", text)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_code_of_an_mlp(mesh: str, golden: Golden) -> None:
    found = autopar.compile(MLP(), mesh, (torch.empty(4, 8), torch.empty(4, 4)), sequence=False)
    forward, backward = _stable(found.code()).split("\n\n\n")
    golden(forward, name="forward")
    golden(backward, name="backward")


@SEQUENCE
def test_program_of_an_attention_block(sequence: bool, golden: Golden) -> None:
    x = torch.empty(BATCH, TIME, 512, device="meta")
    found = autopar.compile(Attention(), "dp=2, tp=2", x, sequence=sequence)
    golden(_stable(show(found.of(0).program, {"dp": 0, "tp": 0})))


def test_compilation_is_deterministic() -> None:
    def once() -> tuple[str, str]:
        x = torch.empty(BATCH, TIME, 512, device="meta")
        found = autopar.compile(Attention(), "dp=2, tp=2", x)
        return found.code(), found.plan_json()

    assert once() == once()
