"""Convert a captured ``torch.fx`` graph to a ``Graph`` with bytes, FLOPs, aliases and workspaces."""

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
    """Converts a capture to a ``Graph``, without a schedule or under one.

    Args:
        capture: the capture, already simplified.
        weights: weights of the captured model; unused ones are in the graph too.
        device_types: types for which workspaces are measured; one without a backend here counts as CPU.
        bench: measures workspaces on this machine's GPUs.
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
        self._unscheduled: Graph | None = None

    def of(self, capture: Capture, weights: ModelWeights | None = None) -> Annotator:
        """Return an annotator of another capture of the model that shares this one's measurements.

        ``weights`` are those of the model that the capture reads, if not all.
        """
        other = Annotator(capture, weights or self.weights, self.device_types, self.bench)
        other.interpreter.memo = self.interpreter.memo
        return other

    def graph(
        self, schedule: Schedule | None = None, types_by_device: Mapping[DeviceKey, str] | None = None
    ) -> Graph:
        """Return the graph; with ``schedule``, as it is when values are moved accordingly.

        Without a schedule, values are as on accelerators, and an operation has its least cost over device
        types, so that bounds hold wherever it runs. With one, a moved slice arrives dense, and strides
        depend on the type of device: after either an operation may copy instead of returning a view, or
        need another workspace.

        Args:
            schedule: where operations run.
            types_by_device: the type of each of its devices; a missing one counts as CPU.

        Raises:
            CaptureError: an operation cannot be run on fake tensors and has no recorded result.
        """
        if schedule is not None:
            return self._read(schedule, types_by_device or {})
        if self._unscheduled is None:
            default = next((device_type for device_type in self.device_types if device_type != CPU), CPU)
            self._unscheduled = self._read(None, {}, default)
            if default != CPU and CPU in self.device_types and self.interpreter.differs:
                self._unscheduled = with_least_costs(self._unscheduled, self._read(None, {}, CPU))
        return self._unscheduled

    def _read(
        self,
        schedule: Schedule | None,
        types_by_device: Mapping[DeviceKey, str],
        default_device_type: str = CPU,
    ) -> Graph:
        reader = GraphReader(self.capture, self.weights, types_by_device)
        with silenced("torch._subclasses.fake_tensor"), suspended():  # no operation computes anything
            reader.read(self.interpreter, schedule, default_device_type)
        graph = reader.graph()
        graph.verify()
        return graph
