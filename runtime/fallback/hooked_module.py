"""A model that accelerate's hooks run: what is left where no graph of a call can be had."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphplan.capture.shared_attributes import copy_to_run, of_class
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.fallback.short_names import ShortNames, made_class, unplaced
from graphplan.runtime.memory.shared_memory import join_memory
from graphplan.runtime.weights.storage import named_tensors
from graphplan.runtime.weights.weight_changes import KeptInPlace
from graphplan.warnings import silenced, unwarned


@dataclass(frozen=True, slots=True)
class _Hooked:
    """What a hooked module keeps beside the model's own attributes: what :func:`dispatch` was given.

    Attributes:
        devices: module or tensor -> where it lives.
        main: the device that runs what lives on the CPU.
        plan: of modules.
        reason: why there are hooks.
        keep_grad: whether calls keep autograd alive.
        home: whether results of modules go back to where their inputs came from.
        added: names of attributes that accelerate has put on modules.
    """

    devices: Mapping[str, torch.device]
    main: torch.device
    plan: PlanData
    reason: str
    keep_grad: bool
    home: bool
    added: frozenset[str]


class HookedView:
    """What a module that hooks run says of itself."""

    def __init__(self, module: Any) -> None:
        self._known: _Hooked = vars(module)["_graphplan"]

    @property
    def plan(self) -> PlanData:
        """The plan: of modules, not of operations."""
        return self._known.plan

    @property
    def plans(self) -> tuple[PlanData, ...]:
        """The one plan, for calls of any structure."""
        return (self.plan,)

    @property
    def graph_modules(self) -> tuple[Any, ...]:
        """None: there is no generated code."""
        return ()

    @property
    def code(self) -> str:
        """There is none.

        Raises:
            PlanError: always; it says why.
        """
        raise PlanError(f"there is no generated code, hooks run the model: {self._known.reason}")

    def profile(self, *_args: Any, **_kwargs: Any) -> Any:
        """There is no graph to measure node by node.

        Raises:
            PlanError: always; it says why.
        """
        raise PlanError(f"there is no graph to profile, hooks run the model: {self._known.reason}")


class HookedModule(ShortNames, KeptInPlace):
    """What :func:`graphplan.partition` makes of a model that cannot be captured."""

    _graphplan: _Hooked
    _graphplan_view = HookedView

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            PlanError: autocast is on, and simulated devices have none.
        """
        known = self._graphplan
        if torch.is_autocast_enabled(CPU) and any(d.type == SIMULATED for d in known.devices.values()):
            raise PlanError(
                "autocast is on, and simulated devices have none where accelerate's hooks run the model: "
                "leave the autocast, or convert the model with .to(dtype) before you place it "
                f"({known.reason})"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and known.keep_grad):
            return super().__call__(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; what hooks keep on the CPU is there, and not on the meta device."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, tensor in found.items():
            empty = isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
            if empty and name.startswith(prefix):  # a parent's own are there too
                found[name] = _kept_by_hooks(self, name.removeprefix(prefix))
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As the model's own; values are written to where weights are, also where ``assign`` is true."""
        del assign  # other tensors would be where hooks do not look
        with unwarned("for "):  # that nothing is written to weights on the meta device: it is, below
            found = super().load_state_dict(state_dict, strict)
        with torch.no_grad():
            for name, tensor in named_tensors(self).items():
                if tensor.device.type == "meta" and name in state_dict:
                    _kept_by_hooks(self, name).copy_(state_dict[name])
        return found

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _hooked_again, (plain_copy(self), self._graphplan)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        memo[id(self)] = copied = _hooked_again(plain_copy(self), self._graphplan)
        return copied


def plain_copy(module: HookedModule, *, shares: bool = False) -> nn.Module:
    """A copy of the model without hooks, of its own class, with weights on the CPU.

    Args:
        module: the hooked one.
        shares: whether weights that are on the CPU are those of ``module``, not copies.
    """
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in memo:
            value = _kept_by_hooks(module, name) if tensor.device.type == "meta" else tensor
            here = value.detach().to("cpu", copy=not shares)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(here, tensor.requires_grad) if is_parameter else here
    added = module._graphplan.added
    memo |= {id(vars(part)[name]): False for part in module.modules() for name in added & vars(part).keys()}
    plain = copy.deepcopy(unplaced(module), memo)
    for part in plain.modules():
        for name in added & vars(part).keys():
            del vars(part)[name]
    join_memory(module, plain)
    return plain


def _kept_by_hooks(module: nn.Module, name: str) -> torch.Tensor:
    path, _, own = name.rpartition(".")
    hook = getattr(module.get_submodule(path), "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            value: torch.Tensor = weights[own]
            return value
    raise PlanError(f"{name!r} is on the meta device, and no hook has its values")


def dispatch(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    main: torch.device,
    plan: PlanData,
    reason: str,
    *,
    grad: bool,
    home: bool = False,
) -> nn.Module:
    """A copy of ``model`` that accelerate's hooks run.

    Parameters on the CPU are shared with ``model``, buffers are copies.

    Args:
        model: left as it is.
        devices: module or tensor -> where it lives.
        main: the device that runs what lives on the CPU.
        plan: what ``.plan`` says.
        reason: why there are hooks.
        grad: whether calls keep autograd alive.
        home: whether each entry's results go back to where its inputs came from, so that what is computed
            between modules is on one device.
    """
    from accelerate import dispatch_model

    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    copied = copy_to_run(model, memo)
    own = [set(vars(part)) for part in copied.modules()]
    named = {name: str(device) for name, device in devices.items()}
    # offloaded weights are on the meta device, it says; their values are not lost here
    mismatched = unwarned("The following device_map keys do not match")
    with silenced("accelerate.big_modeling", below=logging.ERROR), mismatched:
        skip = getattr(model, "_skip_keys_device_placement", None)
        made: nn.Module = dispatch_model(
            copied, named, main_device=str(main), force_hooks=True, skip_keys=list(skip) if skip else None
        )
        _place_own_tensors(made, {} if home else devices, main)
        if home:
            _send_results_back(made, devices)
    join_memory(model, made)
    added = (vars(part).keys() - names for part, names in zip(made.modules(), own, strict=True))
    made.__dict__["_graphplan"] = _Hooked(
        dict(devices), main, plan, reason, grad, home, frozenset().union(*added)
    )
    return of_class(made, made_class(type(model), HookedModule))


def _hooked_again(plain: nn.Module, known: _Hooked) -> nn.Module:
    return dispatch(
        plain, known.devices, known.main, known.plan, known.reason, grad=known.keep_grad, home=known.home
    )


def _place_own_tensors(model: nn.Module, devices: Mapping[str, torch.device], main: torch.device) -> None:
    """Tensors of modules that the map splits: hooks do not see those that are named one by one."""
    from accelerate.utils import set_module_tensor_to_device

    modules = dict(model.named_modules())
    for name, device in devices.items():
        path, _, own = name.rpartition(".")
        if name in modules or path not in modules:
            continue
        target = main if device.type == "cpu" else device
        if getattr(modules[path], own).device.type != "meta":
            set_module_tensor_to_device(modules[path], own, target)


def _send_results_back(model: nn.Module, entries: Mapping[str, torch.device]) -> None:
    modules = dict(model.named_modules())
    for name in entries:
        hook = getattr(modules.get(name), "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if one is not None:
                one.io_same_device = True
