"""Time and memory of one training step, autopar beside PyTorch's own ways, on this machine's CPU.

    python benchmarks/step.py [--quick] [--inductor] [--only one,dp,tp,zero,fsdp,fsdp4]

A GPT of 10M parameters (examples/gpt.py, no dropout), AdamW, 4 x 128 tokens, 1 thread a rank:

    one  mesh of size 1      beside plain eager PyTorch
    dp   dp=2, two ranks     beside DistributedDataParallel
    tp   tp=2, two ranks     beside a hand-written DTensor plan (parallelize_module, loss_parallel)
    zero dp=2, zero=1        beside DistributedDataParallel with ZeroRedundancyOptimizer
    fsdp fsdp=2, two ranks   beside FSDP2 (fully_shard of every block and of the rest)
    fsdp4 fsdp=4, four ranks  beside the same

Both run in the same processes, in turn, so that the machine's other load hits both. A time is from
barrier to barrier: forward, backward, optimizer, zero_grad. Memory is measured apart, one kind a
process: the high-water mark of resident memory over some steps after warm-up, less what the
process held before it built the model; of rank 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, Config

FULL = Config(vocab=8192, block=128, layers=10, heads=8, width=256, dropout=0.0)
QUICK = Config(vocab=1024, block=64, layers=2, heads=4, width=128, dropout=0.0)
ROWS = 4
CASES = {  # ranks, mesh, ours, theirs
    "one": (1, "dp=1", "autopar, mesh of size 1", "eager PyTorch"),
    "dp": (2, "dp=2", "autopar, dp=2", "DistributedDataParallel"),
    "tp": (2, "tp=2", "autopar, tp=2", "DTensor parallelize_module"),
    "zero": (2, "dp=2", "autopar, dp=2, zero=1", "DDP, ZeroRedundancyOptimizer"),
    "fsdp": (2, "fsdp=2", "autopar, fsdp=2", "FSDP2 fully_shard"),
    "fsdp4": (4, "fsdp=4", "autopar, fsdp=4", "FSDP2 fully_shard, 4 ranks"),
}
DATA = ("dp", "zero", "fsdp", "fsdp4")
KINDS = ("autopar", "inductor", "peer")


def dtensor_plan(model: GPT) -> nn.Module:
    """Megatron's pattern in PyTorch's words, with a vocabulary-parallel embedding and head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attention.query", "attention.key", "attention.value", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attention.project", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    model.head.weight = model.tokens.weight  # parallelize_module unties them
    return model


def fully_sharded(model: GPT) -> nn.Module:
    """FSDP2 as its documentation has it: each block is a group, the root is the last."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(case: str, kind: str, config: Config) -> tuple[nn.Module, Callable[[], Any]]:
    """The model in one of its forms, and a context for its step."""
    torch.manual_seed(0)
    model: nn.Module = GPT(config)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if kind != "peer":
        import autopar

        options: dict[str, Any] = {"backend": "inductor" if kind == "inductor" else "eager"}
        options |= {"zero": 1} if case == "zero" else {}
        return autopar.parallelize(model, CASES[case][1], **options), context
    if case in ("dp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    elif case in ("fsdp", "fsdp4"):
        model = fully_sharded(model)  # type: ignore[arg-type]
    elif case == "tp":
        from torch.distributed.tensor.parallel import loss_parallel

        model, context = dtensor_plan(model), loss_parallel  # type: ignore[arg-type]
    return model, context


def make_step(case: str, kind: str, config: Config) -> Callable[[], float]:
    """A function that trains one step and returns the loss, as the whole batch has it."""
    model, context = build(case, kind, config)
    optimizer: torch.optim.Optimizer
    if case == "zero" and kind == "peer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, config.block + 1)
    window = torch.randint(config.vocab, shape, generator=generator)
    tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    own = case in DATA and kind == "peer"  # they want each rank's own rows
    if own:
        ranks = dist.get_world_size()
        tokens, targets = (t.chunk(ranks)[dist.get_rank()] for t in (tokens, targets))

    def step() -> float:
        with context():
            loss: Any = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value: Tensor = loss.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore
        if own:
            value = value / ranks
            dist.all_reduce(value)
        return value.item()

    return step


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def work(args: argparse.Namespace) -> None:
    """One rank of one case."""
    ranks = CASES[args.case][0]
    torch.set_num_threads(1)
    config = QUICK if args.quick else FULL
    if ranks > 1:
        dist.init_process_group("gloo")
    kinds = args.kinds.split(",")
    if args.memory:
        if kinds[0] != "peer":
            from autopar import parallelize  # noqa: F401  the imports are no part of the step
        before = common.rss_bytes()
        step = make_step(args.case, kinds[0], config)
        for _ in range(2):
            step()
        common.reset_peak()
        for _ in range(3):
            step()
        result: dict[str, Any] = {"bytes": common.peak_since_reset_bytes() - before}
    else:
        steps = {kind: make_step(args.case, kind, config) for kind in kinds}
        losses = {kind: [step() for _ in range(3)] for kind, step in steps.items()}
        times = common.interleave(steps, args.repetitions, barrier)
        result = {"losses": losses, "times": times}
    if not dist.is_initialized() or dist.get_rank() == 0:
        common.report(result)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measure(args: argparse.Namespace) -> None:
    """All cases, one table."""
    console = common.console()
    config = QUICK if args.quick else FULL
    parameters = sum(p.numel() for p in GPT(config).parameters())
    table = Table(
        title=f"one training step, GPT of {parameters / 1e6:.1f}M parameters, "
        f"{ROWS} x {config.block} tokens, {args.repetitions} repetitions",
        title_justify="left",
    )
    for heading in ("", "step ms (quartiles)", "time, autopar / peer", "memory MB", "loss differs"):
        table.add_column(heading, justify="left" if not heading else "right")
    for case in args.only.split(","):
        ranks, _, ours, theirs = CASES[case]
        kinds = ["autopar", "peer"] + (["inductor"] if args.inductor else [])
        base = ["--worker", "--case", case, "--repetitions", str(args.repetitions)]
        base += ["--quick"] if args.quick else []
        with console.status(f"{ours} beside {theirs}"):
            timed = common.run_workers(__file__, [*base, "--kinds", ",".join(kinds)], ranks)
            memory = {
                kind: common.run_workers(__file__, [*base, "--kinds", kind, "--memory"], ranks)
                for kind in kinds
            }
        for kind in kinds:
            name = {"autopar": ours, "peer": theirs, "inductor": f"{ours}, inductor"}[kind]
            low, middle, high = (1000 * q for q in common.quartiles(timed["times"][kind]))
            peer = timed["losses"]["peer"]
            differs = max(abs(a - b) for a, b in zip(timed["losses"][kind], peer, strict=True))
            table.add_row(
                name,
                f"{middle:.0f} ({low:.0f}..{high:.0f})",
                ""
                if kind == "peer"
                else common.ratio_text(timed["times"][kind], timed["times"]["peer"]),
                f"{memory[kind]['bytes'] / 1e6:.0f}",
                "" if kind == "peer" else f"{differs:.1e}",
            )
        table.add_section()
    console.print(table)
    console.print(f"`python benchmarks/step.py {' '.join(sys.argv[1:])}`; {common.machine()}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, few repetitions")
    parser.add_argument("--inductor", action="store_true", help="also backend='inductor'")
    parser.add_argument("--only", default=",".join(CASES), help="cases, such as one,dp")
    parser.add_argument("--repetitions", type=int, default=0, help="0: 15, or 5 with --quick")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, default="one", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.repetitions = args.repetitions or (5 if args.quick else 15)
    if not set(args.only.split(",")) <= set(CASES):
        parser.error(f"--only takes {','.join(CASES)}")
    work(args) if args.worker else measure(args)


if __name__ == "__main__":
    main()
