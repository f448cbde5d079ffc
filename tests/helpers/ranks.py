"""Processes of a group on this machine, started and ended one by one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("cluster_worker.py")


class Ranks:
    """The processes of one case of ``cluster_worker.py``; they end with the block."""

    def __init__(self, count: int, *arguments: str, seconds: float = 400) -> None:
        self.deadline = time.monotonic() + seconds
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), *arguments],
                env={**os.environ, **shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def outputs(self, ranks: Sequence[int] | None = None) -> list[str]:
        """What these ranks printed, once they have ended."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [
            self.processes[rank].communicate(timeout=max(0.1, self.deadline - time.monotonic()))[0]
            for rank in chosen
        ]


def said(output: str) -> list[str]:
    """The lines that a rank printed by ``say``, without its number."""
    lines = [line.partition("] ")[2] for line in output.splitlines() if re.match(r"\[\d\] ", line)]
    return [line for line in lines if not line.startswith("-- ")]


def said_by_case(output: str) -> dict[str, str]:
    """Case -> its part of what a rank printed."""
    parts = re.split(r"^\[\d\] -- (\w+)$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
