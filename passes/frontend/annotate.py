"""Give a captured graph its bytes, FLOPs, aliases and workspaces: ``torch.fx`` becomes a ``Graph``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.devices.machine import suspended
from graphplan.devices.topology import CPU, DeviceKey
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Schedule
from graphplan.passes.frontend.fake_interpreter import Interpreter
from graphplan.passes.frontend.graph_reader import GraphReader
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.frontend.two_readings import with_least_costs
from graphplan.warnings import silenced


class Annotator:
    """Writes down the graph of a capture, as it is and as a schedule makes it.

    Args:
        capture: simplified.
        weights: of the model that was captured; unused ones are in the graph too.
        device_types: for which to measure workspaces; a type without a backend here counts as CPU.
        bench: to measure workspaces on this machine's cards.
    """

    def __init__(
        self,
        capture: Capture,
        weights: ModelWeights,
        device_types: Sequence[str] = ("cpu",),
        bench: KernelBench | None = None,
    ) -> None:
        self.capture, self.weights, self.device_types, self.bench = capture, weights, device_types, bench
        self.interpreter = Interpreter(device_types, capture.sizes, bench)
        self._as_it_is: Graph | None = None

    def of(self, capture: Capture, weights: ModelWeights | None = None) -> Annotator:
        """An annotator of another capture of the model, which knows what this one has measured.

        ``weights`` are those of the model that it reads, if not all.
        """
        other = Annotator(capture, weights or self.weights, self.device_types, self.bench)
        other.interpreter.memo = self.interpreter.memo
        return other

    def graph(self, schedule: Schedule | None = None, kinds: Mapping[DeviceKey, str] | None = None) -> Graph:
        """The graph; with ``schedule``, as it is when values are moved as it says.

        Without one, values are those of accelerators, and an operation costs what it costs where it costs
        least, so that bounds hold wherever it runs. With one, a moved value that was a slice arrives dense,
        and kernels of one type of device return other strides than those of another: after either an
        operation may copy where it took a view, or take another workspace.

        Args:
            schedule: where operations run.
            kinds: the type of each of its devices; one that is left out counts as CPU.

        Raises:
            CaptureError: an operation that cannot be run on fake tensors and has no recorded result.
        """
        if schedule is not None:
            return self._read(schedule, kinds or {})
        if self._as_it_is is None:
            usual = next((kind for kind in self.device_types if kind != CPU), CPU)
            self._as_it_is = self._read(None, {}, usual)
            if usual != CPU and CPU in self.device_types and self.interpreter.differs:
                self._as_it_is = with_least_costs(self._as_it_is, self._read(None, {}, CPU))
        return self._as_it_is

    def _read(self, schedule: Schedule | None, kinds: Mapping[DeviceKey, str], usual: str = CPU) -> Graph:
        reader = GraphReader(self.capture, self.weights, kinds)
        with silenced("torch._subclasses.fake_tensor"), suspended():  # no operation computes anything
            reader.read(self.interpreter, schedule, usual)
        graph = reader.graph()
        graph.verify()
        return graph
