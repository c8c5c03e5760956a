"""`save_pretrained` of a parallel model: the whole of it, readable by others, in little memory."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make
from pool import Pool
from torch import nn

import autopar
from autopar.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def saves(rank: int, n: int, name: str, mesh: str, folder: str, limit: int) -> Any:
    model, inputs = make(name)
    parallel = autopar.parallelize(model, mesh, example_inputs=inputs)
    parallel.save_pretrained(folder, max_shard_bytes=limit)
    return {k: v.numpy() for k, v in parallel.full_state_dict().items()}


@pytest.mark.parametrize(
    ("name", "mesh", "limit"),
    [
        ("llama", "fsdp=2", 100_000),
        ("gpt2", "tp=2", 5_000_000_000),  # fused query-key-value, tied head
        ("bert", "dp=2, tp=2", 50_000),  # tied weight and bias
        ("t5", "fsdp=2, tp=2", 100_000),  # four names of one embedding
        ("vit", "fsdp=3", 5_000_000_000),
    ],
)
def test_from_pretrained_gives_the_model_back(
    name: str, mesh: str, limit: int, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    ranks = pool.run(autopar.mesh(mesh).size, saves, name, mesh, str(tmp_path), limit)
    kind = type(make(name)[0])
    loaded, facts = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(facts.values()), facts
    assert loaded.dtype == torch.float64 and type(loaded) is kind
    state = loaded.state_dict()
    assert state.keys() == ranks[0].keys()
    for key, value in ranks[0].items():
        assert torch.equal(state[key], torch.from_numpy(value)), key
    files = sorted(tmp_path.glob("*.safetensors"))
    if limit > 1_000_000:
        assert [f.name for f in files] == ["model.safetensors"]
    else:
        assert len(files) > 1
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert {f.name for f in files} == set(index["weight_map"].values())
    assert not list(tmp_path.glob("*.partial"))


def test_other_models_load_by_safetensors(pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_model

    ranks = pool.run(4, saves, "gpt", "fsdp=2, tp=2", str(tmp_path), 5_000_000_000)
    model, _ = make("gpt")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    missing, strange = load_model(model, tmp_path / "model.safetensors")
    assert not missing and not strange
    for key, value in model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(ranks[0][key])), key


WIDTH, LAYERS = 1024, 24  # 4 MB each
FILE = 2 * WIDTH * WIDTH * 4


def watched(work: Any) -> int:
    """Bytes by which the resident memory grew at most."""
    page = 4096

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would serve unseen
    before, most, done = resident(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.01)
    work()
    done.set()
    thread.join()
    return max(0, most[0] - before)


def saves_much(rank: int, n: int, folder: str) -> tuple[int, int]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = autopar.parallelize(
        nn.Sequential(*layers), "fsdp=2", example_inputs=torch.ones(2, WIDTH)
    )
    model.save_pretrained(f"{folder}/first", max_shard_bytes=FILE)  # loads the libraries
    grew = watched(lambda: model.save_pretrained(f"{folder}/second", max_shard_bytes=FILE))
    whole = watched(lambda: model.full_state_dict())
    return grew, whole


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures by /proc")
def test_memory_is_one_file_and_one_tensor(pool: Pool, tmp_path: Path) -> None:
    (grew, whole), (other, _) = pool.run(2, saves_much, str(tmp_path))
    tensor = WIDTH * WIDTH * 4
    total = LAYERS * tensor
    print(f"rank 0 {grew / 1e6:.1f} MB, rank 1 {other / 1e6:.1f} MB, whole {whole / 1e6:.1f} MB")
    assert whole > 0.8 * total, "the measure sees a copy of the whole"
    assert max(grew, other) < whole / 3, "far less than that, beside what every save takes"


def saves_nowhere(rank: int, n: int, folder: str) -> str:
    model, inputs = make("gpt", layers=1)
    parallel = autopar.parallelize(model, "tp=2", example_inputs=inputs)
    with pytest.raises(CheckpointError) as caught:
        parallel.save_pretrained(f"{folder}/file/model", max_shard_bytes=1000)
    return str(caught.value)


def test_all_ranks_hear_why_it_failed(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in pool.run(2, saves_nowhere, str(tmp_path)):
        assert "could not be saved: NotADirectoryError" in text and "where:" in text
