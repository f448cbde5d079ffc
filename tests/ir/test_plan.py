from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import check_device_map
from plan_fuzz import check_plan
from test_partition import IDS, Tied
from torch import nn

import graphplan
from graphplan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return graphplan.plan(Tied().eval(), {2: "20KiB", 0: "20KiB", 5: "12KiB", "cpu": "1MiB"}, (IDS,))


def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    again.verify()
    assert (again.placement, again.stages, again.peak_bytes) == (plan.placement, plan.stages, plan.peak_bytes)


def test_wrong_makespan_raises(plan: Plan) -> None:
    edited = json.loads(plan.to_json())
    edited["makespan"] *= 2
    with pytest.raises(graphplan.PlanError, match=r"damaged.*but the schedule takes"):
        Plan.from_json(json.dumps(edited))


def test_file_round_trip(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save_json(file)
    assert Plan.load_json(file) == Plan.load_json(str(file)) == plan
    file.write_text("{}")
    for path, message in ((file, r"plan\.json': this JSON holds no plan"), (tmp_path, "cannot be read")):
        with pytest.raises(graphplan.PlanError, match=message):
            Plan.load_json(path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(graphplan.PlanError, match=r"plan\.json' cannot be read: it is not text"):
        Plan.load_json(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not JSON"),
        ("plan.json", "name of a file: read it with load_json, or pass its text"),
        ("[]", "no plan"),
        ("{}", "no plan"),
        ('{"format": "graphplan.cluster_plan"}', r"no plan: .* graphplan\.ClusterPlan reads it"),
        ('{"format": "graphplan.plan", "version": 99}', "version 99"),
        ('{"format": "graphplan.plan", "version": 5}', "damaged"),
    ],
)
def test_invalid_json_raises(text: str, message: str) -> None:
    with pytest.raises(graphplan.PlanError, match=message):
        Plan.from_json(text)


def test_damaged_plan_raises(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    data["topology"]["devices"][0]["memory"] = 1
    with pytest.raises(graphplan.PlanError, match="device 2 needs"):
        Plan.from_json(json.dumps(data))


def damage(plan: Plan, **changes: Any) -> str:
    """A plan's text with other values at these paths."""
    data = json.loads(plan.to_json())
    for path, value in changes.items():
        *way, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        place = data
        for part in way:
            place = place[part]
        place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph__operations__0__inputs": 3}, "3 is no"),
        ({"makespan": float("nan")}, "nan is not of type float"),
        ({"graph__weights__0__nbytes": 1 << 70}, "is not of type int"),
        ({"topology__devices__0__colour": "red"}, "DeviceSpec has no 'colour'"),
        ({"topology__default_link": []}, "is not of type Link"),
        ({"topology__devices__0__bandwidth": 0}, "bandwidth=0, .* positive numbers"),
        ({"topology__devices__1__overhead": -1.0}, "overhead=-1.0.: write positive numbers"),
    ],
)
def test_values_of_other_types_raise(plan: Plan, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(graphplan.PlanError, match=message):
        Plan.from_json(damage(plan, **changes))


def test_groups_are_names_or_lists_of_names(plan: Plan) -> None:
    text = damage(plan, constraints__together=["a", ["b", "c"]])
    assert Plan.from_json(text).constraints.together == ("a", ("b", "c"))


def test_view_of_itself_raises(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    name = data["graph"]["values"][1]["name"]
    data["graph"]["values"][1]["alias_of"] = name
    with pytest.raises(graphplan.PlanError, match="alias of the unknown"):
        Plan.from_json(json.dumps(data))


def test_deeply_nested_json_raises() -> None:
    with pytest.raises(graphplan.PlanError, match="not JSON"):
        Plan.from_json("[" * 100_000)


def test_randomly_damaged_plans_raise_or_verify() -> None:
    checked = [check_plan(seed) for seed in range(150)]
    assert [problem for _, problem in checked if problem] == []
    assert 0 < sum(read for read, _ in checked) < 75


def test_devices_keep_the_callers_keys_and_order(plan: Plan) -> None:
    assert list(plan.devices) == [2, 0, 5, "cpu"]
    assert plan.devices["cpu"] == torch.device("cpu")
    assert set(plan.placement.values()) <= {2, 0, 5, "cpu"}


def test_every_parameter_and_buffer_is_placed(plan: Plan) -> None:
    model = Tied()
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    assert set(plan.placement) == names
    assert plan.placement["head.weight"] == plan.placement["embed.weight"]


def test_stages_cover_the_operations_in_order(plan: Plan) -> None:
    inside = [name for stage in plan.stages for name in stage.operations]
    assert inside == [n for n, op in plan.graph.operations.items() if not op.host_only]
    assert all(a.device != b.device for a, b in zip(plan.stages, plan.stages[1:], strict=False))


def test_device_of_and_stage_of_by_name(plan: Plan) -> None:
    assert plan.device_of("blocks.0.0.weight") == plan.placement["blocks.0.0.weight"]
    assert plan.device_of("blocks.1.0") == plan.stage_of("blocks.1.0").device
    first = plan.stages[0].operations[0]
    assert plan.stage_of(first).index == 0
    with pytest.raises(graphplan.PlanError, match="several devices"):
        plan.device_of("blocks")
    with pytest.raises(graphplan.PlanError, match="no operation, module or weight named 'nonsense'"):
        plan.device_of("nonsense")


def test_operation_that_computes_numbers_is_on_no_device() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(2, x.shape[0] // 2).sum(1)

    plan = graphplan.plan(Halves(), {"cpu": "1MiB"}, (torch.ones(8),))
    numbers = [operation.name for operation in plan.graph.operations.values() if operation.host_only]
    with pytest.raises(graphplan.PlanError, match=f"'{numbers[0]}' computes only numbers"):
        plan.device_of(numbers[0])


def test_byte_totals_equal_the_moves(plan: Plan) -> None:
    assert plan.transfer_bytes == sum(t.nbytes for t in plan.transfers)
    assert plan.streamed_bytes == sum(t.nbytes for t in plan.streams)
    assert {t.kind for t in plan.transfers} <= {"activation"}
    assert 0 <= plan.gap < 1
    assert plan.lower_bound <= plan.makespan
    assert plan.proof


def test_device_map_works_in_accelerate(plan: Plan) -> None:
    device_map = plan.device_map()
    check_device_map(Tied(), device_map)
    for name, key in plan.placement.items():
        if name == "scale":
            continue  # a buffer of the root itself, in no state_dict
        owners = [m for m in device_map if name == m or name.startswith(m + ".") or not m]
        assert [device_map[m] for m in owners] == [key]


def test_device_map_of_one_device() -> None:
    assert graphplan.plan(Tied().eval(), {"cpu": "1GiB"}, (IDS,)).device_map() == {"": "cpu"}


def test_device_map_names_a_modules_own_parameters() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.direct = torch.nn.Parameter(torch.ones(4096))
            self.child = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child(x) + self.direct[:64]

    plan = graphplan.plan(Mixed(), {0: "19KiB", 1: "19KiB"}, (torch.ones(1, 64),))
    with warnings.catch_warnings():  # newer versions of accelerate warn of entries that are not modules
        warnings.filterwarnings("ignore", message=r"[\s\S]*direct", category=UserWarning)
        check_device_map(Mixed(), plan.device_map())
    assert set(plan.device_map()) == {"direct", "child"}


def test_device_map_warns_of_whole_modules_beyond_a_budget() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.ones(64, 64)) for _ in "ab")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.a).relu() @ self.b

    model, x = torch.nn.Sequential(Two()), torch.ones(1, 64)
    plan = graphplan.plan(model, {0: "19KiB", 1: "19KiB", "cpu": "1MiB"}, (x,))
    assert len(set(plan.placement.values())) == 2
    with pytest.warns(graphplan.GraphplanWarning, match=r"on 0 take 32\.0 KiB.* together=\['0'\]"):
        assert plan.device_map() == {"": 0}
    whole = graphplan.plan(model, {0: "19KiB", 1: "19KiB", "cpu": "1MiB"}, (x,), together=["0"])
    assert whole.device_map() == {"": "cpu"}


def test_summary_is_a_table(plan: Plan) -> None:
    text = plan.summary()
    for expected in ("budget", "peak", "20.0 KiB", "stage", "transfers", "of optimal", "blocks"):
        assert expected in text
    assert str(plan) == text
    assert "stages" in repr(plan)


def test_files(plan: Plan, tmp_path: Path) -> None:
    plan.save_json(tmp_path / "plan.json")
    assert Plan.from_json((tmp_path / "plan.json").read_text(encoding="utf-8")) == plan
    plan.save_dot(tmp_path / "plan.dot")
    dot = (tmp_path / "plan.dot").read_text(encoding="utf-8")
    assert dot.startswith("digraph plan {")
    assert dot.count("subgraph cluster_stage_") == len(plan.stages)
    assert dot.count("subgraph cluster_device_") == len({stage.device for stage in plan.stages})
    assert dot.count("{") == dot.count("}")


@pytest.mark.slow
def test_weight_reread_without_an_arriving_value() -> None:
    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(90, 90) for _ in range(12))
            self.last = nn.Parameter(torch.randn(90, 90))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x @ self.last, self.last.square().sum()

    model, x = Regularised(), torch.randn(3, 90)
    for budgets in ({0: 150_000, "cpu": "1GiB"}, {0: 250_000, 1: 250_000, "cpu": "1GiB"}):
        plan = graphplan.plan(model, budgets, (x,))
        plan.verify()
        assert plan.lower_bound <= plan.makespan
