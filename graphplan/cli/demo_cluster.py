"""The demo's sentence encoder over three processes on this machine, each with a simulated accelerator.

python -m torch.distributed.run --standalone --nproc-per-node 3 -m graphplan.cli.demo_cluster

No accelerator holds the whole model. Each process holds only its own stage, sentences pass in microbatches,
and every process gets all embeddings, which are compared with those of the original encoder.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from graphplan.api.partition import partition
from graphplan.cli.demo import embed, load_encoder
from graphplan.devices.topology import Link
from graphplan.runtime.simulate.simulation import simulate

_SHARE = 0.65  # budget of each accelerator, as a share of the model's bytes; the embedding table is half
_TOLERANCE = 1e-5
_LOOPBACK = Link(5e9, 10e-6)  # between processes of one machine


def main() -> None:
    """Place, run, compare and print; exit with status 1 if results differ.

    Raises:
        GraphplanError: transformers or the model's package is not installed, or a process does not answer.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, inputs, expected, size = load_encoder()
    budget = int(size * _SHARE)
    with simulate({0: budget}) as machine:
        placed = partition(
            model,
            machines=[{0: budget}] * dist.get_world_size(),
            kwargs=inputs,
            microbatches=6,
            objective="throughput",
            network=_LOOPBACK,
            return_outputs="all",
        )
        embeddings = embed(placed, inputs)
        stage_bytes = sum(parameter.nbytes for parameter in placed.parameters())
        peak = machine.peak_bytes(0)
    difference = float((embeddings - expected).abs().max())
    if dist.get_rank() == 0:
        print(placed.plan.summary())
    dist.barrier()
    print(
        f"rank {dist.get_rank()}: {stage_bytes / 2**20:.1f} MiB of {size / 2**20:.1f} MiB of weights, peak "
        f"{peak / 2**20:.1f} MiB of {budget / 2**20:.1f} MiB, sent {sum(placed.traffic.values())} bytes, "
        f"largest difference from eager {difference:.1e}",
        flush=True,
    )
    dist.destroy_process_group()
    if difference > _TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
