"""From calls to programs: the passes, in order.

::

    capture         Captures.annotated      model, call -> fx graph -> Graph: bytes, FLOPs, aliases
    plan            Compiler._run_passes    on one CompileState, of one call or several
        reuse_slices                        slice weights as earlier plans have
        place_step                          constrain, save less or slice, assign devices
        check_budgets                       prove that no call exceeds a budget
    lower           lower_planned           plan -> fx graph with every transfer, specialised, verified
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from graphplan.analysis.lack_of_room import is_very_slow, seconds_with_room, slowness
from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import AttributeValues, ModelCopy
from graphplan.capture.model.model_weights import tensor_bytes
from graphplan.capture.model.modes import Modes
from graphplan.capture.signature import BoundCall, shapes_text
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.capture.value_branches import ValueOf
from graphplan.compiler.activation_choice import place_step
from graphplan.compiler.capture_cache import Captures
from graphplan.compiler.code_generation import Planned, lower_planned
from graphplan.compiler.compile_state import Choice, CompileState
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.formulation import Formulation, Member, Options, host_key
from graphplan.compiler.given_plan import place_as_planned
from graphplan.compiler.progress import enter_stage, with_progress
from graphplan.compiler.slicing_choice import reuse_slices
from graphplan.devices.topology import DISK, DeviceKey, Topology
from graphplan.errors import CaptureError, InfeasibleError, NoGraphError
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule_checks import check_schedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device
from graphplan.runtime.module.program import Program
from graphplan.warnings import warn

logger = logging.getLogger("graphplan")

_SETTLED = ", with the weights where they are"  # ends the proof of a bound for weights placed earlier
_NOTICED = 1e-3  # seconds: for a shorter call, no warning says that it is slow
_WORTH = 2.0  # a plan for larger sizes, which are likely next, may be so many times as slow as one without
_MUCH_FASTER = 2.0  # factor: a warning names the CPU if it is so much faster than the plan
_FASTER_CPU = "a faster CPU"  # key of that warning
AHEAD = (1.0, 0.25)  # how far to plan ahead for later sizes, as far as there is room
_MIN_AHEAD = 1 / 32  # share of a size by which a plan exceeds it at least, while it grows by steps
_PLACED = (
    "\nEarlier plans of this model have placed the weights. To leave room for these inputs ({}), give "
    "partition {}"
)
_SIZED = "max_batch and max_length that cover them, or such a call in calls="
_TRAINED = "max_batch and max_length that cover them, or them as its example"  # training takes no calls=


@dataclass(frozen=True, slots=True)
class WeightedCall:
    """A call to plan together with others; the objective counts it ``weight`` times."""

    call: BoundCall
    weight: float = 1.0


class Compiler:
    """Plans and lowers calls of one model; the first plan decides where weights reside.

    A placed module and its copies share one, in any threads: it works under the capture lock.

    Args:
        model_copy: the copy of the model to trace.
        topology: the devices.
        options: the caller's options.
        committed: the decisions of earlier plans, if there are any.
        mappable: the parameters that can stay on disk; None for all. In training, none can.
        given_plan: an existing plan, which the first calls carry out without a search.

    Attributes:
        captures: the captures so far.
        committed: the decisions of earlier plans; the first plan decides where weights reside.
    """

    def __init__(
        self,
        model_copy: ModelCopy,
        topology: Topology,
        options: Options,
        committed: Commitments | None = None,
        mappable: Set[str] | None = None,
        given_plan: PlanData | None = None,
    ) -> None:
        self.model_copy, self.topology, self.options = model_copy, topology, options
        self.mappable = mappable if options.training is None else frozenset[str]()
        self.given_plan = given_plan
        model_copy.compute_on([spec.type for spec in topology.computing])
        self.committed = committed or Commitments()
        placed = () if self.homes is None else model_copy.weights.tensors.values()
        self.captures = Captures(model_copy, options, KernelBench(topology, placed))

    @property
    def homes(self) -> dict[str, DeviceKey] | None:
        """Weight -> device where it resides; None until a plan has decided."""
        return self.committed.homes

    def place_unplanned_weights(self) -> None:
        """Assign weights that no plan knows to the CPU, or else to the device with the most room left."""
        homes = self.homes
        assert homes is not None
        room = {spec.key: spec.room for spec in self.topology.devices if spec.key != DISK}
        weights = self.model_copy.weights.tensors
        for name in sorted(weights, key=lambda name: name not in homes):  # those with a home first
            home = homes.setdefault(name, self.topology.cpu or max(room, key=lambda key: room[key]))
            room[home] = room.get(home, 0) - tensor_bytes(weights[name])

    @one_at_a_time
    def plan(
        self,
        call: BoundCall,
        aheads: Sequence[float] | None = None,
        *,
        caller_retries: bool = False,
        advise: bool = True,
    ) -> Planned:
        """Capture, annotate and place a call, for larger sizes if the options say so.

        ``aheads`` are as for captures, tried in order until there is room. By default a first call is planned
        for its own sizes, a later one for larger sizes if there is room, and if the plan is fast or sizes
        grow by steps. ``caller_retries`` and ``advise`` are as in :class:`Limits`.
        """
        placed = self.homes is not None
        *larger, last = aheads or ((*AHEAD, 0.0) if placed else (0.0,))
        grows = not last and placed and self.captures.grows_by_steps(call)
        plan_ahead = self._plan_growing(call) if grows else self._plan_ahead(call, larger)
        if plan_ahead is not None and (last or grows or not placed or slowness(plan_ahead.plan) <= _WORTH):
            return plan_ahead
        annotator = self.captures.annotated(call, last)
        if plan_ahead is not None and plan_ahead.capture.signature == annotator.capture.signature:
            return plan_ahead  # the caller's limits fix the sizes
        if caller_retries and self.committed.lacks_room(annotator.capture):
            raise InfeasibleError(f"there is no room for these inputs: {shapes_text(call)}")
        try:
            planned = self._place_alone(annotator, call, caller_retries=caller_retries, advise=advise)
        except InfeasibleError as error:
            if plan_ahead is not None:
                return plan_ahead
            if placed:
                advice = _SIZED if self.options.training is None else _TRAINED
                error.args = (f"{error}{_PLACED.format(shapes_text(call), advice)}",)
            raise
        return _preferred(planned, plan_ahead)

    def _plan_ahead(self, call: BoundCall, aheads: Sequence[float]) -> Planned | None:
        """Return the plan for the first of these larger sizes for which there is room; None for no room."""
        for ahead in aheads:
            annotator = self.captures.annotated(call, ahead)
            if not self.committed.lacks_room(annotator.capture):
                with suppress(InfeasibleError):
                    return self._place_alone(annotator, call, caller_retries=True)
        return None

    def _plan_growing(self, call: BoundCall) -> Planned | None:
        """Return a plan for larger sizes, where the next calls are likely larger by a few tokens; or None.

        One for this call alone would serve no other. If a plan is slow, smaller steps ahead are tried too.
        """
        best, tried = None, set[int]()
        for ahead in (*AHEAD, _MIN_AHEAD):
            annotator = self.captures.annotated(call, ahead)
            if id(annotator) in tried or self.committed.lacks_room(annotator.capture):
                continue
            tried.add(id(annotator))
            with suppress(InfeasibleError):
                best = _preferred(self._place_alone(annotator, call, caller_retries=True), best)
                if slowness(best.plan) <= _WORTH:
                    break
        return best

    def _place_alone(
        self, annotator: Annotator, call: BoundCall, *, caller_retries: bool, advise: bool = True
    ) -> Planned:
        """Place a call by itself; remember its sizes if there is no room for them."""
        limits = Limits.within(self.options.time_limit)
        limits = replace(limits, caller_retries=caller_retries, advises=advise)
        try:
            return self._place([Member(annotator, call)], limits)[0]
        except InfeasibleError as error:
            logger.info("no room for such sizes: %s", error)
            self.committed.refused.append(annotator.capture)
            error.__traceback__ = None  # its frames hold the caller's tensors
            raise

    def aheads(self, call: BoundCall) -> Sequence[float]:
        """Return how far to plan ahead if weights may move: a cache is sure to grow."""
        return AHEAD if self.captures.traced(call).capture.states else (*AHEAD, 0.0)

    @one_at_a_time
    def plan_together(self, calls: Sequence[WeightedCall], *, advise: bool = True) -> tuple[Planned, ...]:
        """Capture several calls, and place them over one placement of weights.

        Calls of one structure count as one, with the sum of their weights. ``advise`` as in :class:`Limits`.
        """
        members: dict[tuple[int, DeviceKey], Member] = {}
        for weighted in calls:
            annotator = self.captures.annotated(weighted.call)
            key = id(annotator), host_key(self.topology, weighted.call)
            earlier = members[key].weight if key in members else 0.0
            members[key] = Member(annotator, weighted.call, earlier + weighted.weight)
        limits = replace(Limits.within(self.options.time_limit), advises=advise)
        plans = self._place(list(members.values()), limits)
        first = replace(plans[0].plan, others=tuple(planned.plan for planned in plans[1:]))
        return replace(plans[0], plan=first), *plans[1:]

    def plan_and_commit(self, calls: Sequence[WeightedCall], *, advise: bool = True) -> Sequence[Planned]:
        """Plan calls as in :meth:`plan_together`, and commit the plans."""
        plans = self.plan_together(calls, advise=advise)
        for plan in plans:
            self.commit(plan)
        return plans

    def problem_of(self, call: BoundCall) -> Problem:
        """Return the problem that a plan of a call has to solve, with weights where earlier plans put them.

        Raises:
            LimitError: the call is larger than the caller's limits.
            CaptureError: the call cannot be traced or measured.
            InfeasibleError: there is no room for its constants beside what earlier plans need.
        """
        return self._formulation.plain(Member(self.captures.annotated(call), call))

    def commit(self, planned: Planned) -> None:
        """Commit this plan: its devices of weights and its memory hold for later plans."""
        self.committed.commit(planned.plan, planned.capture.constants)

    def restart(self) -> None:
        """Forget all commitments; keep the captures."""
        self.committed = Commitments()

    @one_at_a_time
    def lower(self, planned: Planned) -> Program:
        """Return the program of a committed plan."""
        enter_stage("lower")
        constants, modes = self.committed.constants, self.model_copy.modes
        return lower_planned(planned, self.topology, self.options, constants, modes)

    def without_commitments(self) -> Compiler:
        """Return a compiler that shares captures and constants, and may place the weights elsewhere."""
        other = copy.copy(self)
        other.committed = Commitments()
        other.committed.constants = self.committed.constants
        return other

    @with_progress
    @one_at_a_time
    def compile_new_structure(
        self,
        call: BoundCall,
        modes: Modes,
        values: AttributeValues,
        current: ValueOf,
        *,
        barely: bool,
    ) -> Program:
        """Plan, commit and lower a call of a new structure, with placed weights where they are.

        ``barely``: plan for this call alone, without room for its cache to grow. If False, the caller retries
        a call that has no room: weights move, or it is planned barely. ``values`` and ``current`` are as in
        :meth:`ModelCopy.enter`.
        """
        self.model_copy.enter(modes, values, current)
        placed_before = self.homes is not None
        aheads = None if barely else self.aheads(call)
        planned = self.plan(call, aheads, caller_retries=not barely)
        self.commit(planned)
        program = self.lower(planned)
        if placed_before:
            self._warn_of_slow_call(planned.plan, call)
        return program

    def _warn_of_slow_call(self, plan: Plan, call: BoundCall) -> None:
        """Warn once, before it runs, that such calls are slow: the weights leave too little memory free."""
        warned, noticed = self.model_copy.warned, plan.makespan > _NOTICED
        if noticed and (key := f"a slow call of {call.entry!r}") not in warned and is_very_slow(plan):
            warned.add(key)
            both = ", or with calls= for both" if self.options.training is None else ""
            warn(
                f"a call with other inputs ({shapes_text(call)}) is estimated to take {plan.makespan:.2g} "
                f"s, or {seconds_with_room(plan):.2g} s if the weights left more memory free. The weights "
                "were placed for an earlier call: partition the model with an example of this call, on the "
                f"same device{both}"
            )

    def _warn_of_faster_cpu(self, choices: Sequence[Choice]) -> None:
        """Warn once if everything on the CPU is much faster than a plan without offload."""
        warned, problems = self.model_copy.warned, [choice.problem for choice in choices]
        cpu, planned = self.topology.cpu, math.fsum(one.call.weight * one.seconds for one in choices)
        if cpu is None or not all(p.offload and not p.balance for p in problems) or _FASTER_CPU in warned:
            return
        on_cpu = [evaluate(problem, on_one_device(problem, cpu)) for problem in problems]
        alone = math.fsum(c.call.weight * e.seconds for c, e in zip(choices, on_cpu, strict=True))
        feasible = all(e.feasible and {*e.assignment.operations.values()} <= {cpu} for e in on_cpu)
        if feasible and planned > max(_MUCH_FASTER * alone, _NOTICED):
            warned.add(_FASTER_CPU)
            warn(
                f"the plan is estimated to take {planned:.2g} s, everything on the CPU {alone:.2g} s. Where "
                "the accelerators hold the model, the CPU computes nothing: to run all of it there, give "
                "max_memory the CPU alone"
            )

    @property
    def _formulation(self) -> Formulation:
        return Formulation(self.topology, self.options, self.committed, self.mappable)

    def _run_passes(self, state: CompileState) -> list[Choice]:
        if self.given_plan is None or self.homes is not None:
            return check_budgets(place_step(reuse_slices(state)))
        return check_budgets(place_as_planned(state, self.given_plan))

    def _place(self, members: Sequence[Member], limits: Limits) -> list[Planned]:
        """Place the calls; if nothing is found by the deadline, search on until something is."""
        enter_stage("search")
        state = CompileState(self._formulation, members, limits)
        choices = None
        if limits.deadline is not None:
            timed = replace(limits, advises=False, caller_retries=True)
            with suppress(InfeasibleError):  # an error costs the caller more than a longer search
                choices = self._run_passes(replace(state, limits=timed))
            state = replace(state, limits=replace(limits, deadline=None, proves=False))
        if choices is None:
            choices = self._run_passes(state)
        for choice in choices:
            _refuse_shared(choice.problem.graph, self.model_copy, placed=self.homes is not None)
        if self.homes is None:
            self._warn_of_faster_cpu(choices)
        return [Planned(one.member.annotator.capture, plan_of(one), one.member.call) for one in choices]


def _preferred(planned: Planned, roomier: Planned | None) -> Planned:
    """Return the roomier plan, unless there is none or the other is faster by more than ``_WORTH``."""
    if roomier is None or _WORTH * slowness(planned.plan) < slowness(roomier.plan):
        return planned
    return roomier


def check_budgets(choices: list[Choice]) -> list[Choice]:
    """Pass: prove that each schedule is valid within the budgets; raise VerificationError otherwise."""
    for choice in choices:
        check_schedule(choice.problem.graph, choice.problem.topology, choice.solution.evaluation.schedule)
    return choices


def plan_of(choice: Choice) -> Plan:
    """Return the plan of a choice; its proof says if the bound holds only for weights fixed before."""
    evaluation, call, bound = choice.solution.evaluation, choice.call, choice.solution.bound
    proof = bound.text.removesuffix(_SETTLED)
    return Plan(
        graph=choice.problem.graph,
        topology=choice.problem.topology,
        schedule=evaluation.schedule,
        makespan=evaluation.seconds,
        lower_bound=bound.seconds,
        proof=proof + _SETTLED if call.problem.fixed_weights else proof,
        method=choice.member.annotator.capture.method,
        constraints=call.constraints,
        fixed_weights=call.problem.fixed_weights,
        call_weight=call.weight,
        shared_prefetch_bytes=call.problem.prefetch_bytes,
        prefetch_limits=call.problem.prefetch_limits,
        streaming=call.problem.streaming,
    )


def _refuse_shared(graph: Graph, model_copy: ModelCopy, *, placed: bool) -> None:
    """Raise if forward writes to a weight that shares memory with another: each is placed by itself."""
    kind = CaptureError if placed else NoGraphError  # hooks keep views together only in a first placement
    for weight in graph.weights.values():
        if weight.mutated and weight.kind != "cache" and (others := model_copy.weights.sharing(weight.name)):
            raise kind(
                f"forward writes to {weight.name!r}, which shares memory with {others[0]!r}: create one of "
                "them as a view inside forward, so that both see the write"
            )
