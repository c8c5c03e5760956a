"""Trains the byte-level GPT of train_gpt.py with checkpoints, through crashes and on any mesh.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_large.py \\
        --mesh "fsdp=2, tp=2" --folder runs/large

When a rank dies, torchrun starts all of them anew and the run resumes from the newest complete
checkpoint. Run again with another --mesh and number of processes, it resumes on that one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Config
from torch import Tensor
from train_gpt import corpus, rate

import autopar


def batch(data: Tensor, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, each (rows, block): a function of the step alone.

    So a resumed run needs no state of the data; a loader with one would go into `extra`.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.block - 1, (args.batch, 1), generator=generator)
    window = data[starts + torch.arange(args.block + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def setup(args: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    """The parallel model and its optimizer."""
    torch.manual_seed(args.seed)
    config = Config(block=args.block, layers=args.layers, width=args.width)
    model = GPT(config).to(getattr(torch, args.dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = autopar.parallelize(model.to(device), args.mesh, seed=args.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))


def say(text: str) -> None:
    """Print on rank 0, at once: a killed process has no time to flush."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def train(args: argparse.Namespace) -> None:
    """Train from the newest checkpoint to the last step."""
    model, optimizer = setup(args)
    data = corpus()
    checkpoints = autopar.Checkpoints(args.folder, keep=args.keep)
    resumed = checkpoints.load(model, optimizer)
    first = 0 if resumed is None else resumed.step
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    say(f"attempt {attempt} on {args.mesh}: step {first} of {args.steps}, pid {os.getpid()}")
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, args.steps)
        tokens, targets = (t.to(next(model.parameters()).device) for t in batch(data, step, args))
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step} loss {loss.item():.12f}")
        if (step + 1) % args.every == 0:
            checkpoints.save(step + 1, model, optimizer, wait=False)  # written in the meantime
    checkpoints.wait()
    if args.steps not in checkpoints.steps():
        checkpoints.save(args.steps, model, optimizer)
    model.save_pretrained(args.folder / "model")
    say(f"done: {args.folder / 'model'}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="dp=1", help='such as "fsdp=2, tp=2"')
    parser.add_argument("--folder", type=Path, default=Path("runs/large"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--batch", type=int, default=12, help="rows of the global batch")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    if min(args.steps, args.every, args.keep, args.batch) < 1:
        parser.error("--steps, --every, --keep and --batch must be at least 1")
    return args


def main() -> int:
    """Run; an error ends this process, and torchrun starts all ranks anew."""
    args = arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available():
        torch.set_num_threads(1)
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
