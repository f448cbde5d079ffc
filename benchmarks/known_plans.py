"""Plans that the placement benchmark compares with: the best known ones, and those of the prototype."""

from __future__ import annotations

from dataclasses import dataclass

# milliseconds of the best plan known; of the second set, the results file has them
BEST = {
    "llama-8b-two": 38.1915,
    "llama-8b-four": 54.1785,
    "llama-70b": 343.5867,
    "llama-405b": 713.4459,
    "t5": 5.2112,
    "unet": 5.1099,
    "moe-four": 6.8320,
    "moe-cpu": 35.0799,
    "clip": 2.3575,
    "segformer-cpu": 40.9016,
    "segformer-two": 21.3604,
    "llama-8b-streamed": 94.57,
    "deepseek-moe": 25.1309,
    "ten-branches": 3.939,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """What the prototype of the search reached without a time limit.

    Attributes:
        ratio: its time divided by ``BEST``.
        gap: in percent.
        cpu_seconds: of planning.
    """

    ratio: float
    gap: float
    cpu_seconds: float

    def worse(self, ratio: float, gap: float, cpu_seconds: float) -> list[str]:
        """In what these figures are worse; its own are rounded, and CPU times vary by a tenth."""
        found = {
            "plan": ratio > self.ratio + 5e-4,
            "gap": gap > self.gap + 0.05,
            "CPU": cpu_seconds > 1.1 * self.cpu_seconds,
        }
        return [name for name, is_worse in found.items() if is_worse]

    def __str__(self) -> str:
        return f"{self.ratio:.4f}, {self.gap:g} %, {self.cpu_seconds:g} s"


PROTOTYPE = {
    "llama-8b-two": Reference(1.000, 0.3, 0.7),
    "llama-8b-four": Reference(1.000, 4.5, 1.0),
    "llama-70b": Reference(1.0013, 2.6, 2.1),
    "llama-405b": Reference(1.000, 0.6, 1.8),
    "t5": Reference(1.0004, 5.3, 1.0),
    "unet": Reference(1.000, 0.0, 0.3),
    "moe-four": Reference(1.000, 1.5, 0.8),
    "moe-cpu": Reference(1.003, 4.1, 3.4),
    "clip": Reference(1.000, 0.6, 0.4),
    "segformer-cpu": Reference(1.000, 4.7, 3.0),
    "segformer-two": Reference(1.000, 0.05, 0.2),
    "llama-8b-streamed": Reference(1.002, 13.0, 3.3),
    "deepseek-moe": Reference(1.000, 0.0, 1.0),
    "ten-branches": Reference(1.000, 6.0, 0.5),
}
