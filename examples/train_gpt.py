"""Trains a byte-level GPT on the sources of Python's standard library, on any mesh.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --mesh "dp=2, tp=2"

At the end rank 0 runs the first steps again on a mesh of size 1, with the same model, seed and
data, and prints both losses side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import autopar
from autopar.errors import AutoparError

DATA_BYTES = 4_000_000
EXPECTED = {"float32": 1e-4, "float64": 1e-10}  # largest difference of the first losses
WHY = {
    "float32": "each sum is rounded in another order, and AdamW makes a last-bit difference of a "
    "small gradient one of its update",
    "float64": "the same computation in another order",
}


def corpus() -> Tensor:
    """The first DATA_BYTES bytes of the standard library's sources, in the order of their paths.

    Without tests, and without the folders that are tables of numbers more than code.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
    data = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if skipped.isdisjoint(path.relative_to(root).parts):
            data += path.read_bytes()
            if len(data) >= DATA_BYTES:
                break
    return torch.frombuffer(data[:DATA_BYTES], dtype=torch.uint8)


def batches(data: Tensor, rows: int, block: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets, each (rows, block); the same on every rank, as `batch="global"` wants."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - block - 1, (rows, 1), generator=generator)
        window = data[starts + torch.arange(block + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def rate(step: int, steps: int) -> float:
    """Learning rate relative to its peak: 20 steps up, then a half cosine down to a tenth."""
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def setup(args: argparse.Namespace, mesh: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model parallel on `mesh`, its optimizer and its data, all from the seed."""
    torch.manual_seed(args.seed)
    config = Config()
    model = GPT(config).to(getattr(torch, args.dtype))
    model = autopar.parallelize(model, mesh, seed=args.seed)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    return model, optimizer, batches(corpus(), args.batch, config.block, args.seed)


def train(args: argparse.Namespace, mesh: str, steps: int, show: Any) -> tuple[Any, list[float]]:
    """Train for `steps` steps; `show(step, loss)` is called after each."""
    model, optimizer, data = setup(args, mesh)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, args.steps)
        tokens, targets = next(data)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        show(step, losses[-1])
    return model, losses


def progress_bar(console: Console, label: str, total: int, tokens: int) -> tuple[Progress, Any]:
    """A bar with loss and tokens per second, and the function that moves it."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task(label, total=total, loss=float("nan"), speed=0.0)
    first: list[float] = []

    def show(step: int, loss: float) -> None:
        first.append(time.perf_counter()) if not first else None  # step 0 compiles
        passed = time.perf_counter() - first[0]
        speed = step * tokens / passed if step else 0.0
        bar.update(task, advance=1, loss=loss, speed=speed)
        if not console.is_terminal and (step % 25 == 0 or step == total - 1):
            console.print(f"{label}  step {step:4d}  loss {loss:.4f}  {speed:,.0f} tokens/s")

    return bar, show


def comparison(args: argparse.Namespace, losses: list[float], single: list[float]) -> Table:
    """Both losses of each step side by side, and the largest difference."""
    table = Table(title=f"the first {len(single)} losses, {args.dtype}", title_justify="left")
    for heading in ("step", args.mesh, "one device", "difference"):
        table.add_column(heading, justify="right")
    differences = [abs(a - b) for a, b in zip(losses, single, strict=False)]
    for step, (a, b, d) in enumerate(zip(losses, single, differences, strict=False)):
        table.add_row(str(step), f"{a:.8f}", f"{b:.8f}", f"{d:.1e}")
    table.add_section()
    table.add_row("", "", "largest", f"{max(differences):.1e}")
    return table


def save(folder: Path, model: Any) -> None:
    """Write the generated code and the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(str(model.code()))
    (folder / "plan.json").write_text(json.dumps(model.plan, indent=1) + "\n")


def run(args: argparse.Namespace) -> int:
    """Train, then compare with one device on rank 0; the exit code."""
    first = int(os.environ.get("RANK", "0")) == 0
    console = Console(quiet=not first, highlight=False)
    tokens = args.batch * Config().block
    bar, show = progress_bar(console, f"mesh {args.mesh}", args.steps, tokens)
    with bar:
        model, losses = train(args, args.mesh, args.steps, show)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if not first:
        return 0
    save(args.out, model)
    check = min(args.check, args.steps)
    bar, show = progress_bar(console, "one device", check, tokens)
    with bar:
        _, single = train(args, "dp=1", check, show)
    console.print(comparison(args, losses, single))
    console.print(f"expected: below {EXPECTED[args.dtype]:.0e} ({WHY[args.dtype]})")
    last = losses[-20:]
    console.print(f"loss {losses[0]:.3f} at the start, {sum(last) / len(last):.3f} at the end")
    console.print(f"generated code and plan: {args.out}/")
    worst = max(abs(a - b) for a, b in zip(losses, single, strict=False))
    return 0 if worst < EXPECTED[args.dtype] else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="dp=1", help='such as "dp=2, tp=2"')
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=12, help="rows of the global batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(EXPECTED), default="float32")
    parser.add_argument("--check", type=int, default=20, help="steps to repeat on one device")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    if args.steps < 1 or args.check < 1 or args.batch < 1:
        parser.error("--steps, --check and --batch must be at least 1")
    return args


def main() -> int:
    """Run, and leave no trace of other ranks behind when stopped."""
    args = arguments()
    if "OMP_NUM_THREADS" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)
    try:
        return run(args)
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            print("\nstopped", file=sys.stderr)
        return 130
    except AutoparError as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code) if code == 130 else sys.exit(code)
