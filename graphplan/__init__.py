"""graphplan: place a PyTorch model over several devices, graph first.

>>> import torch, graphplan
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
>>> placed = graphplan.partition(model, {"cpu": "1GiB"}, args=(torch.ones(2, 8),))
>>> bool((placed(torch.ones(2, 8)) == model(torch.ones(2, 8))).all())
True
"""

from graphplan.device import DeviceSpec, Link, Topology
from graphplan.device_maps import infer_auto_device_map
from graphplan.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    DeviceError,
    GraphplanError,
    GraphplanWarning,
    InfeasibleError,
    InputError,
    LimitError,
    NoGraphError,
    PlanError,
    SimulatedOutOfMemoryError,
    VerificationError,
)
from graphplan.explain import Explanation
from graphplan.graph import Graph, Operation, Value, Weight
from graphplan.growth import Bottleneck, Growth
from graphplan.liveness import Peak
from graphplan.partitioning import partition, plan
from graphplan.placement import Plan, Stage, Transfer
from graphplan.pretrained import load
from graphplan.relocation import Alternative
from graphplan.runtime.benchmark import measure_devices
from graphplan.runtime.executor import unplace
from graphplan.runtime.profile import Profile
from graphplan.runtime.simulate import SimulatedMachine, simulate
from graphplan.runtime.simulated_machine import SimulatedTransfer
from graphplan.schedule import Load, Schedule
from graphplan.speeds import Measurements, Speed
from graphplan.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "Bottleneck",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "DeviceError",
    "DeviceSpec",
    "Explanation",
    "Graph",
    "GraphplanError",
    "GraphplanWarning",
    "Growth",
    "InfeasibleError",
    "InputError",
    "LimitError",
    "Link",
    "Load",
    "Measurements",
    "NoGraphError",
    "Operation",
    "Peak",
    "Plan",
    "PlanError",
    "Profile",
    "Schedule",
    "SimulatedMachine",
    "SimulatedOutOfMemoryError",
    "SimulatedTransfer",
    "Speed",
    "Stage",
    "Timeline",
    "Topology",
    "Transfer",
    "Value",
    "VerificationError",
    "Weight",
    "__version__",
    "infer_auto_device_map",
    "load",
    "measure_devices",
    "partition",
    "plan",
    "simulate",
    "unplace",
]
