"""Processes of a group on this machine, started and ended one by one."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("cluster_worker.py")
# what each rank needs and takes seconds to import: a process that has it is forked for each rank
PRELOADED = (
    "graphplan.api.machines",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.export",
    "transformers.modeling_utils",
)


class Ranks:
    """The processes of one case of ``cluster_worker.py``; they end with the block."""

    def __init__(self, count: int, *arguments: str, seconds: float = 400) -> None:
        self.deadline = time.monotonic() + seconds
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        self.printed = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.processes = [
            context.Process(target=_run, args=({**shared, "RANK": str(rank)}, arguments, self._file(rank)))
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.printed.cleanup()

    def _file(self, rank: int) -> str:
        return f"{self.printed.name}/{rank}"

    def outputs(self, ranks: Sequence[int] | None = None) -> list[str]:
        """The output of these ranks, after they ended."""
        found = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].join(max(0.1, self.deadline - time.monotonic()))
            text = Path(self._file(rank)).read_text(encoding="utf-8")
            assert self.processes[rank].exitcode is not None, f"rank {rank} has not ended:\n{text}"
            found.append(text)
        return found


def _run(environment: dict[str, str], arguments: Sequence[str], printed: str) -> None:
    """Run the worker's script in one process, with its output in a file."""
    os.environ.update(environment)
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [str(WORKER), *arguments]
    runpy.run_path(str(WORKER), run_name="__main__")


def said(output: str) -> list[str]:
    """The lines that a rank printed by ``say``, without its number."""
    lines = [line.partition("] ")[2] for line in output.splitlines() if re.match(r"\[\d\] ", line)]
    return [line for line in lines if not line.startswith("-- ")]


def said_by_case(output: str) -> dict[str, str]:
    """Case -> its part of a rank's output."""
    parts = re.split(r"^\[\d\] -- (\w+)$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
