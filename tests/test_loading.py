from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from builders import largest_difference
from safetensors.torch import save_file
from test_partition import IDS, Tied
from torch import nn

import graphplan


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


X = torch.ones(2, 32)


def meta() -> Plain:
    with torch.device("meta"):
        return Plain()


def test_a_meta_model_is_filled_from_a_file(tmp_path: Path) -> None:
    model = Plain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with graphplan.simulate({0: 6000, 1: 6000}) as machine:
        for path in (tmp_path, tmp_path / "model.safetensors"):
            placed = graphplan.partition(meta(), machine.max_memory, (X,), checkpoint=str(path))
            assert largest_difference(placed(X), model(X)) < 1e-6
            del placed
            gc.collect()  # simulated memory is freed with the last tensor


def test_shards_dtypes_and_ties(tmp_path: Path) -> None:
    model = Tied().double()
    state = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    parts = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for file, members in parts.items():
        save_file({name: state[name].contiguous() for name in members}, tmp_path / file)
    index = {name: file for file, members in parts.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    empty = Tied()
    placed = graphplan.partition(empty, {"cpu": "1GiB"}, (IDS,), checkpoint=str(tmp_path))
    assert placed.embed.weight.dtype == torch.float32
    assert placed.head.weight is placed.embed.weight
    assert largest_difference(placed(IDS), model.float()(IDS)) < 1e-5


def test_names_that_do_not_fit_are_in_one_error(tmp_path: Path) -> None:
    state = Plain().state_dict()
    state["surplus"] = torch.ones(2)
    del state["b.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(graphplan.InputError, match=r"missing 'b.bias', unexpected 'surplus'"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    with pytest.raises(graphplan.InputError, match=r"missing 'b.bias', unexpected nothing"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path), strict=False)
    placed = graphplan.partition(Plain(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path), strict=False)
    assert torch.equal(placed.a.weight, state["a.weight"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(graphplan.InputError, match="no checkpoint at"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(graphplan.InputError, match="no safetensors file, or is cut short"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    save_file({**Plain().state_dict(), "a.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(graphplan.InputError, match=r"'a.weight' of shape \[3\], the model \[32, 32\]"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "gone.safetensors"}}')
    with pytest.raises(graphplan.InputError, match=r"gone\.safetensors"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
