"""Random modules that are trained for three steps: are results, gradients, buffers and parameters eager's?

A seed is a module in float64, with budgets, a way of training, and an optimizer.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from builders import bytes_of, largest_difference
from random_modules import SHARES, Checked
from shortcuts import short_search
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import graphplan

WIDTH = 24
TOLERANCE = 1e-6  # relative to the largest value above 1
WAYS: tuple[dict[str, Any], ...] = (
    {"grad": True},
    {"train": True},
    {"train": True, "accumulate_gradients": False},
)
# with an eps of 1e-8 a step goes by the rounding of gradients that are zero, as after a normalisation
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    partial(torch.optim.AdamW, lr=1e-3, eps=1e-3),
    partial(torch.optim.Adam, lr=1e-3, eps=1e-3, foreach=True),
)
Step = Callable[[Any, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""From the module, the number of the step, the last value and an earlier one to the next."""


def _written(net: Any, i: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    made = other.clone()
    made[0].mul_(0.5)
    made.narrow(1, 5, 3).add_(net.layers[i](last)[:, :3])
    return last + made


def _columns(net: Any, i: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    made = last.new_zeros(last.shape)
    made[:, ::2] = other[:, ::2]
    made[:, [1, 3]] = last[:, [2, 4]]
    return made


def _counted(net: Any, i: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    net.count.add_(1)
    with torch.no_grad():
        net.cache[i % 2].copy_(last[0] * 0.5)
    return last + net.count * 0.01 + net.cache.sum(0)


def _attention(net: Any, i: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    query, key = (x.view(1, len(x), 4, -1).transpose(1, 2) for x in (last, other))
    return functional.scaled_dot_product_attention(query, key, key).transpose(1, 2).reshape(last.shape)


def _checkpointed(net: Any, i: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: torch.tanh(net.layers[i](x)), last, use_reentrant=False)


STEPS: dict[str, Step] = {
    "linear": lambda net, i, x, y: net.layers[i](x),
    "shared": lambda net, i, x, y: net.layers[0](x),
    "normed weight": lambda net, i, x, y: net.normed(x),
    "norm": lambda net, i, x, y: net.norm(x),
    "batch norm": lambda net, i, x, y: net.batch_norm(x),
    "relu in place": lambda net, i, x, y: x.clone().relu_(),
    "halves": lambda net, i, x, y: torch.cat(x.chunk(2, -1)[::-1], -1),
    "add": lambda net, i, x, y: x + y,
    "detach": lambda net, i, x, y: x + net.layers[i](y).detach(),
    "view": lambda net, i, x, y: x.reshape(-1).view_as(x),
    "transpose": lambda net, i, x, y: x.t().contiguous().t(),
    "mask": lambda net, i, x, y: x.masked_fill(y > 0.5, 0.25),
    "where": lambda net, i, x, y: torch.where(x > 0, x, y * 0.5),
    "written": _written,
    "columns": _columns,
    "counted": _counted,
    "embedding": lambda net, i, x, y: x + net.table((torch.arange(len(x), device=x.device) + i) % 7),
    "products": lambda net, i, x, y: (x @ x.t()) @ y * 0.05,
    "softmax": lambda net, i, x, y: functional.softmax(x, -1) * 3,
    "attention": _attention,
    "lstm": lambda net, i, x, y: net.lstm(x.unsqueeze(0))[0].squeeze(0),
    "checkpoint": _checkpointed,
    "weight": lambda net, i, x, y: functional.linear(x, functional.normalize(net.layers[i].weight, dim=1)),
    "slice": lambda net, i, x, y: x @ net.stack[i % 4],
    "gather": lambda net, i, x, y: x.gather(1, y.detach().argsort(-1)),
    "sort": lambda net, i, x, y: x.sort(-1).values.cumsum(-1) * 0.2,
    "complex": lambda net, i, x, y: torch.fft.rfft(x, dim=-1).abs()[:, :12].repeat(1, 2) * 0.2,
    "mode": lambda net, i, x, y: net.layers[i](x) if net.training else y + 1,
}


class TrainedModule(nn.Module):
    """Steps over a growing list of values, of which every second is a result too."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        for layer, (_, pick) in zip(self.layers, steps, strict=True):
            if pick % 4 == 0:
                layer.weight = self.layers[0].weight
            layer.bias.requires_grad_(pick % 7 != 3)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.normed, self.table = weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Embedding(7, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [self.layers[0](x)]
        for i, (name, pick) in enumerate(self.steps):
            values.append(STEPS[name](self, i, values[-1], values[pick % len(values)]))
        return (values[-1], *values[1:-1:2])


def check_training(seed: int) -> Checked:
    """Train the module of a seed, placed and in eager."""
    draw, found = random.Random(seed), Checked()
    steps = [(draw.choice(list(STEPS)), draw.randrange(20)) for _ in range(draw.randint(2, 12))]
    torch.manual_seed(seed)
    model, way = TrainedModule(steps).double().train(draw.random() < 0.8), draw.choice(WAYS)
    share, slack = draw.choice(SHARES), draw.randrange(8_000, 60_000)
    factor = 3 if "train" in way else 1  # gradients, and what the optimizer holds
    budgets = {key: int(part * factor * bytes_of(model)) + slack for key, part in share.items()}
    rows = draw.randint(2, 4)
    batches = [torch.randn(n, WIDTH).double() for n in (rows, rows, rows + draw.randint(0, 1))]
    required, optimizer, eager = draw.random() < 0.3, draw.choice(OPTIMIZERS), copy.deepcopy(model)
    # the loss, the optimizer and what autograd saves are beside the budgets
    machine_has = {key: 3 * size + (1 << 19) for key, size in budgets.items() if key != "cpu"}
    try:
        with short_search(), warnings.catch_warnings(), graphplan.simulate(machine_has):
            warnings.simplefilter("ignore")
            try:
                placed = graphplan.partition(
                    model, budgets, (batches[0].clone().requires_grad_(required),), **way
                )
            except graphplan.InfeasibleError:
                return found
            found.placed = True
            _check_steps(found, placed, eager, optimizer, batches, required=required)
            del placed
        gc.collect()
    except Exception as error:  # any is a finding
        found.violations.append(f"{type(error).__name__}: {error}")
    found.violations[:] = [f"seed {seed}: {text}" for text in found.violations]
    return found


def _check_steps(
    found: Checked,
    placed: nn.Module,
    eager: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: list[torch.Tensor],
    *,
    required: bool,
) -> None:
    both = placed, eager
    optimizers = [optimizer([p for p in one.parameters() if p.requires_grad]) for one in both]
    for step, batch in enumerate(batches):
        given = [batch.clone().requires_grad_(required) for _ in both]
        try:
            results = [one(x) for one, x in zip(both, given, strict=True)]
        except graphplan.InfeasibleError:
            if len(batch) == len(batches[0]):
                found.violations.append(f"step {step}, which was planned for, is refused")
            return
        for result in results:
            sum(part.square().mean() for part in result).backward()
        _compare(found, f"results of step {step}", *results)
        _compare(
            found, f"gradients of step {step}", *(_gradients(*of) for of in zip(both, given, strict=True))
        )
        for one in optimizers:
            one.step()
            one.zero_grad()
        _compare(found, f"state after step {step}", *(dict(one.state_dict()) for one in both))
        found.calls += 1


def _gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def _compare(found: Checked, what: str, ours: Any, theirs: Any) -> None:
    values = theirs.values() if isinstance(theirs, dict) else theirs
    scale = max((float(t.detach().abs().max()) for t in values if t is not None), default=0.0)
    apart = largest_difference(ours, theirs) / max(1.0, scale)
    found.difference = max(found.difference, apart)
    if not apart <= TOLERANCE:
        found.violations.append(f"{what} differ by {apart} from eager's")
