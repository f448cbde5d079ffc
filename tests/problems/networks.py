"""Dataflow graphs of well-known networks, for the instances of the placement benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from network import ELEMENT, ID, Network

from graphplan.ir.graph import Graph


def llama(
    layers: int, wide: int, inner: int, heads_wide: int, vocabulary: int, rows: int, *, tied: bool = True
) -> Graph:
    """A Llama reading ``rows`` tokens and scoring the last; ``heads_wide`` is the width of keys."""
    net = Network()
    x = net.embedding("embed", net.input("ids", rows * ID), rows, vocabulary, wide)
    for i in range(layers):
        x = _llama_layer(net, f"layers.{i}", x, rows, wide, inner, heads_wide)
    x = net.norm("norm", x, rows, wide)
    return net.graph([net.head(x, 1, wide, vocabulary, "embed.weight" if tied else "")])


def _llama_layer(net: Network, at: str, x: str, rows: int, wide: int, inner: int, keys_wide: int) -> str:
    size, keys = rows * wide * ELEMENT, rows * keys_wide * ELEMENT
    normed = net.norm(f"{at}.input_norm", x, rows, wide)
    q = net.linear(f"{at}.attn.q", normed, rows, wide, wide)
    k = net.linear(f"{at}.attn.k", normed, rows, wide, keys_wide)
    v = net.linear(f"{at}.attn.v", normed, rows, wide, keys_wide)
    q = net.add(f"{at}.attn", "rotate_query", [q], size)
    k = net.add(f"{at}.attn", "rotate_key", [k], keys)
    mixed = net.add(f"{at}.attn", "attention", [q, k, v], size, flops=4 * rows * rows * wide)
    attended = net.linear(f"{at}.attn.o", mixed, rows, wide, wide)
    x = net.add(at, "add", [x, attended], size)
    normed = net.norm(f"{at}.post_norm", x, rows, wide)
    gate = net.linear(f"{at}.mlp.gate", normed, rows, wide, inner)
    up = net.linear(f"{at}.mlp.up", normed, rows, wide, inner)
    product = net.add(f"{at}.mlp", "mul", [gate, up], rows * inner * ELEMENT)
    down = net.linear(f"{at}.mlp.down", product, rows, inner, wide)
    return net.add(at, "add_mlp", [x, down], size)


def t5(layers: int, wide: int, inner: int, vocabulary: int, rows: int, decoded: int) -> Graph:
    """An encoder of ``rows`` tokens, and a decoder of ``decoded`` that reads its result in every layer."""
    net = Network()
    x = net.embedding("shared", net.input("ids", rows * ID), rows, vocabulary, wide)
    for i in range(layers):
        at = f"encoder.layers.{i}"
        x = _t5_attention(net, at, "self", x, "", rows, rows, wide)
        x = _t5_mlp(net, at, x, rows, wide, inner)
    encoded = net.norm("encoder.norm", x, rows, wide)
    ids = net.input("decoder_ids", decoded * ID)
    x = net.embedding("decoder.embed", ids, decoded, vocabulary, wide, "shared.weight")
    for i in range(layers):
        at = f"decoder.layers.{i}"
        x = _t5_attention(net, at, "self", x, "", decoded, decoded, wide)
        x = _t5_attention(net, at, "cross", x, encoded, decoded, rows, wide)
        x = _t5_mlp(net, at, x, decoded, wide, inner)
    x = net.norm("decoder.norm", x, decoded, wide)
    return net.graph([net.head(x, decoded, wide, vocabulary, "shared.weight")])


def _t5_attention(
    net: Network, block: str, kind: str, x: str, context: str, rows: int, context_rows: int, wide: int
) -> str:
    at, size = f"{block}.{kind}", rows * wide * ELEMENT
    normed = net.norm(f"{at}.norm", x, rows, wide)
    q = net.linear(f"{at}.q", normed, rows, wide, wide)
    both = {"key": wide * wide * ELEMENT, "value": wide * wide * ELEMENT}
    kv = net.add(
        f"{at}.kv",
        "linear",
        [context or normed],
        2 * context_rows * wide * ELEMENT,
        weights=both,
        flops=4 * context_rows * wide * wide,
    )
    mixed = net.add(at, "attention", [q, kv], size, flops=4 * rows * context_rows * wide)
    return net.add(block, f"add_{kind}", [x, net.linear(f"{at}.o", mixed, rows, wide, wide)], size)


def _t5_mlp(net: Network, block: str, x: str, rows: int, wide: int, inner: int) -> str:
    normed = net.norm(f"{block}.mlp.norm", x, rows, wide)
    up = net.linear(f"{block}.mlp.wi", normed, rows, wide, inner)
    down = net.linear(f"{block}.mlp.wo", up, rows, inner, wide)
    return net.add(block, "add_mlp", [x, down], rows * wide * ELEMENT)


def clip(vision: Sequence[int], text: Sequence[int]) -> Graph:
    """Two towers, each (layers, width, rows), and their similarity."""
    net = Network()
    layers, wide, rows = vision
    pixels = _tower(net, "vision", net.input("pixels", rows * wide), layers, wide, rows, 800)
    layers, wide, rows = text
    words = _tower(net, "text", net.input("ids", rows * ID), layers, wide, rows, 49408)
    return net.graph([net.add("similarity", "mul", [pixels, words], 2 * ELEMENT)])


def _tower(net: Network, at: str, x: str, layers: int, wide: int, rows: int, vocabulary: int) -> str:
    size = rows * wide * ELEMENT
    x = net.embedding(f"{at}.embed", x, rows, vocabulary, wide)
    for i in range(layers):
        block = f"{at}.layers.{i}"
        normed = net.norm(f"{block}.norm", x, rows, wide)
        qkv = net.linear(f"{block}.attn.qkv", normed, rows, wide, 3 * wide)
        attended = net.add(
            f"{block}.attn.out",
            "attention",
            [qkv],
            size,
            weights={"weight": wide * wide * ELEMENT},
            flops=2 * rows * wide * wide + 4 * rows * rows * wide,
        )
        x = net.add(block, "add", [x, attended], size)
        up = net.linear(f"{block}.mlp.fc1", x, rows, wide, 4 * wide)
        down = net.linear(f"{block}.mlp.fc2", up, rows, 4 * wide, wide)
        x = net.add(block, "add_mlp", [x, down], size)
    projection = {"weight": wide * 1024 * ELEMENT}
    return net.add(f"{at}.projection", "linear", [x], 1024 * ELEMENT, weights=projection)


def towers(widths: Sequence[int], depths: Sequence[int], rows: int) -> Graph:
    """A stem, parallel towers of different width and depth, and a head that reads them all."""
    net = Network()
    stem = net.linear("stem", net.input("features", rows * 512 * ELEMENT), rows, 512, 512)
    ends = []
    for i, (wide, depth) in enumerate(zip(widths, depths, strict=True)):
        x = net.linear(f"tower{i}.entry", stem, rows, 512, wide)
        for k in range(depth):
            block = f"tower{i}.layers.{k}"
            up = net.linear(f"{block}.up", x, rows, wide, 4 * wide)
            down = net.linear(f"{block}.down", up, rows, 4 * wide, wide)
            x = net.add(block, "add", [x, down], rows * wide * ELEMENT)
        ends.append(net.linear(f"tower{i}.exit", x, rows, wide, 256))
    joined = net.add("head", "concatenate", ends, rows * 256 * len(ends) * ELEMENT)
    return net.graph([net.linear("head.out", joined, rows, 256 * len(ends), 1000)])


def segformer() -> Graph:
    """The imbalance of accelerate's issue 3041, its sizes times 1024: one layer has 90 % of the bytes.

    Four stages of small operations, a projection of each, and ``fuse``, which reads them all.
    """
    net, kib, random = Network(), 1024, np.random.RandomState(0)
    x, side, stages = net.input("pixels", 3 * 64 * 64 * 4), 16, []
    for stage, wide in enumerate((8, 8, 16, 16)):
        size = wide * side * side * 4 * 64
        at = f"encoder.stage{stage}"
        patch = {"weight": 3000 * kib}
        x = net.add(f"{at}.patch", "conv", [x], size, weights=patch, flops=1e8)
        for k in range(6):
            own = {"weight": int(random.randint(1500, 4500)) * kib}
            y = net.add(f"{at}.layers.{k}.mix", "linear", [x], size, weights=own, flops=1e8)
            x = net.add(f"{at}.layers.{k}", "add", [x, y], size)
        stages.append(x)
        side = max(2, side // 2)
    size = 256 * 16 * 16 * 4 * 16
    projected = [
        net.add(f"head.linear{i}", "linear", [y], size, weights={"weight": 13312 * kib}, flops=2e9)
        for i, y in enumerate(stages)
    ]
    fuse = {"weight": 1048576 * kib}
    x = net.add("head.fuse", "conv", projected, size, weights=fuse, flops=2e11)
    x = net.add("head.batch_norm", "norm", [x], size, weights={"weight": 4104 * kib}, flops=1e7)
    classes = {"weight": 2056 * kib}
    return net.graph(
        [net.add("head.classifier", "conv", [x], 2 * 16 * 16 * 4 * 16, weights=classes, flops=1e7)]
    )


def unet(levels: int = 4, base: int = 320, side: int = 64, blocks: int = 3, images: int = 2) -> Graph:
    """A U-Net whose decoder reads the encoder's values in reverse; 4 latent channels in and out."""
    net, wide = Network(), base
    pixels = net.input("latents", images * 4 * side * side * ELEMENT)
    x = _conv(net, "conv_in", [pixels], images * side * side, 4, wide)
    skips = [(x, wide)]
    count = 0
    for level in range(levels):
        out = base * min(2**level, 4)
        for _ in range(blocks - 1):
            x = _residual(net, f"down.{count}", [x], images * side * side, wide, out)
            wide, count = out, count + 1
            skips.append((x, wide))
        if level < levels - 1:
            side //= 2
            x = _conv(net, f"downsample{level}", [x], images * side * side, wide, wide)
            skips.append((x, wide))
    x = _residual(net, "middle.0", [x], images * side * side, wide, wide)
    count = 0
    for level in reversed(range(levels)):
        out = base * min(2**level, 4)
        for _ in range(blocks):
            skip, more = skips.pop()
            x = _residual(net, f"up.{count}", [x, skip], images * side * side, wide + more, out)
            wide, count = out, count + 1
        if level > 0:
            side *= 2
            x = _conv(net, f"upsample{level}", [x], images * side * side, wide, wide)
    return net.graph([_conv(net, "conv_out", [x], images * side * side, wide, 4)])


def _conv(
    net: Network, path: str, inputs: Sequence[str], positions: int, wide: int, out: int, taps: int = 9
) -> str:
    return net.add(
        path,
        "conv",
        inputs,
        positions * out * ELEMENT,
        weights={"weight": wide * out * taps * ELEMENT},
        flops=2 * positions * wide * out * taps,
    )


def _residual(net: Network, at: str, inputs: Sequence[str], positions: int, wide: int, out: int) -> str:
    size = positions * out * ELEMENT
    first = _conv(net, f"{at}.conv1", inputs, positions, wide, out)
    second = _conv(net, f"{at}.conv2", [first], positions, out, out)
    shortcut = _conv(net, f"{at}.shortcut", inputs, positions, wide, out, taps=1)
    summed = net.add(at, "add", [second, shortcut], size)
    projections = dict.fromkeys(("qkv", "inner", "outer"), out * out * ELEMENT * 4)
    flops = 24 * positions * out * out
    attended = net.add(f"{at}.attention", "attention", [summed], size, weights=projections, flops=flops)
    return net.add(at, "add_attention", [summed, attended], size)


def moe(
    layers: int,
    wide: int,
    inner: int,
    experts: int,
    active: int,
    vocabulary: int,
    rows: int,
    *,
    tied: bool = True,
    shared: int = 0,
    dense: int = 0,
) -> Graph:
    """A mixture of experts: each token goes to ``active`` of ``experts``, every expert is one operation.

    Args:
        layers: how many.
        wide: width of the residual stream.
        inner: width inside an expert.
        experts: routed experts of a layer.
        active: experts that a token goes to.
        vocabulary: tokens that there are.
        rows: tokens of the call.
        tied: whether the head reads the embedding's weight.
        shared: width inside the expert that every token goes to; 0 where there is none.
        dense: width inside the first layer's only expert; 0 where it is as the others.
    """
    net = Network()
    x = net.embedding("embed", net.input("ids", rows * ID), rows, vocabulary, wide)
    for i in range(layers):
        at, size = f"layers.{i}", rows * wide * ELEMENT
        normed = net.norm(f"{at}.input_norm", x, rows, wide)
        own = dict.fromkeys("qkvo", wide * wide * ELEMENT)
        flops = 8 * rows * wide * wide + 4 * rows * rows * wide
        attended = net.add(f"{at}.attn", "attention", [normed], size, weights=own, flops=flops)
        x = net.add(at, "add", [x, attended], size)
        normed = net.norm(f"{at}.post_norm", x, rows, wide)
        if dense and i == 0:
            x = net.add(at, "add_mlp", [x, _expert(net, f"{at}.mlp", [normed], rows, wide, dense)], size)
            continue
        gates = net.linear(f"{at}.mlp.router", normed, rows, wide, experts)
        parts = [_expert(net, f"{at}.mlp.shared", [normed], rows, wide, shared)] if shared else []
        parts += [
            _expert(net, f"{at}.mlp.experts.{e}", [normed, gates], rows, wide, inner, active / experts)
            for e in range(experts)
        ]
        x = net.add(f"{at}.mlp", "combine", [x, gates, *parts], size)
    x = net.norm("norm", x, rows, wide)
    return net.graph([net.head(x, 1, wide, vocabulary, "embed.weight" if tied else "")])


def _expert(
    net: Network, at: str, inputs: Sequence[str], rows: int, wide: int, inner: int, share: float = 1.0
) -> str:
    """Gate, up and down of a share of the rows, as one operation."""
    own = dict.fromkeys(("gate", "up", "down"), wide * inner * ELEMENT)
    out = int(rows * share * wide * ELEMENT)
    return net.add(at, "expert", inputs, out, weights=own, flops=6 * rows * share * wide * inner)


def random_layers(operations: int, seed: int) -> Graph:
    """Operations in a row of random sizes; one in eight reads a value of up to 20 operations before too."""
    random = np.random.default_rng(seed)
    net = Network()
    made = [net.input("features", 1 << 20)]
    for i in range(operations):
        reads = [made[-1]]
        if i and random.random() < 1 / 8:
            reads.append(made[-1 - int(random.integers(1, min(20, len(made) - 1) + 1))])
        weight = {"weight": int(random.integers(1 << 20, 64 << 20))} if random.random() < 0.6 else {}
        flops = float(random.uniform(1e9, 2e11)) if weight else 0.0
        out = int(random.integers(1 << 18, 8 << 20))
        made.append(net.add(f"layers.{i}", "linear", reads, out, weights=weight, flops=flops))
    return net.graph([made[-1]])
