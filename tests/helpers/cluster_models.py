"""Plain modules with skips, for the tests of several machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16), (16, 16)))
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((32, 16), (24, 8), (11, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [x]
        for conv in self.down:
            skips.append(torch.relu(conv(skips[-1])))
        h = skips.pop()
        for conv in self.up:
            h = torch.relu(conv(torch.cat([h, skips.pop()], 1)))
        return h


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16 * (i + 1), 16) for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.relu(layer(torch.cat(seen, -1))))
        return torch.cat(seen, -1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.left(x), self.right(y)
        return {"out": self.head(torch.cat([a, b], -1)), "left": a, "input": y}


class SharedWeight(nn.Module):
    """The embedding is also the head: both ends of the pipeline read it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.table(ids) * scale
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.head(h)


class Views(nn.Module):
    """Sizes, views and values that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("bias", torch.arange(12.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x).view(x.size(0), 3, 4).transpose(1, 2)
        h = h + self.bias.view(4, 3)
        h = h.reshape(x.size(0), -1)
        h += 1
        late = torch.sigmoid(h)
        return self.second(h) * late, late.t().contiguous().t()


class EarlyViews(nn.Module):
    """Views of weights, of a buffer and of the input are taken first; both ends read the first weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(6))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [weight.t() for weight in self.weights]
        again = [view.unsqueeze(0).transpose(1, 2).reshape(16, 16) for view in views[:3]]
        scale, start = self.scale.view(2, 16)[1], x[:, :1].expand(-1, 16)
        for view in views:
            x = x + torch.tanh(x @ view)
        return (x @ again[0] + x @ again[2]) * scale + start


PLAIN: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "UNet": lambda: (UNet(), {"x": torch.randn(4, 3, 8, 8)}),
    "DenseNet": lambda: (DenseNet(), {"x": torch.randn(4, 16)}),
    "Branches": lambda: (Branches(), {"x": torch.randn(4, 16), "y": torch.randn(4, 16)}),
    "SharedWeight": lambda: (SharedWeight(), {"ids": torch.randint(0, 50, (4, 6)), "scale": 0.5}),
    "Views": lambda: (Views(), {"x": torch.randn(4, 12)}),
    "EarlyViews": lambda: (EarlyViews(), {"x": torch.randn(4, 16)}),
}


class Stopped(nn.Module):
    """Layers of which no gradient reaches the first three; or all are reached, past a conjugated value; or
    the first is not, and what it returns is only compared later.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and (self.how != "no_grad" or index > 2)):
                x = torch.tanh(layer(x)) + x
            if index == 2 and self.how == "detach":
                x = x.detach()
            if index == 0:
                mirrored, first = torch.view_as_complex(x.reshape(-1, 8, 2)).conj(), x
                x = x.detach() if self.how == "compared" else x
        if self.how == "compared":
            return x * (first > 0)
        return x + torch.view_as_real(mirrored.resolve_conj()).flatten(1) if self.how == "conjugated" else x
