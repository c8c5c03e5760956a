"""What the benchmarks share: workers, interleaved timing, memory, tables."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

MARK = "RESULT "
"""A worker's line that carries its result as JSON."""


def machine() -> str:
    """Kind of processor, cores, and the versions that matter, in one line."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return (
        f"{date.today()}, {model}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def console() -> Console:
    """A console wide enough for the tables wherever it prints."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=140)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_workers(
    script: str, arguments: Sequence[str], ranks: int = 1, limit_s: float = 1800
) -> dict[str, Any]:
    """Run `script` once per rank, one thread each, and return the JSON that rank 0 reported.

    Raises:
        RuntimeError: a rank failed; the message ends with what it printed.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        # rank 0 last: it alone writes much
        printed = [worker.communicate(timeout=limit_s) for worker in reversed(workers)][::-1]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, (out, err)) in enumerate(zip(workers, printed, strict=True)):
        if worker.returncode:
            raise RuntimeError(
                f"rank {rank} exited with {worker.returncode}\n{(out + err)[-4000:]}"
            )
    for line in printed[0][0].splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    raise RuntimeError(f"no result\n{(printed[0][0] + printed[0][1])[-4000:]}")


def report(result: dict[str, Any]) -> None:
    """Send a worker's result to `run_workers`."""
    print(MARK + json.dumps(result), flush=True)


def interleave(
    steps: dict[str, Callable[[], Any]], repetitions: int, barrier: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each step, run in turn: A B, then B A, so that none is always first."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repetitions):
        names = list(steps) if round_ % 2 == 0 else list(steps)[::-1]
        for name in names:
            barrier()
            start = time.perf_counter()
            steps[name]()
            barrier()
            times[name].append(time.perf_counter() - start)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio_text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median and quartiles of ours / theirs, pair by pair."""
    low, middle, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def rss_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Give freed memory back and start the high-water mark anew (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_since_reset_bytes() -> int:
    """High-water mark of resident memory since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return peak_bytes()


def peak_bytes() -> int:
    """High-water mark of resident memory of this process's whole life."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
