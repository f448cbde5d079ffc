"""Random placement problems, small and medium, each made from its seed alone.

The graphs are chains, branches that meet again, stacks with skips, and any others, with operations of several
outputs, views, sizes, written weights, weights that several operations read, and operations that must share a
device. They are put on one to four devices: cards that are equal but for their links, mixed cards, with and
without the CPU; budgets reach from loose ones to those that nothing keeps.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import networkx as nx
from placement_api import Problem, evaluate

from graphplan.devices.topology import CPU, DISK, DeviceKey, DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.ir.schedule import Assignment

Rules = Mapping[str, frozenset[DeviceKey]]

# what the reference card does; operations are drawn in its seconds
FLOPS, BANDWIDTH = 1e12, 1e11
# accelerators: least and most, and whether the CPU is beside them
DEVICES: Mapping[str, tuple[int, int, bool]] = {
    "one card": (1, 1, False),
    "one card and the CPU": (1, 1, True),
    "equal cards": (2, 4, False),
    "equal cards and the CPU": (2, 3, True),
    "mixed cards": (2, 4, False),
    "mixed cards and the CPU": (2, 3, True),
    "the CPU": (0, 0, True),
}
# least and most of all accelerators' memory, in what the whole graph takes on one device
BUDGETS: Mapping[str, tuple[float, float]] = {
    "loose": (2.5, 6.0),
    "medium": (1.6, 2.6),
    "tight": (1.1, 1.6),
    "scarce": (0.35, 1.1),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of random problems. Shares are probabilities.

    Attributes:
        operations: fewest and most.
        cards: the most accelerators.
        weights: the most that one operation reads.
        nbytes: fewest and most bytes of a weight; values are from a quarter of these.
        seconds: fewest and most that an operation takes on the reference card.
        shared: that a weight is one that an earlier operation reads.
        special: that an operation is a view, a size, a split, or writes to a weight.
        repeated: that sizes and times are of a few levels, as in layers that are repeated.
        grouped: that operations beside these must share a device.
        pinned: that operations or weights are pinned.
        kept: that autograd keeps weights, so that none is streamed through a prefetch buffer.
        devices: kind of ``DEVICES`` -> its share of the problems.
        budgets: kind of ``BUDGETS`` -> its share of the problems.
    """

    operations: tuple[int, int]
    cards: int = 4
    weights: int = 4
    nbytes: tuple[int, int] = (2048, 4 << 20)
    seconds: tuple[float, float] = (1e-6, 2e-4)
    shared: float = 0.12
    special: float = 0.25
    repeated: float = 0.6
    grouped: float = 0.15
    pinned: float = 0.25
    kept: float = 0.04
    devices: Mapping[str, float] = field(
        default_factory=lambda: {
            "one card": 1,
            "one card and the CPU": 5,
            "equal cards": 5,
            "equal cards and the CPU": 4,
            "mixed cards": 3,
            "mixed cards and the CPU": 3,
            "the CPU": 0.5,
        }
    )
    budgets: Mapping[str, float] = field(
        default_factory=lambda: {"loose": 2, "medium": 3, "tight": 3, "scarce": 4}
    )

    def __post_init__(self) -> None:
        assert 1 <= self.operations[0] <= self.operations[1]
        assert self.devices.keys() <= DEVICES.keys()
        assert self.budgets.keys() <= BUDGETS.keys()


TINY = Parameters((2, 12), cards=3, weights=2, grouped=0.3)
MEDIUM = Parameters((13, 60))
WITH_DISK = Parameters(
    (3, 6),
    weights=2,
    nbytes=(1 << 16, 4 << 20),
    special=0.1,
    repeated=1.0,
    pinned=0.1,
    devices={
        "one card": 1,
        "one card and the CPU": 5,
        "equal cards and the CPU": 1,
        "mixed cards and the CPU": 1,
        "the CPU": 1,
    },
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem and its description: the seed, the kinds of devices and of budgets."""

    seed: int
    devices: str
    budget: str
    problem: Problem

    @property
    def kind(self) -> str:
        """Devices and budget in words."""
        return f"{self.devices}, {self.budget}"

    def __str__(self) -> str:
        return f"seed {self.seed}: {len(self.problem.graph.operations)} operations on {self.kind}"


def random_instance(seed: int, parameters: Parameters) -> Instance:
    """The problem of a seed."""
    draw = random.Random(seed)
    devices = _choose(draw, parameters.devices)
    budget = _choose(draw, parameters.budgets)
    offload = draw.random() < 0.85 or not DEVICES[devices][1]  # without accelerators there is no other way
    if budget == "scarce" and not (offload and DEVICES[devices][2]) and draw.random() < 0.75:
        budget = "tight"  # hardly anything fits otherwise
    graph = random_graph(draw, parameters)
    topology = _random_devices(draw, devices, parameters.cards)
    host: DeviceKey = draw.choice(topology.keys) if draw.random() < 0.1 else CPU
    problem = Problem(
        graph,
        topology,
        host,
        returns_to_host=draw.random() < 0.8,
        offload=offload,
        streaming=draw.random() >= parameters.kept,
    )
    problem = replace(problem, topology=_with_budgets(draw, problem, BUDGETS[budget]))
    return Instance(seed, devices, budget, _with_rules(draw, problem, parameters))


def with_disk(instance: Instance) -> Problem:
    """The problem with a disk and other budgets; the disk's links are faster or slower than the CPU's.

    A card has room for one or two of the largest weights, the CPU for at most 0.6 of all.
    """
    problem, draw = instance.problem, random.Random(f"disk of {instance.seed}")
    graph, topology = problem.graph, problem.topology
    values = _bytes_on_one(problem) - graph.weight_bytes
    largest, memory = max((w.nbytes for w in graph.weights.values()), default=0), dict[DeviceKey, int]()
    for spec in topology.devices:
        low, high, unit = (1, 2.5, largest) if spec.is_accelerator else (0, 0.6, graph.weight_bytes)
        memory[spec.key] = spec.reserve + values + int(draw.uniform(low, high) * unit)
    topology = topology.with_memory(memory)
    disk = DeviceSpec(DISK, DISK, int(graph.weight_bytes * draw.choice((0.5, 2, 2, 2))), 0.0, 0.0, 0.0)
    links = {
        (DISK, key): Link(_log_uniform(draw, 2e8, 2e11), draw.choice((0.0, 1e-6, 1e-5)))
        for key in dict.fromkeys((*topology.keys, CPU))
        if draw.random() < 0.9
    }
    topology = replace(topology, devices=(*topology.devices, disk), links={**topology.links, **links})
    return replace(problem, topology=topology, offload=True)


def restrict(problem: Problem, rules: Rules, homes: Mapping[str, DeviceKey] | None = None) -> Problem | None:
    """The same problem with further pins; None if they contradict its own.

    Args:
        problem: any problem.
        rules: operation -> devices that it may run on.
        homes: weight -> its device, where its readers run too if it is not streamable.
    """
    graph, fixed = problem.graph, dict(problem.fixed_weights)
    rules_of: dict[str, list[frozenset[DeviceKey]]] = defaultdict(list)
    for name, rule in (*problem.allowed.items(), *rules.items()):
        rules_of[name].append(rule)
    for name, key in (homes or {}).items():
        if fixed.setdefault(name, key) != key:
            return None
        if not graph.weights[name].streamable:
            for reader in graph.readers.get(name, ()):
                rules_of[reader].append(frozenset({key}))
    for group in graph.together:
        common = [rule for name in group for rule in rules_of.get(name, ())]
        rules_of.update({name: list(common) for name in group} if common else {})
    allowed = {name: frozenset.intersection(*common) for name, common in rules_of.items()}
    return replace(problem, allowed=allowed, fixed_weights=fixed) if all(allowed.values()) else None


# -- graphs -----------------------------------------------------------------------------------------------


def random_graph(draw: random.Random, parameters: Parameters) -> Graph:
    """A graph of some operations, verified."""
    graph = _GraphBuilder(draw, parameters).grow(draw.randint(*parameters.operations))
    graph.verify()
    return graph


class _GraphBuilder:
    """Builds a graph by adding operations one after the other."""

    def __init__(self, draw: random.Random, parameters: Parameters) -> None:
        self.draw, self.parameters = draw, parameters
        self.scale = draw.choice((1, 1, 8))  # larger ones meet the allocator's rules for whole MiB
        self.shape = draw.choice(("chain", "branches", "skips", "any"))
        self.most_weights = draw.randint(0 if draw.random() < 0.1 else 1, parameters.weights)
        self.shared = parameters.shared if draw.random() < 0.6 else 0.0
        self.special = parameters.special if draw.random() < 0.7 else 0.0
        self.repeated = draw.random() < parameters.repeated
        self.levels: dict[str, int] = {}  # of each kind of sizes and times
        self.drawn: dict[str, list[float]] = {}  # the levels
        self.operations: list[Operation] = []
        self.values: dict[str, Value] = {}
        self.weights: dict[str, Weight] = {}
        self.sizes: list[str] = []  # values that are numbers
        self.inputs = [self._value(f"x{i}") for i in range(draw.choice((1, 1, 1, 2, 3)))]
        self.heads = [draw.choice(self.inputs) for _ in range(draw.randint(2, 4))]
        self.made = list(self.inputs)  # tensors

    def grow(self, count: int) -> Graph:
        for index in range(count):
            special = self.draw.random() < self.special
            make = self.draw.choice((self._view, self._size, self._split, self._write)) if special else None
            (make or self._compute)(f"op{index}")
        if self.shared and self.draw.random() < 0.4:
            self._head(f"op{count}")
        if self.draw.random() < 0.05:
            self._weight()
        graph = Graph(
            self.operations, self.values.values(), self.weights.values(), self.inputs, self._outputs()
        )
        return graph.tied([*_entangled(graph), *self._groups()])

    def _outputs(self) -> list[str]:
        unread = [name for name in self.made if name not in self.inputs][-1:] or self.made[-1:]
        more = [name for name in self.made if name not in unread and self.draw.random() < 0.04]
        some = [name for name in self.weights if self.draw.random() < 0.01]
        return [*more, *unread, *some]

    def _groups(self) -> list[tuple[str, ...]]:
        names = [operation.name for operation in self.operations if not operation.host_only]
        if len(names) < 3 or self.draw.random() >= self.parameters.grouped:
            return []
        groups = []
        for _ in range(1 + len(names) // 20):
            size = self.draw.randint(2, min(4, len(names)))
            first = self.draw.randint(0, len(names) - size)
            in_a_row = self.draw.random() < 0.6
            groups.append(tuple(names[first : first + size] if in_a_row else self.draw.sample(names, size)))
        return groups

    def _draw_level(self, quantity: str, low: float, high: float) -> float:
        """Draw log-uniformly between the limits; or one of the few levels of this quantity."""
        drawn = self.drawn.setdefault(quantity, [])
        levels = self.levels.setdefault(quantity, self.draw.randint(1, 3 if quantity == "weight" else 2))
        if self.repeated and len(drawn) == levels:
            return self.draw.choice(drawn)
        drawn.append(_log_uniform(self.draw, low, high))
        return drawn[-1]

    def _bytes(self, quantity: str, divisor: int = 4) -> int:
        low, high = self.parameters.nbytes
        return self.scale * 4 * math.ceil(self._draw_level(quantity, low, high) / (4 * divisor))

    def _value(self, name: str) -> str:
        nbytes = self._bytes("value")
        self.values[name] = Value(name, nbytes, nbytes)
        return name

    def _weight(self, **facts: bool) -> str:
        name = f"w{len(self.weights)}"
        kind: Literal["constant", "parameter"] = "constant" if self.draw.random() < 0.05 else "parameter"
        nbytes = 0 if self.draw.random() < 0.02 else self._bytes("weight", 1)
        self.weights[name] = Weight(name, nbytes, (name,), kind, **facts)
        return name

    def _weights(self) -> list[str]:
        found: list[str] = []
        streamable = [name for name, weight in self.weights.items() if weight.streamable]
        for _ in range(self.draw.randint(0, self.most_weights)):
            if streamable and self.draw.random() < self.shared:
                found.append(self.draw.choice(streamable))
            else:
                found.append(self._weight(movable=self.draw.random() >= 0.02))
        return list(dict.fromkeys(found))

    def _reads(self) -> list[str]:
        """The tensors that the next operation reads."""
        draw, made = self.draw, self.made
        if self.shape == "chain":
            return [made[-1]]
        if self.shape == "branches":
            branch = draw.randrange(len(self.heads))
            joined = draw.sample(self.heads, 2) if draw.random() < 0.15 else [self.heads[branch]]
            return list(dict.fromkeys(joined))
        if self.shape == "skips":
            return list(dict.fromkeys([made[-1], *(draw.sample(made, 1) if draw.random() < 0.3 else ())]))
        return draw.sample(made, min(len(made), draw.randint(1, 3)))

    def _add(self, operation: Operation) -> None:
        """An operation whose first output goes on where its first input was."""
        self.operations.append(operation)
        tensors = [name for name in operation.outputs if self.values[name].is_tensor]
        if not tensors:
            return
        self.made += tensors
        read = [name for name in operation.inputs if name in self.values]
        self.heads = [tensors[0] if head in read else head for head in self.heads]

    def _work(self) -> tuple[int, int]:
        """FLOP and bytes of an operation, which is bound by either."""
        low, high = self.parameters.seconds
        computing, reading = self._draw_level("FLOP", low, high), self._draw_level("bytes", low, high)
        return int(computing * FLOPS), int(reading * BANDWIDTH)

    def _workspace(self) -> dict[str, int]:
        if self.draw.random() < 0.85:
            return {}
        return {kind: self._bytes("workspace") for kind in ("sim", "cuda", CPU) if self.draw.random() < 0.6}

    def _compute(self, name: str) -> None:
        reads = [*self._reads(), *self._weights()]
        if self.sizes and self.draw.random() < 0.3:
            reads.append(self.draw.choice(self.sizes))
        flops, nbytes = self._work()
        made = (self._value(f"{name}.0"),)
        self._add(Operation(name, "f", tuple(reads), made, (), flops, nbytes, self._workspace()))

    def _head(self, name: str) -> None:
        """A last operation that also reads the largest of the first weights, as for a tied embedding."""
        first = [self.weights[name] for name in [*self.weights][:4] if self.weights[name].streamable]
        tied = [max(first, key=lambda weight: weight.nbytes).name] if first else []
        flops, nbytes = self._work()
        self._add(
            Operation(name, "head", (*self._reads(), *tied), (self._value(f"{name}.0"),), (), flops, nbytes)
        )

    def _split(self, name: str) -> None:
        """Several outputs, some of which are views."""
        read = self._reads()[0]
        made = [self._value(f"{name}.{i}") for i in range(self.draw.randint(2, 3))]
        if self.draw.random() < 0.5:
            made = [self._alias(value, read) for value in made]
        flops, nbytes = self._work()
        reads = (read, *self._weights()[:1])
        self._add(Operation(name, "split", reads, tuple(made), (), flops, nbytes))

    def _view(self, name: str) -> None:
        """A view of a value, or sometimes of a weight."""
        weight = self._weight() if self.draw.random() < 0.15 else None
        base = weight or self._reads()[0]
        self._add(Operation(name, "view", (base,), (self._alias(f"{name}.0", base),)))

    def _alias(self, name: str, base: str) -> str:
        nbytes = self.weights[base].nbytes if base in self.weights else self.values[base].copy_bytes
        self.values[name] = Value(name, 0, nbytes, base)
        return name

    def _size(self, name: str) -> None:
        self.values[f"{name}.0"] = Value(f"{name}.0", is_tensor=False)
        self.sizes.append(f"{name}.0")
        self._add(Operation(name, "size", (self.draw.choice(self.made),), (f"{name}.0",), host_only=True))

    def _write(self, name: str) -> None:
        """A write to statistics of a normalisation, or sometimes to an input."""
        reads, written = self._reads(), [name for name, weight in self.weights.items() if weight.mutated]
        if self.draw.random() < 0.1:
            target = self.draw.choice(self.inputs)
        elif written and self.draw.random() < 0.2:
            target = self.draw.choice(written)
        else:
            target = self._weight(mutated=True)
        inputs = tuple(dict.fromkeys([*reads, target, *self._weights()]))
        flops, nbytes = self._work()
        made = (self._value(f"{name}.0"),)
        self._add(Operation(name, "norm", inputs, made, (target,), flops, nbytes, self._workspace()))


def _entangled(graph: Graph) -> Iterable[tuple[str, ...]]:
    """The operations on a written weight or input, which share a device."""
    for root in {graph.root(name): None for op in graph.operations.values() for name in op.mutates}:
        yield tuple(
            operation.name
            for operation in graph.operations.values()
            if any(graph.root(name) == root for name in (*operation.inputs, *operation.outputs))
            and not operation.host_only
        )


# -- devices ----------------------------------------------------------------------------------------------


def _choose(draw: random.Random, shares: Mapping[str, float]) -> str:
    return draw.choices(list(shares), list(shares.values()))[0]


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _random_devices(draw: random.Random, kind: str, limit: int) -> Topology:
    """GPUs and links; their memory is chosen later."""
    low, high, with_cpu = DEVICES[kind]
    count = draw.randint(low, max(low, min(high, limit)))
    device = draw.choice(("sim", "cuda"))
    overhead = draw.choice((0.0, 4e-6))
    specs = []
    for index in range(count):
        mixed = kind.startswith("mixed")
        flops, bandwidth = (draw.uniform(0.3, 3.0) if mixed else 1.0 for _ in range(2))
        specs.append(
            DeviceSpec(index, f"{device}:{index}", 0, flops * FLOPS, bandwidth * BANDWIDTH, overhead)
        )
    if with_cpu:
        speed = _log_uniform(draw, 0.01, 0.7)
        specs.append(DeviceSpec(CPU, CPU, 0, speed * FLOPS, speed * BANDWIDTH, 20e-6))
        if draw.random() < 0.2:
            specs.insert(0, specs.pop())
    return Topology(tuple(specs), _random_links(draw, [*range(count), CPU]), _random_link(draw))


def _random_link(draw: random.Random) -> Link:
    return Link(_log_uniform(draw, 1e9, 5e10), draw.choice((0.0, 2e-6, 1e-5, 2e-5)))


def _random_links(draw: random.Random, keys: list[DeviceKey]) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Links: all equal, some pairs faster, or each its own, in one direction or both."""
    kind = draw.choice(("alike", "pairs", "pairs", "own", "one way"))
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {}
    slow, fast = _random_link(draw), Link(draw.choice((1e11, 3e11)), draw.choice((0.0, 2e-6)))
    to_cpu = _random_link(draw)
    for first in keys:
        for second in keys:
            if first == second or ((second, first) in links and kind != "one way"):
                continue
            if CPU in (first, second) and kind in ("alike", "pairs"):
                links[first, second] = to_cpu
            elif kind == "pairs":
                links[first, second] = fast if draw.random() < 0.4 else slow
            elif kind != "alike":
                links[first, second] = _random_link(draw)
    return links


def _with_budgets(draw: random.Random, problem: Problem, share: tuple[float, float]) -> Topology:
    """Budgets as a share of the peak with the whole graph on one device."""
    topology = problem.topology
    whole = _bytes_on_one(problem)
    cards = [spec for spec in topology.devices if spec.is_accelerator]
    parts = [1.0] * len(cards)
    if draw.random() < 0.4:
        parts = [draw.uniform(0.5, 1.5) for _ in cards]
    # copies of values, and weights that are not cut
    total = whole * draw.uniform(*share) * (1 + 0.15 * max(0, len(cards) - 1))
    memory: dict[DeviceKey, int] = {
        spec.key: int(total * part / sum(parts)) for spec, part in zip(cards, parts, strict=True)
    }
    if CPU in topology:
        ample = cards and draw.random() < 0.8
        scarce = draw.uniform(0.4, 1.3) if cards else draw.uniform(0.8, 1.6)
        memory[CPU] = int(whole * (3 if ample else scarce))
    reserve = {key: int(nbytes * draw.uniform(0, 0.1)) for key, nbytes in memory.items()}
    if draw.random() < 0.8:
        reserve = dict.fromkeys(memory, 0)
    return replace(
        topology,
        devices=tuple(
            replace(spec, memory=memory[spec.key], reserve=reserve[spec.key]) for spec in topology.devices
        ),
    )


def _bytes_on_one(problem: Problem) -> int:
    """The peak where one device, the first, has everything."""
    graph, spec = problem.graph, replace(problem.topology.devices[0], memory=1 << 60)
    alone = replace(problem, topology=replace(problem.topology, devices=(spec,)))
    assignment = Assignment(dict.fromkeys(graph.operations, spec.key), dict.fromkeys(graph.weights, spec.key))
    return evaluate(alone, assignment).peak(spec.key).nbytes


def _with_rules(draw: random.Random, problem: Problem, parameters: Parameters) -> Problem:
    """Pins, and no computing on the CPU where that is not allowed."""
    graph, topology = problem.graph, problem.topology
    cards = frozenset(spec.key for spec in topology.devices if spec.is_accelerator)
    if cards and CPU in topology and (not problem.offload or draw.random() < 0.2):
        problem = replace(problem, allowed=dict.fromkeys(graph.operations, cards))
    keys = topology.keys if problem.offload or not cards else tuple(sorted(cards))
    for name in graph.operations if draw.random() < parameters.pinned else ():
        if draw.random() < 2 / len(graph.operations):
            rule = frozenset(draw.sample(keys, draw.randint(1, max(1, len(keys) - 1))))
            problem = restrict(problem, {name: rule}) or problem
    for name in graph.weights if draw.random() < parameters.pinned else ():
        if draw.random() < 1.5 / len(graph.weights):
            problem = restrict(problem, {}, {name: draw.choice(keys)}) or problem
    return problem


def groups_of(graph: Graph) -> list[tuple[str, ...]]:
    """The operations that are placed together, in order; those that only make sizes are left out."""
    order = {name: index for index, name in enumerate(graph.operations)}
    ties: nx.Graph[str] = nx.Graph()
    ties.add_nodes_from(name for name, operation in graph.operations.items() if not operation.host_only)
    for group in graph.together:
        nx.add_path(ties, sorted(group))
    parts = (sorted(part, key=order.__getitem__) for part in nx.connected_components(ties))
    return sorted((tuple(part) for part in parts), key=lambda part: order[part[0]])
