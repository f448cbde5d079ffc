from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from builders import largest_difference
from safetensors.torch import save_file
from test_partition import IDS, Tied
from torch import nn

import graphplan
from graphplan.runtime.checkpoint import checkpoint_files, parallel_reads
from graphplan.runtime.checkpoint.mapped_files import MappedFile
from graphplan.runtime.checkpoint.parallel_reads import Read, read_into
from graphplan.runtime.checkpoint.safetensors_header import read_header


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


def test_meta_model_is_loaded_from_a_file(tmp_path: Path) -> None:
    model = Plain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with graphplan.simulate({0: 6000, 1: 6000}) as machine:
        for path in (tmp_path, tmp_path / "model.safetensors"):
            placed = graphplan.partition(meta(), machine.max_memory, (X,), checkpoint=str(path))
            assert largest_difference(placed(X), model(X)) < 1e-6
            del placed
            gc.collect()  # simulated memory is freed with the last tensor


def test_sharded_checkpoint_with_ties_and_other_dtypes(tmp_path: Path) -> None:
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


def test_differing_tied_weights_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    file, state, eager = tmp_path / "model.safetensors", dict(Tied().state_dict()), Tied()
    for twice, warnings in ((1.0, 0), (2.0, 1)):
        state["head.weight"] = twice * state["embed.weight"]
        save_file(state, file)
        eager.load_state_dict(state)
        placed = graphplan.partition(Tied(), {"cpu": "1GiB"}, (IDS,), checkpoint=file)
        assert largest_difference(placed(IDS), eager(IDS)) < 1e-6
        told = [str(one.message) for one in recwarn if "are tied, and differ" in str(one.message)]
        assert len(told) == warnings
    assert told[0].startswith("'embed.weight' and 'head.weight'")


def test_only_tied_weights_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        checkpoint_files, "equal_in_files", lambda a, b: not compared.append({a.name, b.name})
    )
    state = Tied().state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    graphplan.partition(Tied(), {"cpu": "1GiB"}, (IDS,), checkpoint=tmp_path)
    assert compared == [{"embed.weight", "head.weight"}]


@pytest.mark.parametrize("given", [["a.safetensors"], {"a.weight": torch.ones(2)}, 3])
def test_checkpoint_of_another_type_raises(given: Any) -> None:
    with pytest.raises(graphplan.InputError, match=rf"checkpoint must be .*, not a {type(given).__name__}"):
        graphplan.partition(Plain(), {"cpu": "1GiB"}, (X,), checkpoint=given)


def test_missing_and_unexpected_names_raise_together(tmp_path: Path) -> None:
    state = Plain().state_dict()
    state["surplus"] = torch.ones(2)
    del state["b.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(graphplan.InputError, match=r"missing 'b.bias', unexpected 'surplus'"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    with pytest.raises(graphplan.InputError, match=r"missing 'b.bias'$"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path), strict=False)
    placed = graphplan.partition(Plain(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path), strict=False)
    assert torch.equal(placed.a.weight, state["a.weight"])


class Turned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(32.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.angles)


def test_missing_nonpersistent_buffers_raise_with_advice(tmp_path: Path) -> None:
    model = Turned()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Turned()
    said = r"Turned: missing 'angles'\. The missing ones are buffers .* in accelerate\.init_empty_weights\(\)"
    with pytest.raises(graphplan.CheckpointError, match=said):
        graphplan.partition(empty, {"cpu": "1GiB"}, (X,), checkpoint=tmp_path)
    with init_empty_weights():
        empty = Turned()
    placed = graphplan.partition(empty, {"cpu": "1GiB"}, (X,), checkpoint=tmp_path)
    assert torch.equal(placed(X), model(X))


def test_unreadable_files_raise(tmp_path: Path) -> None:
    with pytest.raises(graphplan.InputError, match="no checkpoint at"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(graphplan.InputError, match="not a safetensors file, or is truncated"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    save_file({**Plain().state_dict(), "a.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(graphplan.InputError, match=r"'a.weight' of shape \[3\], but .* has \[32, 32\]"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    (tmp_path / "model.safetensors").unlink()  # which counts before an index, as in transformers
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "gone.safetensors"}}')
    with pytest.raises(graphplan.InputError, match=r"gone\.safetensors"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))


# -- files ------------------------------------------------------------------------------------------------


def damaged(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def row(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{}", b"", 1 << 40, "header too large"),
        (b"{}", b"", 0, "JSON"),
        (b"{]", b"", None, "JSON"),
        (b"[]", b"", None, "JSON"),
        (b'{"w": 3}', b"", None, "invalid type: integer `3`"),
        (row(offsets=(0,)), b"", None, "expected a tuple of size 2"),
        (row(), b"1234", None, "not fully covered"),
        (row(), b"1" * 12, None, "not fully covered"),
        (row(offsets=(8, 0)), b"", None, "invalid offset for tensor `w`"),
        (row(shape=(-2,)), b"1" * 8, None, "integer `-2`"),
        (row(shape=(True,), offsets=(0, 4)), b"1" * 4, None, "boolean `true`"),
        (row(shape=(3,)), b"1" * 8, None, "invalid shape"),
        (row(offsets=(4, 12)), b"1" * 12, None, "invalid offset for tensor `w`"),
        (row("F6_E2M3", (4,), (0, 3)), b"1" * 3, None, "F6_E2M3"),
        (row("X"), b"1" * 8, None, "unknown variant `X`"),
    ],
)
def test_invalid_headers_raise(
    header: bytes, data: bytes, length: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(graphplan.CheckpointError, match=f"truncated: .*{message}"):
        read_header(damaged(tmp_path / "w.safetensors", header, data, length))


def test_headers_agree_with_safetensors(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int16),
        "c": torch.randn(2, 2).bfloat16(),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor(True),
        "z": torch.randn(2, dtype=torch.complex64),
    }
    save_file(state, tmp_path / "all.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "all.safetensors")
    assert set(header) == set(state)
    found = MappedFile(header["a"].file)
    for name, tensor in state.items():
        assert torch.equal(found.tensor(header[name]), tensor)


def test_folder_of_files_without_an_index(tmp_path: Path) -> None:
    model = Plain()
    state = model.state_dict()
    for name in ("a", "b"):
        part = {key: tensor for key, tensor in state.items() if key.startswith(name)}
        save_file(part, tmp_path / f"{name}.safetensors")
    placed = graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    assert torch.equal(placed(X), model(X))
    save_file({"a.weight": state["a.weight"]}, tmp_path / "c.safetensors")
    with pytest.raises(graphplan.CheckpointError, match=r"both have 'a\.weight'"):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": {"a.weight": 3}}', "not an index"),
        (
            '{"weight_map": {"a.weight": "part.safetensors"}}',
            r"tensors that its files do not have: 'a\.weight'",
        ),
    ],
)
def test_invalid_index_raises(text: str, message: str, tmp_path: Path) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(graphplan.CheckpointError, match=message):
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))


def test_error_lists_every_missing_and_unexpected_name(tmp_path: Path) -> None:
    save_file({f"other.{i}": torch.ones(1) for i in range(9)}, tmp_path / "model.safetensors")
    with pytest.raises(graphplan.CheckpointError) as caught:
        graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    for name in (*Plain().state_dict(), *(f"other.{i}" for i in range(9))):
        assert repr(name) in str(caught.value)


# -- reading ----------------------------------------------------------------------------------------------


def requests_of(path: Path, targets: dict[str, torch.Tensor]) -> list[Read]:
    header = read_header(path)
    return [Read(header[name], target) for name, target in targets.items()]


@pytest.mark.parametrize("chunk", [64, 4096, 1 << 20])
def test_reads_of_any_size_fill_any_target(chunk: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parallel_reads, "_CHUNK", chunk)
    state = {f"t{i}": torch.randn(1 + i % 7, 3 + i % 5) for i in range(40)}
    state["long"] = torch.randn(3000)
    save_file(state, tmp_path / "t.safetensors")
    kinds: list[Any] = [
        lambda t: torch.zeros_like(t),
        lambda t: torch.zeros_like(t, dtype=torch.float64),
        lambda t: torch.zeros_like(t).t().contiguous().t(),
        lambda t: torch.zeros(t.shape, dtype=torch.bfloat16, device="sim:0"),
        lambda t: torch.zeros(t.shape, device="sim:1"),
    ]
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        targets = {name: kinds[i % len(kinds)](t) for i, (name, t) in enumerate(state.items())}
        seen: list[int] = []
        read_into(requests_of(tmp_path / "t.safetensors", targets), seen.append)
        for name, target in targets.items():
            assert torch.equal(target.cpu(), state[name].to(target.dtype)), name
    assert sum(seen) == sum(t.numel() * 4 for t in state.values())


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: Any) -> None:
    state = {f"t{i}": torch.randn(50) for i in range(5)}
    save_file(state, tmp_path / "t.safetensors")
    pread = os.pread

    def little(file: int, buffers: Any, offset: int) -> int:
        data = pread(file, min(37, len(buffers[0])), offset)
        buffers[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "preadv", little)
    targets = {name: torch.zeros(50) for name in state}
    read_into(requests_of(tmp_path / "t.safetensors", targets), lambda _: None)
    assert all(torch.equal(targets[name], state[name]) for name in targets)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(graphplan.CheckpointError, match=r"t\.safetensors was truncated at byte"):
        read_into(requests_of(tmp_path / "t.safetensors", targets), lambda _: None)


def test_file_changed_since_opened_raises(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"t": torch.ones(100)}, path)
    requests = requests_of(path, {"t": torch.zeros(100)})
    os.truncate(path, 300)
    with pytest.raises(graphplan.CheckpointError, match="was opened"):
        read_into(requests, lambda _: None)
    path.unlink()
    with pytest.raises(graphplan.CheckpointError, match="cannot be read"):
        read_into(requests, lambda _: None)


def test_streamed_weights_are_read_into_adjacent_pages(tmp_path: Path) -> None:
    model = Plain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    pins = {"a.weight": "cpu", "b.weight": "cpu"}
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine:
        options = {"checkpoint": str(tmp_path), "pin": pins, "cpu_compute": False}
        placed = graphplan.partition(meta(), machine.max_memory, (X,), **options)
        (pages,) = placed._graphplan.streams.pages  # nothing was copied a second time
        assert pages.holds(placed.a.weight.data_ptr())
        assert pages.end - pages.start == 2 * 32 * 32 * 4
        machine.reset_peaks()
        assert largest_difference(placed(X), model(X)) < 1e-6
        loads = list(placed.plan.schedule.loads())
        assert [t.nbytes for t in machine.transfers if t.nbytes in {load.nbytes for load in loads}]


def test_cpu_weights_share_one_mapping(tmp_path: Path) -> None:
    model = Plain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    placed = graphplan.partition(meta(), {"cpu": "1GiB"}, (X,), checkpoint=str(tmp_path))
    (pages,) = placed._graphplan.streams.pages
    assert all(pages.holds(p.data_ptr()) for p in placed.parameters())
    assert pages.end - pages.start == placed.plan.peaks["cpu"].weights
    assert {p.untyped_storage().nbytes() for p in placed.parameters()} == {128, 4096}
