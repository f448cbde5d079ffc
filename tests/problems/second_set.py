"""A second set of instances for the placement benchmark, drawn from one seed.

python tests/problems/second_set.py --seed 7 [options of benchmarks/placement.py]

The planner is developed on the first set (``instances.py``). The second one shows what it does on
graphs that it was not tuned on: its seed is chosen after the planner's last change. 16 instances of
100 to 2,000 operations: six networks of ``networks.py`` with random sizes, and ten random graphs, on one
to eight cards. Eight instances have card memory for 35 to 100 % of the weights and use the CPU; eight
have 105 to 130 %, two of them with the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import placement
from baselines import peak_activation
from instances import GIB, HOST, Card, Instance, Speed, devices
from random_networks import NETWORKS, SHAPES

from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.ir.graph import Graph

_SLACK = 8 << 20  # bytes on each card beside activations, for what the allocator rounds up
_OFFLOADED = (1, 1, 2, 2, 3, 4, 6, 8)  # cards of the instances that hold less than the weights
_FITTING = (2, 2, 3, 3, 4, 5, 7, 8)  # cards of those that hold all
_SMALLEST, _LARGEST = 115, 1800  # operations aimed at; a graph has up to a tenth more or less


@dataclass(frozen=True, slots=True)
class Draw:
    """Properties of an instance that are fixed before its own random choices.

    Attributes:
        name: key of the instance; it begins with the seed of the set.
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

    def instance(self) -> Instance:
        """Create the instance."""
        random = Random(self.seed)
        graph = SHAPES[self.shape](random, self.operations)
        return Instance(self.name, graph, _topology(random, self, graph))


def second_set(seed: int) -> dict[str, Callable[[], Instance]]:
    """Name -> function that creates the instance."""
    return {draw.name: draw.instance for draw in draws(seed)}


def draws(seed: int) -> list[Draw]:
    """The instances in order; sizes and shares are spread evenly over their ranges."""
    random, counts = Random(seed), (*_OFFLOADED, *_FITTING)
    shapes = [*NETWORKS, *["random"] * (len(counts) - len(NETWORKS))]
    sizes = _spread(random, len(shapes), 0.0, 1.0)
    shares = [*_spread(random, len(_OFFLOADED), 0.35, 1.0), *_spread(random, len(_FITTING), 1.05, 1.3)]
    random.shuffle(shapes)
    made = []
    for i, (shape, size, share, cards) in enumerate(zip(shapes, sizes, shares, counts, strict=True)):
        operations = round(_SMALLEST * (_LARGEST / _SMALLEST) ** size)
        cpu = i < len(_OFFLOADED) + 2
        name = f"{seed}.{i + 1:02}-{shape}-{cards}{'-cpu' if cpu else ''}"
        made.append(Draw(name, shape, random.getrandbits(64), operations, cards, share, cpu))
    return made


def _spread(random: Random, count: int, low: float, high: float) -> list[float]:
    """One number from each of ``count`` equal intervals, shuffled."""
    found = [low + (high - low) * (i + random.random()) / count for i in range(count)]
    random.shuffle(found)
    return found


def _topology(random: Random, draw: Draw, graph: Graph) -> Topology:
    kinds = min(draw.cards, random.choice((1, 2, draw.cards)))
    speeds = [_speed(random) for _ in range(kinds)]
    chosen = [speeds[i % kinds] for i in range(draw.cards)]
    parts = [1.0 if kinds == 1 else random.uniform(0.5, 1.5) for _ in chosen]
    sizes = [draw.share * graph.weight_bytes * part / sum(parts) for part in parts]
    if not draw.cpu:
        fullest = sizes.index(max(sizes))
        sizes[fullest] = max(sizes[fullest], 1.01 * _largest_operation(graph))
    alone = Instance(draw.name, graph, devices([Card(chosen[0], 0)]))
    activations = round(1.5 * peak_activation(alone.problem)) + _SLACK
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


def _largest_operation(graph: Graph) -> int:
    """Most bytes of weights that one operation reads."""
    weights = graph.weights
    return max(sum(weights[n].nbytes for n in o.inputs if n in weights) for o in graph.operations.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("--seed", type=int, required=True)
    options, words = parser.parse_known_args()
    placement.main(second_set(options.seed), words)


if __name__ == "__main__":
    main()
