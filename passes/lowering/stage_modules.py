"""Cut a lowered graph into its stages, so that each can be compiled as a whole.

A stage is a run of operations on one device, without a transfer or a weight streaming step between them.
Before and after, for two operations on one device and a third on another::

    a = torch.mul(x, w)                      stage_0 = self._stage_0(x, w)
    b = torch.tanh(a)                        b = stage_0[0]
    b_on_1 = b.to('cuda:1')                  b_on_1 = b.to('cuda:1')
    c = torch.neg(b_on_1)                    c = torch.neg(b_on_1)

A single operation stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

from torch import fx, nn

from graphplan.devices.topology import DeviceKey


def cut_stages(
    graph: fx.Graph, devices: Mapping[str, DeviceKey], branches: Container[str]
) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
    """Return the graph with a call in place of each stage, and attribute -> stage for these calls.

    A stage takes the tensors that it reads and returns a tuple of those that are read later.

    Args:
        graph: lowered.
        devices: name of each operation -> its device.
        branches: attributes that are graphs of control flow; their callers are in no stage.
    """
    return _Cutting(graph, devices, branches).run()


class _Cutting:
    def __init__(self, graph: fx.Graph, devices: Mapping[str, DeviceKey], branches: Container[str]) -> None:
        self.source, self.devices, self.branches = graph, devices, branches
        self.out = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.stages: dict[str, fx.GraphModule] = {}
        self.group: list[fx.Node] = []

    def run(self) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
        for node in self.source.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)  # reads nothing, so it may precede the open stage
            elif self._continues(node):
                self.group.append(node)
            else:
                self._close()
                if self._device(node) is not None:
                    self.group.append(node)
                else:
                    self._copy(node)
        self.out.lint()
        return self.out, self.stages

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.out.node_copy(node, self.env.__getitem__)

    def _device(self, node: fx.Node) -> DeviceKey | None:
        """Return the device of a node; None if it belongs in no stage."""
        if any(n.op == "get_attr" and n.target in self.branches for n in node.all_input_nodes):
            return None
        name = node.meta.get("operation")
        return None if name is None else self.devices[name]

    def _continues(self, node: fx.Node) -> bool:
        if not self.group:
            return False
        if node.target is operator.getitem and node.args[0] in self.group:
            return True
        return self._device(node) == self._device(self.group[0])

    def _close(self) -> None:
        group, self.group = self.group, []
        if sum("operation" in node.meta for node in group) < 2:
            for node in group:
                self._copy(node)
            return
        inside = set(group)
        reads = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in inside))
        results = [node for node in group if any(user not in inside for user in node.users)]
        name = f"_stage_{len(self.stages)}"
        self.stages[name] = _module(group, reads, results)
        call = self.out.create_node("call_module", name, tuple(self.env[n] for n in reads), name=name[1:])
        for index, node in enumerate(results):
            part = self.out.create_node("call_function", operator.getitem, (call, index), name=node.name)
            part.meta.update(node.meta)
            self.env[node] = part


def _module(group: list[fx.Node], reads: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in reads}
    for node in group:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    graph.lint()
    return fx.GraphModule(nn.Module(), graph, class_name="Stage")
