"""A second set of instances for the placement benchmark, drawn from one seed.

python benchmarks/second_set.py --seed 7

The planner is developed on the first set (``instances.py``). The second one shows what it does on
graphs that it was not tuned on: its seed is chosen after the planner's last change. 16 instances of
100 to 2,000 operations: six networks of ``networks.py`` with random sizes, and ten random graphs, on one
to eight cards. Eight instances have card memory for 35 to 100 % of the weights and use the CPU; eight
have 105 to 130 %, two of them with the CPU. The script prints what was drawn.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from instances import GIB, HOST, Card, Instance, Speed, devices
from random_networks import SHAPES
from report import table

from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.ir.graph import Graph

_SLACK = 8 << 20  # bytes on each card beside activations, for what the allocator rounds up
_OFFLOADED = (1, 1, 2, 2, 3, 4, 6, 8)  # cards of the instances that hold less than the weights
_FITTING = (2, 2, 3, 3, 4, 5, 7, 8)  # cards of those that hold all
_SMALLEST, _LARGEST = 115, 1800  # operations aimed at; a graph has up to a tenth more or less


@dataclass(frozen=True, slots=True)
class Draw:
    """What is settled for an instance before its own random choices.

    Attributes:
        name: key of the instance.
        shape: key of ``SHAPES``.
        seed: of the instance's own choices.
        operations: how many to aim at.
        cards: number of accelerators.
        share: card memory beside activations, as a share of the weights.
        cpu: whether the CPU has a budget.
    """

    name: str
    shape: str
    seed: int
    operations: int
    cards: int
    share: float
    cpu: bool


def second_set(seed: int) -> dict[str, Callable[[], Instance]]:
    """Name -> what makes the instance. The names begin with the seed."""
    return {draw.name: partial(_instance, draw) for draw in draws(seed)}


def draws(seed: int) -> list[Draw]:
    """The instances in order; sizes and shares are spread evenly over their ranges."""
    random = Random(seed)
    shapes = [*SHAPES, *_random_shapes(len(_OFFLOADED) + len(_FITTING) - len(SHAPES))]
    sizes = _spread(random, len(shapes), 0.0, 1.0)
    shares = [*_spread(random, len(_OFFLOADED), 0.35, 1.0), *_spread(random, len(_FITTING), 1.05, 1.3)]
    random.shuffle(shapes)
    made = []
    for i, (shape, size, share, cards) in enumerate(
        zip(shapes, sizes, shares, (*_OFFLOADED, *_FITTING), strict=True)
    ):
        operations = round(_SMALLEST * (_LARGEST / _SMALLEST) ** size)
        cpu = i < len(_OFFLOADED) + 2
        name = f"{seed}.{i + 1:02}-{shape}-{cards}{'-cpu' if cpu else ''}"
        made.append(Draw(name, shape, random.getrandbits(64), operations, cards, share, cpu))
    return made


def _random_shapes(count: int) -> list[str]:
    """The random graphs once more each, until there are ``count``."""
    return list(itertools.islice(itertools.cycle(("irregular", "mixture", "nest")), count))


def _spread(random: Random, count: int, low: float, high: float) -> list[float]:
    """One number from each of ``count`` equal intervals, shuffled."""
    found = [low + (high - low) * (i + random.random()) / count for i in range(count)]
    random.shuffle(found)
    return found


def _instance(draw: Draw) -> Instance:
    random = Random(draw.seed)
    graph = SHAPES[draw.shape](random, draw.operations)
    return Instance(draw.name, graph, _topology(random, draw, graph))


# -- devices ---------------------------------------------------------------------------------------


def _topology(random: Random, draw: Draw, graph: Graph) -> Topology:
    kinds = min(draw.cards, random.choice((1, 2, draw.cards)))
    speeds = [_speed(random) for _ in range(kinds)]
    chosen = [speeds[i % kinds] for i in range(draw.cards)]
    parts = [1.0 if kinds == 1 else random.uniform(0.5, 1.5) for _ in chosen]
    sizes = [draw.share * graph.weight_bytes * part / sum(parts) for part in parts]
    if not draw.cpu:
        fullest = sizes.index(max(sizes))
        sizes[fullest] = max(sizes[fullest], 1.01 * _largest_operation(graph))
    activations = round(1.5 * live_bytes(graph)) + _SLACK
    cards = [Card(speed, (size + activations) / GIB) for speed, size in zip(chosen, sizes, strict=True)]
    factor = 2 ** random.uniform(-1, 1)
    host = Speed(factor * HOST.flops, factor * HOST.bandwidth)
    cpu_gib = 4 * (graph.weight_bytes + activations) / GIB if draw.cpu else 0
    return replace(devices(cards, cpu_gib, host), links=_links(random, draw.cards))


def _speed(random: Random) -> Speed:
    flops = 20e12 * 30 ** random.random()
    return Speed(flops, flops / random.uniform(80, 250))


def _links(random: Random, cards: int) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Equal links, a random one for each pair, or two groups of cards with fast links inside."""
    kind = random.choice(("equal", "pairs", "pairs", "groups"))
    if kind == "equal":
        return {}
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {
        (CPU, i): Link(random.uniform(6e9, 28e9), random.uniform(5e-6, 30e-6)) for i in range(cards)
    }
    near = Link(random.uniform(50e9, 300e9), random.uniform(3e-6, 10e-6))
    far = Link(random.uniform(5e9, 25e9), random.uniform(10e-6, 40e-6))
    for pair in itertools.combinations(range(cards), 2):
        together = (pair[0] < cards / 2) == (pair[1] < cards / 2)
        own = Link(5e9 * 20 ** random.random(), random.uniform(5e-6, 30e-6))
        links[pair] = own if kind == "pairs" else near if together else far
    return links


def live_bytes(graph: Graph) -> int:
    """The most bytes of inputs and values that are alive at once, in the order of the graph."""
    last = {name: i for i, o in enumerate(graph.operations.values()) for name in (*o.inputs, *o.outputs)}
    last.update(dict.fromkeys(graph.outputs, len(graph.operations)))
    live = {name: graph.values[name].nbytes for name in graph.inputs}
    peak = 0
    for i, operation in enumerate(graph.operations.values()):
        live.update({name: graph.values[name].nbytes for name in operation.outputs})
        peak = max(peak, sum(live.values()))
        for name in (*operation.inputs, *operation.outputs):
            if last[name] == i:
                live.pop(name, None)
    return peak


def _largest_operation(graph: Graph) -> int:
    """Bytes of the weights of the operation that reads most."""
    weights = graph.weights
    return max(sum(weights[n].nbytes for n in o.inputs if n in weights) for o in graph.operations.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    header = ["instance", "operations", "weights GB", "shared", "cards / weights", "GB", "links"]
    print(table(header, [_row(draw) for draw in draws(options.seed)]))


def _row(draw: Draw) -> list[str]:
    instance = _instance(draw)
    graph, topology = instance.graph, instance.topology
    shared = sum(len(graph.consumers[name]) > 1 for name in graph.weights)
    memory = "+".join(f"{spec.memory / 1e9:.2f}" for spec in topology.devices if spec.is_accelerator)
    row = [draw.name, str(len(graph.operations)), f"{graph.weight_bytes / 1e9:.2f}", str(shared)]
    return [*row, f"{draw.share:.2f}", memory, str(len(set(topology.links.values())) or 1)]


if __name__ == "__main__":
    main()
