"""Carry out an existing plan: check that the graph is the same, and place it as planned, without a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from graphplan.capture.captured_graph import Part
from graphplan.compiler.activation_choice import member_with, with_loss_in_parts
from graphplan.compiler.compile_state import Choice, CompileState, in_parts
from graphplan.compiler.formulation import Member
from graphplan.errors import PlanError
from graphplan.ir.graph import Graph
from graphplan.ir.graph_difference import graph_difference
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import readable_bytes
from graphplan.passes.frontend.two_readings import upper_bound_graph
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.certificate import Bound, certify
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.training.knapsack import savings_of
from graphplan.passes.training.loss_parts import planned_parts


def place_as_planned(state: CompileState, plan: PlanData) -> list[Choice]:
    """Pass: place the calls as an existing plan of as many calls says."""
    plans = plan.calls
    if len(plans) != len(state.members):
        raise PlanError(f"the plan is of {len(plans)} example calls, not of {len(state.members)}: see calls=")
    members = [_as_planned(member, call_plan) for member, call_plan in zip(state.members, plans, strict=True)]
    state = replace(state, members=members)
    return [_chosen(state, *pair) for pair in zip(members, plans, strict=True)]


def _as_planned(member: Member, plan: PlanData) -> Member:
    """Return the call with the sliced weights or loss, recomputation and offloading of the plan."""
    parts = [part for name in plan.graph.weights if (part := Part.named(name)) is not None]
    member = in_parts(member, parts)
    member = with_loss_in_parts(member, planned_parts(plan.graph))
    return member_with(member, savings_of(plan.graph, member.annotator.capture))


def _chosen(state: CompileState, member: Member, plan: PlanData) -> Choice:
    formulation, together = state.formulation, [other.annotator.capture for other in state.members]
    plain = formulation.plain(member, together)
    if plain.graph.operations.keys() != plan.graph.operations.keys():
        _refuse(plan.graph, plain.graph)
    graph = formulation.graph(member.annotator, plan.schedule, together)
    agreed = _agreed(plan.graph, graph)
    if agreed is None:
        _refuse(plan.graph, graph)
    problem = replace(plain, graph=agreed, prefetch_bytes=plan.shared_prefetch_bytes)
    evaluation = evaluate(problem, plan.schedule.assignment)
    _require_room(evaluation)
    call = Call(problem, plan.constraints, member.weight)
    specs = zip(problem.topology.devices, plan.topology.devices, strict=True)
    holds = agreed is plan.graph and all(spec.room <= planned_spec.room for spec, planned_spec in specs)
    bound = Bound(plan.lower_bound, plan.proof) if holds else Bound(0.0, "made for other devices or budgets")
    return Choice(member, call, certify(evaluation, bound))


def _agreed(planned: Graph, current: Graph) -> Graph | None:
    """Return the planned graph if this model's is equal, else one for this machine if only kernels differ.

    Return None otherwise. The plan may be for other devices, whose kernels copy other values or need other
    workspace, which is measured only on devices of this machine. The optimizer's traffic is as planned.
    """
    traffic = {name: weight.step_traffic for name, weight in planned.weights.items()}
    weights = [replace(w, step_traffic=traffic.get(w.name, w.step_traffic)) for w in current.weights.values()]
    current = current.changed(weights=weights)
    if planned == current:
        return planned
    if _measured_types(planned) != _measured_types(current):
        return current if _computed(planned) == _computed(current) else None
    return upper_bound_graph(planned, current) if _unmeasured(planned) == _unmeasured(current) else None


def _unmeasured(graph: Graph) -> Graph:
    return graph.changed(operations=[replace(one, workspace={}) for one in graph.operations.values()])


def _measured_types(graph: Graph) -> set[str]:
    """Return the device types for which workspaces are known."""
    return {device_type for one in graph.operations.values() for device_type in one.workspace}


def _computed(graph: Graph) -> tuple[object, ...]:
    """Return the operations of a graph with their inputs, independent of devices."""
    operations = [(op.name, op.type, op.inputs, op.outputs, op.mutates) for op in graph.operations.values()]
    sizes = {name: value.copy_bytes for name, value in graph.values.items()}
    return operations, sizes, graph.weights, graph.inputs, graph.outputs


def _require_room(evaluation: Evaluation) -> None:
    for key, over in evaluation.excess.items():
        room = evaluation.problem.topology[key].room
        raise PlanError(
            f"the plan takes {readable_bytes(room + over)} on device {key!r}, where max_memory leaves "
            f"{readable_bytes(room)}: give it more, or plan again for these budgets"
        )


def _refuse(planned: Graph, current: Graph) -> NoReturn:
    difference = graph_difference(current, planned, ("the model", "the plan")) or next(
        _details(planned, current)
    )
    raise PlanError(
        f"the plan is of another graph: {difference}. Give partition the model, the example inputs, "
        "max_batch= and max_length=, the optimizer of a training step (train=), and the versions of torch "
        "and transformers with which it was planned, or plan again"
    )


def _details(planned: Graph, current: Graph) -> Iterator[str]:
    """Yield the other differences: inputs of operations, results, bytes of weights, all else."""
    for name, operation in planned.operations.items():
        own = current.operations.get(name)
        if own is not None and own.inputs != operation.inputs:
            planned_inputs, inputs = ", ".join(operation.inputs), ", ".join(own.inputs)
            yield f"{name!r} reads {planned_inputs}, but {inputs} in the model"
    if planned.outputs != current.outputs:
        outputs = ", ".join(current.outputs)
        yield f"its results are {', '.join(planned.outputs)}, but those of the model are {outputs}"
    for name, weight in planned.weights.items():
        own_weight = current.weights.get(name)
        if own_weight is not None and own_weight.held_bytes != weight.held_bytes:
            planned_bytes = f"{weight.held_bytes} bytes with gradients and optimizer state"
            yield f"{name!r} takes {planned_bytes}, but {own_weight.held_bytes} in the model"
    yield "operations take other bytes or FLOPs"
