"""Processes of a group on this machine, started and ended one by one.

All are forked from one server that has imported what they need: that takes longer than most cases.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

HELPERS = Path(__file__).parent
WORKER = HELPERS / "cluster_worker.py"
IMPORTS = [
    "cluster_worker",
    "architectures",
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.pipelining",
    "transformers.exporters",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
]
# what the server is started with, before it imports anything
SERVER = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": os.pathsep.join((str(HELPERS), str(HELPERS.parents[1]))),
}


class Ranks:
    """The processes of one case of ``cluster_worker.py``; they end with the block."""

    def __init__(self, count: int, *arguments: str, seconds: float = 400) -> None:
        self.deadline = time.monotonic() + seconds
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, str(rank)) for rank in range(count)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self.processes: list[ForkServerProcess] = []
        with patch.dict(os.environ, SERVER):
            for rank, file in enumerate(self.files):
                shared = {**group, "RANK": str(rank)}
                self.processes.append(context.Process(target=_run, args=(shared, str(file), arguments)))
                self.processes[-1].start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.folder.cleanup()

    def outputs(self, ranks: Sequence[int] | None = None) -> list[str]:
        """What these ranks printed, once they have ended."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        for rank in chosen:
            self.processes[rank].join(timeout=max(0.1, self.deadline - time.monotonic()))
            if self.processes[rank].exitcode is None:
                raise TimeoutError(f"rank {rank} has not ended: {self.files[rank].read_text()[-2000:]}")
        return [self.files[rank].read_text() for rank in chosen]


def _run(environment: dict[str, str], file: str, arguments: Sequence[str]) -> None:
    """One rank: all that it prints goes to a file."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    import cluster_worker

    cluster_worker.main()


def said(output: str) -> list[str]:
    """The lines that a rank printed by ``say``, without its number."""
    lines = [line.partition("] ")[2] for line in output.splitlines() if re.match(r"\[\d\] ", line)]
    return [line for line in lines if not line.startswith("-- ")]


def said_by_case(output: str) -> dict[str, str]:
    """Case -> its part of what a rank printed."""
    parts = re.split(r"^\[\d\] -- (\w+)$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
