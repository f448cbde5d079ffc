"""A file is there as a whole, or as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from graphplan.whole_files import write_whole


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "first")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, "second")
    assert str(caught.value) == f"[Errno 28] No space left on device: {str(path)!r}"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_links_modes_and_pipes_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link"
    write_whole(path, "first")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, b"second")
    assert link.is_symlink()
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    reading, writing = os.pipe()
    write_whole(f"/dev/fd/{writing}", "third")
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "third"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")
