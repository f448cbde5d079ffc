"""Routes accept only calls that binding and flattening treat in the same way."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from builders import largest_difference
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphplan
from graphplan.capture.signature import (
    BoundCall,
    InputSignature,
    TensorLeaf,
    bind_call,
    leaf_names,
    same_constant,
)
from graphplan.capture.structure import leaves_of
from graphplan.runtime.module import dispatch
from graphplan.runtime.module.dispatch_cache import Route, find_route

CPU = torch.device("cpu")


def forward(
    a: Any, b: Any = None, /, c: Any = 1, *rest: Any, flag: Any = False, size: Any = 0.0, **more: Any
) -> None:
    """Arguments of many kinds."""


SIGNATURE = inspect.signature(forward)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    makers = (
        lambda: torch.zeros(2, 3),
        lambda: torch.zeros(2, 3),
        lambda: torch.zeros(3, 2).t(),
        lambda: torch.zeros(2, 3, dtype=torch.long),
        lambda: torch.zeros(2, 4),
        lambda: torch.zeros(()),
        lambda: torch.zeros(2, 3, device="meta"),
    )
    return st.sampled_from(makers).map(lambda make: make())


LEAVES = tensors() | st.sampled_from(
    [None, 0, 1, 0.0, 1.0, -0.0, False, True, "x", torch.float32, float("nan")]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["p", "q", 1, True]), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(["c", "flag", "size", "other"])
CALLS = st.tuples(
    st.lists(VALUES, min_size=1, max_size=4), st.dictionaries(NAMES, VALUES, max_size=2)
).filter(lambda call: not (len(call[0]) > 2 and "c" in call[1]))


def signature_of(call: BoundCall) -> InputSignature:
    leaves = tuple(
        TensorLeaf(x.dtype, tuple(x.shape), (), None if x.is_contiguous() else x.stride())
        if isinstance(x, torch.Tensor)
        else x
        for x in call.leaves
    )
    return InputSignature(call.spec, leaves, leaf_names(call))


def route_of(args: list[Any], kwargs: dict[str, Any]) -> tuple[Route | None, InputSignature]:
    signature = signature_of(bind_call(SIGNATURE, args, kwargs))
    return find_route(SIGNATURE, signature, args, kwargs), signature


def assert_agrees(route: Route, signature: InputSignature, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the route accepts the call; if so, binding must yield the same leaves."""
    leaves = route.leaves(args, kwargs, CPU)
    if leaves is None:
        return False
    call = bind_call(SIGNATURE, args, kwargs)
    assert signature.mismatch(call) is None
    assert call.device in (None, CPU)
    assert len(leaves) == len(call.leaves)
    for ours, theirs in zip(leaves, call.leaves, strict=True):
        assert ours is theirs or (type(ours) is type(theirs) and ours == theirs)
    return True


def test_call_device_is_that_of_the_first_argument() -> None:
    here, away = torch.zeros(2, 3), torch.zeros(2, 3, device="meta")
    route, signature = route_of([[]], {"flag": here, "c": away})  # c comes before flag
    assert route is not None
    assert not assert_agrees(route, signature, [[]], {"flag": here, "c": away})
    assert assert_agrees(route, signature, [[]], {"flag": away, "c": here})


@given(CALLS, CALLS)
def test_route_accepts_only_calls_of_its_structure(first: Any, second: Any) -> None:
    route, signature = route_of(*first)
    if route is not None:
        assert_agrees(route, signature, *second)


@given(CALLS, st.data())
def test_route_rejects_altered_calls(call: Any, data: Any) -> None:
    args, kwargs = call
    route, signature = route_of(args, kwargs)
    if route is None:
        return
    flat = bind_call(SIGNATURE, args, kwargs)
    own = assert_agrees(route, signature, args, kwargs)
    nans = any(isinstance(leaf, float) and leaf != leaf for leaf in flat.leaves)
    assert own or flat.device not in (None, CPU) or nans
    altered, named = list(args), dict(kwargs)
    place = data.draw(st.sampled_from([*range(len(altered)), *named]))
    value = data.draw(VALUES)
    if isinstance(place, int):
        altered[place] = value
    else:
        named[place] = value
    assert_agrees(route, signature, altered, named)


@given(st.permutations(["flag", "size", "other"]), st.permutations(["flag", "size", "other"]))
def test_keywords_in_another_order_agree_with_binding(first: list[str], second: list[str]) -> None:
    values = {name: torch.zeros(2, 3) for name in first}
    route, signature = route_of([1.5], values)
    assert route is not None
    assert_agrees(route, signature, [1.5], {name: values[name] for name in second})


def test_repeated_tensor_is_bound_as_one() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    route, _ = route_of([x], {"other": x, "flag": x})
    assert route is not None
    leaves = route.leaves([x], {"other": y, "flag": x}, CPU)
    assert leaves is not None
    call = bind_call(SIGNATURE, [x], {"other": y, "flag": x})
    assert all(ours is theirs for ours, theirs in zip(leaves, call.leaves, strict=True))


@pytest.mark.parametrize("value", [object(), {1, 2}, range(3), torch.zeros(1).numpy()])
def test_objects_of_other_classes_have_no_route(value: Any) -> None:
    assert route_of([torch.zeros(2, 3), value], {})[0] is None


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(
        self, x: torch.Tensor, parts: Any = None, *, scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> Any:
        y = self.layer(x) * scale
        for part in (parts or {}).values():
            y = y + part
        return {"y": y if mask is None else y * mask, "scale": scale}


def test_calls_of_many_structures_equal_eager_mode() -> None:
    model, x = Many(), torch.randn(2, 3)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((), {"x": x}),
        ((x,), {"scale": 1.0}),
        ((x,), {"scale": 2.0}),
        ((x,), {"mask": x}),
        ((x, None), {"mask": x}),
        ((x, {"p": x}), {}),
        ((x, {"q": x}), {}),
        ((x,), {"mask": x, "parts": {"p": x, "q": x + 1}}),
        ((x[:1],), {}),
        ((x.t().contiguous().t(),), {}),
    ]
    for _ in range(3):
        for args, kwargs in calls:
            with torch.no_grad():
                assert largest_difference(placed(*args, **kwargs), model(*args, **kwargs)) < 1e-6
    programs = len(placed.plans)
    assert programs == 7  # those that differ in name, default or batch alone are one
    with pytest.raises(graphplan.InputError):
        placed(x, None, None)


@pytest.mark.slow
def test_route_accepts_caches_of_its_structure() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.ones(1, 3, dtype=torch.long)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs={"input_ids": ids})

    def cache(length: int) -> Any:
        with torch.no_grad():
            return model(ids[:, :1].expand(1, length)).past_key_values

    def compare(length: int) -> None:
        inputs = {"input_ids": ids[:, :2]}
        with torch.no_grad():
            ours = placed(**inputs, past_key_values=cache(length))
            theirs = model(**inputs, past_key_values=cache(length))
        assert largest_difference(ours.logits, theirs.logits) < 1e-5
        assert ours.past_key_values.get_seq_length() == length + 2

    for length in (3, 3, 4, 3):
        compare(length)
    assert len(placed.plans) == 2  # one serves caches of all lengths
    routes, host = [known.route for known in placed._graphplan.routes], torch.device("cpu")
    inputs = {"input_ids": ids[:, :2], "past_key_values": cache(3)}
    (taken,) = [route for route in routes if route.leaves((), inputs, host) is not None]
    leaves = leaves_of(inputs)
    found = taken.leaves((), inputs, host)
    assert found is not None
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    inputs["past_key_values"].layers[0].is_initialized = False
    assert taken.leaves((), inputs, host) is None
    inputs["past_key_values"] = cache(3)
    inputs["past_key_values"].layers.pop()
    assert taken.leaves((), inputs, host) is None
    inputs["past_key_values"] = cache(3)
    inputs["past_key_values"].added = 1
    assert taken.leaves((), inputs, host) is None


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: float = 0.0) -> torch.Tensor:
        return torch.atan2(x * self.weight, torch.full_like(x, y))


@pytest.mark.parametrize("examples", [(torch.zeros(2),), (torch.zeros(2), 1.0), (torch.zeros(2), -0.0)])
def test_positive_and_negative_zero_are_different_constants(examples: tuple[Any, ...]) -> None:
    model, x = Turns(), torch.zeros(2)
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, examples)
        for _ in range(2):
            for y in (0.0, -0.0, 1.0):
                assert torch.equal(placed(x, y), model(x, y))


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_arrays_are_equal_constants_if_bytes_are() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: Any = None) -> torch.Tensor:
            return x if by is None else x * float(by.sum())

    x = torch.ones(2)
    placed = graphplan.partition(Scaled(), {"cpu": "1GiB"}, (x,))
    for by in (np.ones(3), np.ones(3), np.zeros(3), np.ones((3, 1)), np.ones(3, dtype=int)):
        assert torch.equal(placed(x, by), Scaled()(x, by))  # a ValueError
    assert not same_constant(np.ones(3), np.ones(3, dtype=int))
    assert not same_constant(np.zeros(1), -np.zeros(1))


def test_route_depends_on_modes_and_device() -> None:
    class Modes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if self.training else x - 1

    model, x = Modes().eval(), torch.zeros(3)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,))
    for _ in range(2):
        assert torch.equal(placed.eval()(x), x - 1)
        assert torch.equal(placed.train()(x), x + 1)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(Many(), machine.max_memory, (torch.randn(2, 3),))
        for _ in range(2):
            for device in ("cpu", "sim:0"):
                assert placed(torch.randn(2, 3).to(device))["y"].device.type == torch.device(device).type
        assert len(placed.plans) == 2


def test_route_depends_on_default_dtype() -> None:
    class Ones(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.ones(3).to(torch.float32)

    x = torch.zeros(3)
    placed = graphplan.partition(Ones(), {"cpu": "1GiB"}, (x,))
    try:
        for dtype in (torch.float64, torch.float32) * 2:
            torch.set_default_dtype(dtype)
            assert placed(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_small_calls_use_the_first_plan_after_large_ones() -> None:
    """The plan of the large call streams weights or computes on the CPU; those of small ones do not."""
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.ReLU()))).eval()
    with graphplan.simulate({0: "700KiB"}) as machine:
        placed: Any = graphplan.partition(
            model, {**machine.max_memory, "cpu": "64MiB"}, (torch.randn(2, 256),)
        )
        gc.disable()  # what a larger prefetch buffer takes the place of goes at once
        try:
            for rows in (2, 3, 700, 4):
                placed(torch.randn(rows, 256))
        finally:
            gc.enable()
        _, small, large = placed.plans
        assert small.makespan < large.makespan
        routes = placed._graphplan.routes_by_size.values()
        assert [[route.index for route in known] for known in routes] == [[0], [1], [2], [1]]


def test_many_sizes_are_routed_at_the_first_attempt(monkeypatch: Any) -> None:
    model = nn.Linear(4, 4).eval()
    inputs = [torch.ones(size, 4) for size in range(1, 41)]
    with graphplan.simulate({0: 1 << 20}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed: Any = graphplan.partition(model, {0: 1 << 20}, (inputs[0],))
        for x in inputs:
            placed(x)
        tried: list[int] = []
        routed = dispatch._ProgramSearch.routed
        monkeypatch.setattr(
            dispatch._ProgramSearch, "routed", lambda own, known: tried.append(0) or routed(own, known)
        )
        for x in inputs:
            assert largest_difference(placed(x), model(x)) < 1e-6
    assert len(tried) == len(inputs)


@pytest.mark.parametrize("streams", [False, True])
def test_number_of_programs_is_limited(streams: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(dispatch, "_MAX_PROGRAMS", 3)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).eval()
    options = {"pin": {f"{i}.weight": "cpu" for i in range(4)}, "cpu_compute": False} if streams else {}
    with torch.no_grad(), graphplan.simulate({0: 16384, "cpu": 1 << 20}) as machine:
        placed: Any = graphplan.partition(
            model, machine.max_memory, (torch.ones(1, 16),), dynamic_shapes={"input": None}, **options
        )
        for size in (2, 3):
            placed(torch.ones(size, 16))
        gc.collect()
        before, homes = machine.live_bytes(0), placed.plan.placement
        for size in (4, 5, 6, 1, 2, 3, 2):
            x = torch.ones(size, 16)
            if size in (4, 1):
                with pytest.warns(graphplan.GraphplanWarning, match="dynamic_shapes"):
                    result = placed(x)
            else:
                result = placed(x)
            assert largest_difference(result, model(x)) < 1e-6
            assert len(placed.plans) <= 3
            assert machine.peak_bytes(0) <= 16384
        gc.collect()
        assert (machine.live_bytes(0), placed.plan.placement) == (before, homes)


def test_infeasible_larger_plan_frees_the_inputs() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval()
    room = graphplan.plan(model, {0: "1GiB"}, (torch.ones(6, 256),)).peak_bytes[0]
    with torch.no_grad(), graphplan.simulate({0: room}) as machine:
        placed: Any = graphplan.partition(model, machine.max_memory, (torch.ones(2, 256),))
        x = torch.ones(5, 256)
        gone = weakref.ref(x)
        gc.disable()
        try:
            placed(x)
            del x
            assert gone() is None
        finally:
            gc.enable()
