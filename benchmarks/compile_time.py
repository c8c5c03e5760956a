"""Time and memory to compile large models on this machine, with no GPU and no process group.

    python benchmarks/compile_time.py [--quick] [--only models,depth,ranks]

    models   Llama-3-8B on dp=32, tp=8 and GPT-3 175B on dp=128, tp=8
    depth    Llama-3-8B of 8 to 96 layers on dp=32, tp=8
    ranks    Llama-3-8B on 8 to 1024 ranks, tp=8

Parameters and inputs are on the meta device; the global batch has labels, so the loss and the whole
backward graph are part of it. Every line is a fresh process. Time is from the call of
`autopar.compile` to its return: on the wall, and in seconds of CPU, which other load on the machine
does not change. Memory is the high-water mark of the process, imports included.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import common
import torch
from rich.table import Table
from torch import nn

MODELS = ("llama3-8b", "gpt3-175b")
DEPTHS = (8, 16, 32, 64, 96)
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def make_model(name: str, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its global batch on the meta device; `layers` 0 is the model's own depth."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if name == "llama3-8b":
        config: Any = LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers or 32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            use_cache=False,
        )
        rows = 256
    else:
        config = GPT2Config(
            vocab_size=50257,
            n_positions=2048,
            n_embd=12288,
            n_layer=layers or 96,
            n_head=96,
            use_cache=False,
        )
        rows = 1536
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(rows, 2048, dtype=torch.long)
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


def work(args: argparse.Namespace) -> None:
    """Compile one model and report."""
    start = time.perf_counter()
    import autopar

    model, inputs = make_model(args.model, args.layers)
    built = time.perf_counter()
    cpu = time.process_time()
    compiled = autopar.compile(model, args.mesh, inputs)
    cpu = time.process_time() - cpu
    seconds = time.perf_counter() - built
    common.report(
        {
            "parameters": sum(p.numel() for p in model.parameters()),
            "build_s": built - start,
            "compile_s": seconds,
            "cpu_s": cpu,
            "peak_bytes": common.peak_bytes(),
            "code_lines": len(str(compiled.code()).splitlines()),
        }
    )


def jobs(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """(model, layers, mesh) of every line."""
    wanted = args.only.split(",")
    found: list[tuple[str, int, str]] = []
    if "models" in wanted:
        meshes = {"llama3-8b": "dp=32, tp=8", "gpt3-175b": "dp=128, tp=8"}
        found += [(name, 0, meshes[name]) for name in (MODELS[:1] if args.quick else MODELS)]
    if "depth" in wanted:
        depths = DEPTHS[:2] if args.quick else DEPTHS
        found += [(MODELS[0], depth, "dp=32, tp=8") for depth in depths]
    if "ranks" in wanted:
        layers = 8 if args.quick else 0
        ranks = (RANKS[0], RANKS[-1]) if args.quick else RANKS
        found += [(MODELS[0], layers, f"dp={n // 8}, tp=8") for n in ranks]
    return found


def measure(args: argparse.Namespace) -> None:
    """Run every line, then print the table."""
    console = common.console()
    table = Table(title="compile time", title_justify="left")
    headings = ("model", "parameters", "layers", "mesh", "ranks", "wall s", "cpu s", "peak GB")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "mesh") else "right")
    table.add_column("code lines", justify="right")
    for model, layers, mesh in jobs(args):
        with console.status(f"{model}, {layers or 'all'} layers, {mesh}"):
            base = ["--worker", "--model", model, "--layers", str(layers), "--mesh", mesh]
            result = common.run_workers(__file__, base)
        sizes = [int(part.split("=")[1]) for part in mesh.split(",")]
        depth = layers or {"llama3-8b": 32, "gpt3-175b": 96}[model]
        print(f"{model} {depth}L {mesh}: {result['compile_s']:.1f} s", file=sys.stderr)
        table.add_row(
            model,
            f"{result['parameters'] / 1e9:.1f}B",
            str(depth),
            mesh,
            str(sizes[0] * sizes[1]),
            f"{result['compile_s']:.1f}",
            f"{result['cpu_s']:.1f}",
            f"{result['peak_bytes'] / 1e9:.2f}",
            str(result["code_lines"]),
        )
    console.print(table)
    console.print(f"`python benchmarks/compile_time.py {' '.join(sys.argv[1:])}`")
    console.print(common.machine())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller lines")
    parser.add_argument("--only", default="models,depth,ranks", help="groups of lines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--mesh", default="dp=32, tp=8", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not set(args.only.split(",")) <= {"models", "depth", "ranks"}:
        parser.error("--only takes models,depth,ranks")
    work(args) if args.worker else measure(args)


if __name__ == "__main__":
    main()
