"""The gain of an improvement, and the bottleneck of a plan: figures and text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from graphplan.devices.topology import DeviceKey
from graphplan.message_text import size_text
from graphplan.report.text import device_text, table_lines, time_text

Resource = Literal["memory", "link", "speed"]


@dataclass(frozen=True, slots=True)
class Growth:
    """The gain of one improvement.

    Attributes:
        what: ``"memory"`` of a device, ``"link"`` between two, or ``"speed"`` of a device.
        devices: the key of the device, or those of the link's ends.
        like: keys of identical devices, for which the same holds.
        increase: bytes to add to the budget: for the answer the fewest that give its whole gain, for
            others those that the placement found needs. 0 for a link or a device, which becomes twice as
            fast.
        makespan: estimated seconds of the plan with the improvement.
        gain: seconds that it saves (for all but the answer: at least); 0 where it saves none.
        trials: bytes added -> estimated seconds, in the order of the bytes.
    """

    what: Resource
    devices: tuple[DeviceKey, ...]
    like: tuple[DeviceKey, ...]
    increase: int
    makespan: float
    gain: float
    trials: tuple[tuple[int, float], ...] = ()

    @property
    def amount(self) -> str:
        """The size of the improvement, as text."""
        if self.what != "memory":
            return "twice"
        return f"+{size_text(self.increase)}" if self.increase else "any"  # no amount saves time

    def __str__(self) -> str:
        if self.what == "memory":
            return f"{size_text(self.increase)} more memory on {device_text(self.devices[0])}"
        if self.what == "link":
            ends = " and ".join(map(device_text, self.devices))
            return f"a link between {ends} that is twice as fast"
        return f"{device_text(self.devices[0])} twice as fast"

    @property
    def saving(self) -> str:
        """The time that it saves, as a sentence."""
        share = 100 * self.gain / (self.makespan + self.gain)
        return f"{self} would save {time_text(self.gain)} ({share:.1f} %)"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Which budget, link or device limits a plan most.

    Attributes:
        answer: the improvement that saves most: more memory if that helps at all, since a budget may be
            increased on the same machine; else a faster link or device. None if nothing helps.
        binds: whether more memory would help.
        growths: all improvements that were tried, the most useful first.
        makespan: estimated seconds of the plan; with ``calls=`` the weighted sum, as all below.
        compute_seconds: seconds of all operations.
        transfer_seconds: seconds of transfers of activations and gradients between devices.
        streaming_seconds: seconds in which the plan only copies weights, or waits for streamed ones.
        io_seconds: seconds of copies of inputs and outputs. These four add up to the makespan.
        hidden_seconds: seconds of weight streaming that overlap with other work, and cost nothing.
    """

    answer: Growth | None
    binds: bool
    growths: tuple[Growth, ...]
    makespan: float
    compute_seconds: float
    transfer_seconds: float
    streaming_seconds: float
    io_seconds: float
    hidden_seconds: float

    @property
    def gain(self) -> float:
        """Seconds that the answer saves."""
        return 0.0 if self.answer is None else self.answer.gain

    @property
    def headline(self) -> str:
        """The answer as a sentence."""
        if self.answer is None:
            return "no change that was tried saves time"
        return self.answer.saving if self.binds else f"no budget is binding; {self.answer.saving}"

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        parts = (
            f"the plan takes {time_text(self.makespan)}: {time_text(self.compute_seconds)} compute, "
            f"{time_text(self.transfer_seconds)} transfers, "
            f"{time_text(self.streaming_seconds)} weight streaming, "
            f"{time_text(self.io_seconds)} inputs and outputs"
        )
        if self.hidden_seconds:
            parts += f"; {time_text(self.hidden_seconds)} of streaming are hidden"
        rows = [
            [
                growth.what,
                " - ".join(map(str, growth.devices)),
                growth.amount,
                time_text(growth.makespan),
                time_text(growth.gain),
                f"the same on {', '.join(map(str, growth.like))}" if growth.like else "",
            ]
            for growth in self.growths
        ]
        header = ["more", "of", "by", "time", "saves", ""]
        return "\n".join([self.headline, parts, "", *table_lines(header, rows)])
