"""Planning time for many machines: Llama 405B on meta over 64 machines of 8 devices.

python benchmarks/cluster_planning.py

Microbatches of one row need a trace of their own, since transformers builds other masks for them; larger ones
share the trace of the batch. Seconds are processor time, which other load on the machine hardly affects.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import transformers as hf
from models import LLAMA_70B
from report import parser_of, table, write

import graphplan

DEVICES = 8  # of each machine; together they have room for the model some ten times
ROWS, MICROBATCHES = 16, 8
LLAMA_405B = partial(
    LLAMA_70B, hidden_size=16384, intermediate_size=53248, num_attention_heads=128, vocab_size=128256
)


def row(layers: int, machines: int, objective: Any) -> dict[str, Any]:
    """Return the figures of one plan."""
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(LLAMA_405B(num_hidden_layers=layers)).bfloat16().eval()
    ids = torch.zeros(ROWS, 512, dtype=torch.int64, device="meta")
    start = time.process_time()
    plan = graphplan.plan(
        model,
        machines=[dict.fromkeys(range(DEVICES), "16GiB")] * machines,
        kwargs={"input_ids": ids, "use_cache": False},
        microbatches=MICROBATCHES,
        objective=objective,
    )
    seconds = time.process_time() - start
    return {
        "objective": objective,
        "layers": layers,
        "machines": machines,
        "rows": ROWS,
        "stages": len(plan.stages),
        "gap": plan.gap,
        "seconds": seconds,
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    row(1, 2, "throughput")  # imports and first-use caches
    rows = [row(126, 64, kind) for kind in ("throughput", "latency")]
    print(table(rows))
    print(f"wrote {write('cluster_planning', {'devices': DEVICES, 'rows': rows})}")


if __name__ == "__main__":
    main()
