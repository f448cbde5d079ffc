from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from builders import moves_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphplan
from graphplan import simulate
from graphplan.devices.machine import accelerator_type
from graphplan.devices.topology import Link


def test_values_devices_and_bytes() -> None:
    with simulate({0: "1MiB", 3: 4096}) as machine:
        x = torch.randn(10, 10)
        y = x.to("sim:0")
        assert y.device == torch.device("sim:0")
        assert torch.equal((y @ y).cpu(), x @ x)
        gc.collect()
        assert machine.live_bytes(0) == 512
        assert machine.peak_bytes(0) == 1024
        assert y.T[:5].device.index == 0
        assert machine.live_bytes(0) == 512  # views take nothing
        z = y.to("sim:3")
        assert machine.live_bytes(3) == 512
        assert y.to("meta").is_meta  # nothing is copied
        assert moves_of(machine) == [("cpu", 0, 400), (0, "cpu", 400), (0, 3, 400)]
        del y, z
        assert machine.live_bytes(0) == machine.live_bytes(3) == 0
        machine.reset_peaks()
        assert machine.peak_bytes(0) == 0


def test_inference_mode_in_another_thread() -> None:
    """The mode of the simulation is that of the thread that has entered it."""

    def send() -> torch.device:
        with torch.inference_mode():
            return y.to("sim:1").device

    with simulate({0: "1MiB", 1: "1MiB"}), ThreadPoolExecutor(1) as pool:
        y = torch.ones(3, device="sim:0")
        assert pool.submit(send).result() == torch.device("sim:1")


def test_branches_under_a_mode_of_the_user() -> None:
    class Looking(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Looking(), simulate({0: "1MiB"}):  # type: ignore[no-untyped-call]  # torch's
        y = torch.ones(3, device="sim:0")
        (found,) = torch.ops.higher_order.cond(y.sum() > 0, lambda t: (t + 1,), lambda t: (t - 1,), (y,))
        assert found.device == y.device
        assert found.tolist() == [2.0, 2.0, 2.0]


def test_mixed_devices_raise() -> None:
    with simulate({0: "1MiB", 1: "1MiB"}):
        a, b = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
        with pytest.raises(RuntimeError, match=r"same device, but found \['sim:0', 'sim:1'\]"):
            a + b
        with pytest.raises(RuntimeError, match="same device"):
            a + torch.ones(3)
        assert float((a + torch.tensor(1.0)).sum()) == 6  # a zero-dimensional CPU tensor may


def test_exceeding_the_capacity_raises() -> None:
    with simulate({0: 1024}) as machine:
        kept = torch.ones(128, device="sim:0")
        with pytest.raises(
            graphplan.SimulatedOutOfMemoryError, match=r"sim:0 .*1024 bytes.* 512 bytes.*delete"
        ):
            torch.ones(200, device="sim:0")
        assert machine.live_bytes(0) == 512
        assert repr(machine) == "SimulatedMachine(capacities={0: 1024}, cpu_memory=None)"
        del kept


def test_absent_devices_raise() -> None:
    with simulate({1: 1024}) as machine:
        with pytest.raises(graphplan.DeviceError, match="no simulated device sim:0"):
            torch.ones(1, device="sim:0")
        with pytest.raises(graphplan.DeviceError):
            machine.peak_bytes(0)
        with pytest.raises(graphplan.DeviceError, match="device 0"):
            graphplan.partition(nn.Linear(2, 2), {0: "1GiB"}, (torch.ones(1, 2),))


def test_invalid_capacities_raise() -> None:
    with pytest.raises(graphplan.BudgetError, match=r"^capacities is empty"), simulate({}):
        pass
    with pytest.raises(graphplan.DeviceError, match="'cuda:0'"), simulate({"cuda:0": 10}):
        pass
    with simulate({0: 10}), pytest.raises(graphplan.DeviceError, match="inside"), simulate({1: 10}):
        pass


def test_links_and_workspace_are_read_as_in_partition() -> None:
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (graphplan.DeviceError, "links must map .* graphplan.Link", {"links": {(0, "cpu"): 5}}),
        (graphplan.DeviceError, "links names 7, which is not in capacities", {"links": {(0, 7): Link()}}),
        (graphplan.BudgetError, "workspace = 'much' is not a size", {"workspace": "much"}),
    ]
    for kind, message, options in bad:
        with pytest.raises(kind, match=message), simulate({0: "1MiB"}, **options):
            pass
    link = Link(1e9)
    with simulate({0: "1MiB", "cpu:0": "1KiB"}, {(0, "cpu:0"): link}, workspace="8KiB") as machine:
        assert machine.max_memory["cpu"] == 1 << 10
        assert machine.workspace == 8 << 10
        assert graphplan.plan(nn.Linear(4, 4), args=(torch.ones(1, 4),)).topology.link("cpu", 0) is link


def test_integer_keys_are_simulated_devices_only_inside() -> None:
    outside = accelerator_type()
    with simulate({0: 10, "cpu": 7}, {(0, "cpu"): Link(1.0, 2.0)}) as machine:
        assert accelerator_type() == "sim"
        assert machine.max_memory == {0: 10, "cpu": 7}
        assert graphplan.devices.max_memory.read_max_memory(None).link("cpu", 0) == Link(1.0, 2.0)
    assert accelerator_type() == outside


def test_modules_copies_and_gradients() -> None:
    with simulate({0: "1MiB", 1: "1MiB"}):
        layer = nn.Linear(4, 4).to("sim:0")
        model_copy = copy.deepcopy(layer)
        x = torch.randn(2, 4)
        y = model_copy(x.to("sim:0"))
        y.to("sim:1").sum().backward()
        assert layer.weight.grad is None
        assert model_copy.weight.grad is not None
        assert model_copy.weight.grad.device == torch.device("sim:0")
        assert torch.equal(layer(x.to("sim:0")).cpu(), layer.cpu()(x))


def test_torch_tensor_accepts_simulated_scalars() -> None:
    """As Qwen2-VL computes the lengths of its images."""
    with graphplan.simulate({0: "1MiB"}):
        numbers = torch.tensor([3, 4], device="sim:0")
        made = torch.tensor([numbers[1], numbers[0], 5], device="sim:0")
        assert str(made.device) == "sim:0"
        assert made.tolist() == [4, 3, 5]
        assert torch.tensor([numbers[0], 2]).tolist() == [3, 2]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_fused_layers_keep_result_strides(layer: Any) -> None:
    torch.manual_seed(0)
    recurrent, x = layer(8, 16, 2, batch_first=True, bidirectional=True), torch.randn(2, 7, 8)
    with torch.no_grad():
        expected = recurrent(x)[0]
        with graphplan.simulate({0: "1MiB"}):
            found = recurrent.to("sim:0")(x.to("sim:0"))[0]
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
            assert torch.allclose(
                nn.functional.linear(found, found[0]).cpu(), expected @ expected[0].T, atol=1e-5
            )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_gradients_of_recurrent_layers(layer: Any, bias: bool) -> None:
    torch.manual_seed(0)
    recurrent, x = layer(8, 16, 2, bias=bias, bidirectional=True), torch.randn(3, 2, 8)
    found: list[list[torch.Tensor]] = []
    with graphplan.simulate({0: "1MiB"}):
        for device in ("cpu", "sim:0"):
            model, given = copy.deepcopy(recurrent).to(device), x.to(device).detach().requires_grad_()
            result, state = model(given)
            sum((one**3).sum() for one in (result, *state)).backward()  # type: ignore[union-attr]  # tensors
            found.append([one.grad.cpu() for one in (given, *model.parameters())])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


def test_inference_mode_counts_copies_and_makes_views() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        buffer = torch.arange(8.0).to("sim:0")
        with torch.inference_mode():
            moved = torch.arange(8.0).to("sim:0")
            assert moved.device == torch.device("sim:0")
            assert len(machine.transfers) == 2
            assert torch.equal((buffer[2:5] + moved[2:5]).cpu(), torch.arange(8.0)[2:5] * 2)


def test_cpu_inference_tensors_stay_inference_tensors() -> None:
    with torch.inference_mode():
        before = torch.zeros(3)
        with graphplan.simulate({0: "1MiB"}):
            before.add_(1)
            made = torch.ones(3) + before
            assert made.is_inference()
            made.copy_(before.to("sim:0") + 1)
            inside = torch.ones(3, device="sim:0")
            assert torch.equal(made, torch.full((3,), 2.0))
            assert torch.equal(
                inside.add_(before.to("sim:0")).view(1, 3)[:, 1:].cpu(), torch.full((1, 2), 2.0)
            )


def test_out_of_memory_in_backward_raises() -> None:
    """Regression: raised in autograd's thread, the error ended the process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with simulate({0: 90_000}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.randn(4, 64),), grad=True)
        with pytest.raises(graphplan.SimulatedOutOfMemoryError, match="tried to allocate"):
            placed(torch.randn(4, 64)).sum().backward()


def test_sizes_of_packed_sequences_are_on_the_cpu() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 8, batch_first=True), torch.randn(3, 5, 8)
    lengths = torch.tensor([5, 2, 1])

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)

    with torch.no_grad():
        expected = run(x)[0]
        with simulate({0: "1MiB"}):
            layer.to("sim:0")
            found, sizes = run(x.to("sim:0"))
            assert torch.allclose(found.cpu(), expected, atol=1e-6)
            assert sizes.device.type == "cpu"


def test_deepcopied_parameter_has_no_gradient() -> None:
    """As ``nn.Parameter`` behaves; the gradient of other tensors is copied."""
    with simulate({0: "1MiB"}):
        parameter, tensor = nn.Parameter(torch.ones(3, device="sim:0")), torch.ones(3, device="sim:0")
        for one in (parameter, tensor.requires_grad_()):
            one.sum().backward()
        found, other = copy.deepcopy([parameter, tensor])
        assert isinstance(found, nn.Parameter)
        assert found.grad is None
        assert found is not parameter
        assert torch.equal(other.grad.cpu(), torch.ones(3))
        assert copy.deepcopy(parameter, {id(parameter): other}) is other


def test_deepcopies_allocate_memory() -> None:
    # copies of tensors other than parameters took none
    with simulate({0: "1MiB"}) as machine:
        tensor = torch.zeros(1024, device="sim:0")
        assert machine.live_bytes(0) == 4096
        found, part = copy.deepcopy((tensor, tensor[:512]))
        assert machine.live_bytes(0) == 8192
        found.add_(1)
        assert float(part.sum()) == 512  # they share memory, as those of others
        assert float(tensor.sum()) == 0
        del found, part
        assert machine.live_bytes(0) == 4096


def test_fake_tensors_allocate_nothing() -> None:
    with graphplan.simulate({0: 1024}) as machine, FakeTensorMode():
        assert torch.empty(1000, device="sim:0").shape == (1000,)
        assert machine.peak_bytes(0) == 0


@pytest.mark.filterwarnings("ignore:SIM reports")
def test_forked_random_state_is_restored() -> None:
    """Regression: ``torch.random.fork_rng`` failed, since the devices had no random state."""
    with simulate({0: 1024}):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with torch.random.fork_rng():
            torch.rand(3, device="sim:0")
        assert torch.equal(torch.rand(3), expected)
