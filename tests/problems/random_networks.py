"""Random graphs of about a given number of operations, for the second set of instances.

Six shapes are networks of ``networks.py`` with random sizes. In the seventh every operation is random:
none to four weights of its own, perhaps a weight that an earlier operation reads too, and a random size
of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from network import ELEMENT, Network
from networks import clip, llama, moe, t5, towers, unet

from graphplan.ir.graph import Graph

# -- networks of random sizes ----------------------------------------------------------------------


def _stack(random: Random, operations: int) -> Graph:
    wide = 128 * random.randint(4, 64)
    inner = 128 * round(wide * random.uniform(2.5, 4) / 128)
    vocabulary, rows = random.choice((32000, 64000, 128256)), random.choice((1, 16, 128, 512, 1024))
    keys = wide // random.choice((1, 2, 4, 8))
    return llama(operations // 15, wide, inner, keys, vocabulary, rows, tied=random.random() < 0.5)


def _encoder_decoder(random: Random, operations: int) -> Graph:
    wide = 64 * random.randint(8, 40)
    inner = 64 * round(wide * random.uniform(2, 4) / 64)
    return t5(operations // 26, wide, inner, 32128, random.choice((128, 512)), random.choice((1, 32, 128)))


def _two_towers(random: Random, operations: int) -> Graph:
    layers = operations // 7
    first = round(layers * random.uniform(0.3, 0.7))
    widths = [64 * random.randint(8, 32) for _ in range(2)]
    return clip((first, widths[0], random.choice((50, 257, 577))), (layers - first, widths[1], 77))


def _branches(random: Random, operations: int) -> Graph:
    depths = _parts(random, operations // 3, random.randint(3, 12))
    return towers([128 * random.randint(2, 20) for _ in depths], depths, random.choice((32, 256)))


def _experts(random: Random, operations: int) -> Graph:
    experts = random.choice([n for n in (8, 16, 32, 64) if 2 * n < operations])
    wide, inner = 256 * random.randint(2, 16), 128 * random.randint(4, 24)
    layers, active = operations // (experts + 6), random.choice((2, 4, 6))
    vocabulary, rows = random.choice((32000, 102400)), random.choice((1, 64, 256))
    more = {"shared": random.choice((0, inner)), "dense": random.choice((0, 4 * inner))}
    return moe(layers, wide, inner, experts, active, vocabulary, rows, tied=random.random() < 0.5, **more)


def _unet(random: Random, operations: int) -> Graph:
    levels = random.randint(2, 4)
    blocks = max(2, round((operations / 6 - 1 + levels) / (2 * levels)))
    return unet(levels, 64 * random.randint(1, 6), 8 * 2**levels, blocks, random.choice((1, 2, 4)))


def _parts(random: Random, total: int, count: int) -> list[int]:
    """``count`` different lengths that sum to about ``total``."""
    parts = [random.uniform(0.3, 1.7) for _ in range(count)]
    return [max(1, round(total * part / sum(parts))) for part in parts]


# -- random graphs ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes random operations into a network, section by section.

    Attributes:
        random: makes the choices.
        rows: of activations.
        wide: usual width of activations; weights have about its square in elements.
        shared: probability that an operation reads a weight of an earlier one.
        block: operations of one block of the module tree.
    """

    random: Random
    rows: int
    wide: int
    shared: float
    block: int
    net: Network = field(default_factory=Network)

    def operation(self, inputs: Sequence[str], scale: float = 1.0) -> str:
        """An operation with none to four weights of its own; ``scale``: of what it makes."""
        random, count = self.random, len(self.net.operations)
        numbers = random.choices(range(5), (4, 8, 3, 1, 1))[0]
        weights = {f"w{i}": ELEMENT * int(self.wide**2 * 2 ** random.uniform(-3, 2)) for i in range(numbers)}
        earlier = list(self.net.weights)
        tied = random.choice(earlier) if earlier and random.random() < self.shared else ""
        read = sum(weights.values()) + (self.net.weights[tied].nbytes if tied else 0)
        return self.net.add(
            f"layers.{count // self.block}.part{count % self.block}",
            "linear" if read else "mul",
            list(dict.fromkeys(inputs)),
            max(ELEMENT, int(self.rows * self.wide * ELEMENT * scale * 2 ** random.uniform(-1.5, 1.5))),
            weights=weights,
            tied=tied,
            flops=2 * self.rows * read / ELEMENT * random.uniform(0.5, 2),
        )

    def chain(self, x: str, operations: int) -> str:
        """One after the other; one in five reads an earlier value of the chain too."""
        made = [x]
        for _ in range(operations):
            skip = [self.random.choice(made[-12:])] if self.random.random() < 0.2 else []
            made.append(self.operation([made[-1], *skip]))
        return made[-1]

    def branches(self, x: str, operations: int) -> str:
        """Two to six chains of different length that are joined."""
        lengths = _parts(self.random, operations - 1, self.random.randint(2, 6))
        return self.operation([self.chain(x, length) for length in lengths])

    def experts(self, x: str, operations: int) -> str:
        """A router, experts that read its result, and their sum."""
        router = self.operation([x])
        count = max(1, operations - 2)
        return self.operation([x, router, *(self.operation([x, router], 1 / count) for _ in range(count))])

    def nest(self, x: str, operations: int) -> str:
        """Values become smaller; each of the second half reads its counterpart of the first too."""
        half = max(1, operations // 2)
        scales = [4.0 ** (1 - 2 * i / half) for i in range(half)]
        skips = []
        for scale in scales:
            x = self.operation([x], scale)
            skips.append(x)
        for scale, skip in zip(reversed(scales), reversed(skips), strict=True):
            x = self.operation([x, skip], scale)
        return x

    def irregular(self, x: str, operations: int) -> str:
        """Each operation reads one to three of the latest values; what is left over is joined."""
        made, unread = [x], [x]
        for _ in range(operations - 1):
            reach = made[-self.random.choice((2, 4, 16)) :]
            inputs = self.random.sample(reach, min(len(reach), self.random.choice((1, 1, 2, 3))))
            if len(unread) > 8:
                inputs.append(unread[0])
            made.append(self.operation(inputs))
            unread = [name for name in (*unread, made[-1]) if name not in inputs]
        return self.operation(unread)


def _random(random: Random, operations: int) -> Graph:
    """Sections of random length, one after the other, of one to five of the kinds."""
    rows, wide = random.choice((1, 64, 512, 4096)), 64 * round(2 ** random.uniform(3, 6))
    writer = _Writer(random, rows, wide, random.choice((0.0, 0.01, 0.05)), random.randint(3, 8))
    kinds = (writer.chain, writer.branches, writer.experts, writer.nest, writer.irregular)
    chosen = random.sample(kinds, random.randint(1, len(kinds)))
    x = writer.net.input("features", rows * wide * ELEMENT)
    while (left := operations - len(writer.net.operations)) > 0:
        x = random.choice(chosen)(x, min(left, random.randint(8, 120)))
    return writer.net.graph([x])


NETWORKS: dict[str, Callable[[Random, int], Graph]] = {
    "stack": _stack,
    "encoder-decoder": _encoder_decoder,
    "two-towers": _two_towers,
    "branches": _branches,
    "experts": _experts,
    "unet": _unet,
}
SHAPES = {**NETWORKS, "random": _random}
