"""Plain modules of common kinds: convolutions, recurrences, experts, ties, parametrizations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class ConvNet(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.norm_two = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm_one(self.one(x))), 2)
        x = F.max_pool2d(F.relu(self.norm_two(self.two(x))), 2)
        return self.head(x.flatten(1))


class UNet(nn.Module):
    """A skip connection over a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.down(x))
        deep = F.silu(self.norm(self.narrow(wide)))
        deep = deep + F.silu(self.middle(deep))
        return self.out(torch.cat([wide, self.up(deep)], 1))


class Recurrent(nn.Module):
    """An embedding, a GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(50, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, 50),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0])


class Experts(nn.Module):
    """A dense mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)]).sum(0)


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


class Detached(nn.Module):
    """Parts under ``no_grad``, parts detached, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.one(x)
        with torch.no_grad():
            gate = self.two(x)
        return {"y": y * gate.sigmoid() + self.two(y).detach(), "mean": y.mean()}


class InPlace(nn.Module):
    """Writes to its intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y.add_(1)
        y.mul_(2)
        z = self.two(torch.relu_(y.clone()))
        z += x
        return z


class Encoder(nn.Module):
    """torch's own encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Unused(nn.Module):
    """A layer that does not run, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.never = nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.one(x))


class Sequence(nn.Sequential):
    """Layers in a row, called by name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _normed() -> nn.Module:
    return Sequence(weight_norm(nn.Linear(16, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 8)))


def _dropping() -> nn.Module:
    layers = (
        nn.Linear(32, 64),
        nn.Dropout(0.3),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.Dropout(0.1),
        nn.LayerNorm(64),
    )
    return Sequence(*layers, nn.Linear(64, 8))


def _images(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, 3, size, size)


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convnet": (ConvNet, _images(16)),
    "unet": (UNet, _images(16)),
    "gru": (Recurrent, lambda: torch.randint(0, 50, (3, 7))),
    "experts": (Experts, lambda: torch.randn(3, 5, 16)),
    "tied": (Tied, lambda: torch.randint(0, 64, (3, 7))),
    "weight_norm": (_normed, lambda: torch.randn(4, 16)),
    "drop": (_dropping, lambda: torch.randn(8, 32)),
    "detach": (Detached, lambda: torch.randn(4, 16)),
    "in_place": (InPlace, lambda: torch.randn(4, 16)),
    "encoder": (Encoder, lambda: torch.randn(2, 6, 32)),
    "unused": (Unused, lambda: torch.randn(4, 16)),
}


class StoreCache:
    """Keys and values of each layer, in lists, not in a class of transformers."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], 2)
            self.values[layer] = torch.cat([self.values[layer], values], 2)
        return self.keys[layer], self.values[layer]
