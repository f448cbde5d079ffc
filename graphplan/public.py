"""All public names. ``graphplan`` imports this module when the first of them is accessed."""

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.explanation import Explanation
from graphplan.analysis.plan import Plan
from graphplan.analysis.relocation import Alternative
from graphplan.analysis.sensitivity import Bottleneck, Growth
from graphplan.api.components import PlacedComponents, partition_pipeline
from graphplan.api.largest_batch import largest_batch
from graphplan.api.load import load
from graphplan.api.partition import partition
from graphplan.api.plan_options import PlanKeywords
from graphplan.api.planning import plan
from graphplan.devices.simulated_machine import SimulatedMachine, SimulatedTransfer
from graphplan.devices.speeds import Measurements, Speed
from graphplan.devices.topology import DeviceSpec, Efficiency, Link, Topology
from graphplan.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    ClusterError,
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
from graphplan.integrations.accelerate.auto_device_map import infer_auto_device_map
from graphplan.ir.cluster.machine_stage import Crossing, MachineStage
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.ir.liveness import Peak
from graphplan.ir.plan_data import Stage, Transfer
from graphplan.ir.schedule import Load, Schedule
from graphplan.ir.timeline import Timeline
from graphplan.runtime.distributed.cluster_module import ClusterModule
from graphplan.runtime.distributed.cluster_profile import ClusterProfile
from graphplan.runtime.module.placed_module import unplace
from graphplan.runtime.profile.call_profile import Profile
from graphplan.runtime.profile.device_benchmark import measure_devices
from graphplan.runtime.simulate.simulation import simulate

__all__ = [
    "Alternative",
    "Bottleneck",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "ClusterModule",
    "ClusterPlan",
    "ClusterProfile",
    "Crossing",
    "DeviceError",
    "DeviceSpec",
    "Efficiency",
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
    "MachineStage",
    "Measurements",
    "NoGraphError",
    "Operation",
    "Peak",
    "PlacedComponents",
    "Plan",
    "PlanError",
    "PlanKeywords",
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
    "infer_auto_device_map",
    "largest_batch",
    "load",
    "measure_devices",
    "partition",
    "partition_pipeline",
    "plan",
    "simulate",
    "unplace",
]
