"""Decide statically which weights are prefetched together, when, and into which slot.

A copy of a weight is needed from its first reader to the last reader of its views. Readers far apart get a
copy each rather than hold a slot in between. The weights of one operation, and small ones of neighbours,
form one segment if they are adjacent in host memory, which has the order of first copies. A segment gets
the slot that has been free for the longest time when it is first read, so it can be loaded early. Before
and after, for two weights on the CPU::

    run a on 0       load 0: wa -> slot 0 of 0
    run b on 0       load 1: wb -> slot 1 of 0
                     wait 0 on 0
                     run a on 0
                     release 0 on 0
                     wait 1 on 0
                     run b on 0
                     release 1 on 0
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphplan.devices.topology import CPU, DISK, DeviceKey, DeviceSpec, Topology, round_up
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import (
    Assignment,
    Load,
    Move,
    PrefetchBuffer,
    PrefetchSegment,
    Release,
    Run,
    Step,
    Wait,
)

SMALL = 4.0
"""A copy is small if it takes less than this many times its latency; small copies are joined."""
_SLOTS = 2  # if an assignment sets no number: one is read while the next one is copied
_ORDER = {Release: 0, Load: 1, Wait: 2}  # of the steps right before one step


class Streamed:
    """The weights that devices read from their prefetch buffers."""

    def __init__(self, graph: Graph, topology: Topology, assignment: Assignment) -> None:
        memory = {spec.key for spec in topology.devices if spec.type in (CPU, DISK)}
        self.weights = {
            name
            for name, key in assignment.weights.items()
            if key in memory and name in graph.streamable and graph.weights[name].nbytes
        }
        self.devices = {s.key for s in topology.accelerators if assignment.slots.get(s.key) != 0}
        self.operations = assignment.operations

    def __call__(self, name: str, device: DeviceKey) -> bool:
        """Whether operations on ``device`` read ``name`` from its prefetch buffer."""
        return name in self.weights and device in self.devices


@dataclass(slots=True)
class _Span:
    """Weights that are needed on a device from one step to another, both included, and their slot."""

    weights: list[str]
    start: int
    end: int
    slot: int = -1


class _HostOrder:
    """The order of weights in host memory, which is that of their first copies.

    Adjacent weights can be copied together. Weights on disk are not adjacent to those in memory; rows of a
    weight lie inside that weight, and are adjacent to nothing.
    """

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.assignment = graph, assignment
        self.place: dict[str, int] = {}

    def add(self, spans: Iterable[_Span]) -> None:
        """Append the weights that these spans are the first to copy."""
        for name in (name for span in spans for name in span.weights):
            self.place.setdefault(self.graph.weights[name].part_of or name, len(self.place))

    def adjoin(self, span: _Span, following: _Span) -> bool:
        """Whether the weights of the second span directly follow those of the first."""
        last, first = self.place.get(span.weights[-1]), self.place.get(following.weights[0])
        return last is not None and first == last + 1 and self.home(span) == self.home(following)

    def home(self, span: _Span) -> DeviceKey:
        """Return the device of a span's weights."""
        return self.assignment.weights[span.weights[0]]

    def source(self, topology: Topology, spans: Sequence[_Span]) -> DeviceKey:
        """Return the device that copies come from: the CPU unless all spans are on disk."""
        if not spans:
            return next((spec.key for spec in topology.devices if spec.type == CPU), CPU)
        return next((home for span in spans if (home := self.home(span)) != DISK), DISK)


def add_streams(
    graph: Graph,
    topology: Topology,
    assignment: Assignment,
    streamed: Streamed,
    steps: Sequence[Run | Move],
    backward: int,
    existing_bytes: Mapping[DeviceKey, int],
) -> tuple[tuple[Step, ...], tuple[PrefetchBuffer, ...]]:
    """Return the steps with loads, waits and releases, and the prefetch buffers that they use.

    Args:
        graph: the graph to schedule.
        topology: the devices and links.
        assignment: devices of weights, and slots of prefetch buffers.
        streamed: the weights that devices read from their prefetch buffers.
        steps: the steps without the copies of streamed weights.
        backward: number of steps of the forward pass.
        existing_bytes: device -> bytes of an existing prefetch buffer.
    """
    uses = _find_uses(graph, streamed, steps)
    # inputs move first: they must not queue behind whole segments
    first_run = next((index for index, step in enumerate(steps) if isinstance(step, Run)), len(steps))
    extra: dict[int, list[Step]] = defaultdict(list)
    prefetch_buffers, order = [], _HostOrder(graph, assignment)
    for spec in topology.devices:
        clusters = _cluster(uses.get(spec.key, []), backward)
        order.add(clusters)
        spans = _merge_small(order, topology, spec, _group(clusters, order), backward)
        if not spans and not existing_bytes.get(spec.key):
            continue
        source = order.source(topology, spans)
        _choose_slots(spans, assignment.slots.get(spec.key, _SLOTS))
        buffer = _prefetch_buffer(graph, spec.key, source, spans, existing_bytes.get(spec.key, 0))
        _place_steps(buffer, spans, order, first_run, backward, extra)
        prefetch_buffers.append(buffer)
    return _interleave(steps, extra), tuple(prefetch_buffers)


def _find_uses(graph: Graph, streamed: Streamed, steps: Sequence[Run | Move]) -> dict[DeviceKey, list[_Span]]:
    """Return for each device the reads of streamed weights, each until the last read of its views."""
    uses: dict[DeviceKey, list[_Span]] = defaultdict(list)
    if not streamed.weights:
        return uses
    views: dict[tuple[str, DeviceKey], _Span] = {}
    placed, producer, weight_inputs = streamed.operations, graph.producer, graph.weight_inputs
    for index, step in enumerate(steps):
        if isinstance(step, Move):
            if (span := views.get((step.value, step.source))) is not None:
                span.end = index
            continue
        inputs = weight_inputs.get(step.operation)
        if inputs is None:
            continue
        operation, fresh = graph.operations[step.operation], dict[str, _Span]()
        for name in inputs:
            maker = producer.get(name) if operation.host_only else None
            device = step.device if maker is None else placed[maker]
            if views and (span := views.get((name, device))) is not None:
                span.end = index
            elif name in streamed.weights and not operation.host_only and device in streamed.devices:
                fresh[name] = _Span([name], index, index)
                uses[device].append(fresh[name])
        for name in operation.outputs:
            base = graph.values[name].alias_of
            if base is not None:
                span = fresh.get(base) or views.get((base, step.device))
                if span is not None:
                    views[name, step.device] = span
    return uses


def _cluster(uses: Iterable[_Span], backward: int) -> list[_Span]:
    """Merge reads of one weight that share a copy: those between which no other copy is first read.

    The forward and the backward pass, from step ``backward`` on, share no copy: other calls may come between.
    """
    spans: list[_Span] = []
    starts: list[int] = []
    latest: dict[str, _Span] = {}
    for use in uses:
        previous = latest.get(use.weights[0])
        crosses_passes = previous is not None and previous.start < backward <= use.start
        if (
            previous is not None
            and not crosses_passes
            and bisect_left(starts, use.start) <= bisect_right(starts, previous.end)
        ):
            previous.end = max(previous.end, use.end)
            continue
        latest[use.weights[0]] = use
        starts.append(use.start)
        spans.append(use)
    return spans


def _group(spans: Iterable[_Span], order: _HostOrder) -> list[_Span]:
    """Merge spans that start at one operation and are adjacent in host memory."""
    grouped: list[_Span] = []
    for span in spans:
        last = grouped[-1] if grouped else None
        if last is not None and last.start == span.start and order.adjoin(last, span):
            last.weights += span.weights
            last.end = max(last.end, span.end)
        else:
            grouped.append(span)
    return grouped


def _merge_small(
    order: _HostOrder, topology: Topology, spec: DeviceSpec, spans: Sequence[_Span], backward: int
) -> list[_Span]:
    """Merge adjacent spans while their copy is small and no larger than the largest span.

    ``backward`` is the first step of the backward pass.
    """
    if not spans:
        return []
    graph = order.graph
    link = topology.link(order.source(topology, spans), spec.key)
    sizes = [_offsets(graph, span.weights)[-1] for span in spans]
    limit = min(SMALL * link.latency * link.bandwidth, max(sizes))
    merged, nbytes = [spans[0]], sizes[0]
    for span, size in zip(spans[1:], sizes[1:], strict=True):
        last, joined = merged[-1], round_up(nbytes) + size
        if joined > limit or not order.adjoin(last, span) or last.start < backward <= span.start:
            merged.append(span)
            nbytes = size
        else:
            last.weights, last.end = [*last.weights, *span.weights], max(last.end, span.end)
            nbytes = joined
    return merged


def _offsets(graph: Graph, weights: Iterable[str]) -> list[int]:
    """Return the offset of each weight of a segment, and the segment's size."""
    offsets, start, end = [], 0, 0
    for name in weights:
        offsets.append(start)
        end = start + graph.weights[name].nbytes
        start = round_up(end)
    return [*offsets, end]


def _choose_slots(spans: Sequence[_Span], count: int) -> None:
    """Give each span a slot: a new one up to ``count`` or if none is free, else the longest free."""
    busy: list[int] = []  # the step at which each slot is last read
    for span in spans:
        span.slot = min(range(len(busy)), key=busy.__getitem__, default=0)
        if len(busy) < count or busy[span.slot] >= span.start:
            span.slot = len(busy)
            busy.append(span.end)
        busy[span.slot] = span.end


def _prefetch_buffer(
    graph: Graph, device: DeviceKey, source: DeviceKey, spans: Sequence[_Span], min_bytes: int
) -> PrefetchBuffer:
    last = {span.slot: index for index, span in enumerate(spans)}
    sizes = [0] * len(last)
    segments = []
    for index, span in enumerate(spans):
        *offsets, nbytes = _offsets(graph, span.weights)
        previous, last[span.slot] = last[span.slot], index
        segments.append(PrefetchSegment(tuple(span.weights), tuple(offsets), nbytes, span.slot, previous))
        sizes[span.slot] = max(sizes[span.slot], round_up(nbytes))
    return PrefetchBuffer(device, source, tuple(sizes), tuple(segments), max(sum(sizes), min_bytes))


def _place_steps(
    buffer: PrefetchBuffer,
    spans: Sequence[_Span],
    order: _HostOrder,
    load_at: int,
    backward: int,
    extra: dict[int, list[Step]],
) -> None:
    """Add loads to ``extra`` as early as the slots allow, in order; waits and releases around the readers.

    ``extra[i]`` comes right before step ``i``. Nothing is loaded before step ``load_at``, and nothing of the
    backward pass before step ``backward``.
    """
    for index, (span, segment) in enumerate(zip(spans, buffer.segments, strict=True)):
        extra[span.end + 1].append(Release(index, buffer.device))
        if segment.previous < index:
            load_at = max(load_at, spans[segment.previous].end + 1)
        if span.start >= backward:
            load_at = max(load_at, backward)
        load = Load(index, buffer.device, order.home(span), segment.weights, segment.nbytes)
        extra[load_at].append(load)
        extra[span.start].append(Wait(index, buffer.device))


def _interleave(steps: Sequence[Step], extra: Mapping[int, Sequence[Step]]) -> tuple[Step, ...]:
    result: list[Step] = []
    start = 0
    for index in sorted(extra):
        result += steps[start:index]
        result += sorted(extra[index], key=lambda step: _ORDER[type(step)])
        start = index
    return (*result, *steps[start:])
