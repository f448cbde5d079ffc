"""The two queues of an accelerator, and the events by which one waits for the other.

Copies have a queue of their own beside the one for the work of calls, so that they run meanwhile. The
host enqueues, and waits for neither.
"""

from __future__ import annotations

from typing import Any

import torch


class Queues:
    """The queues for copies and for the work of calls: here the host itself, which has done all it was told.

    What devices with streams of their own do, :class:`CudaQueues` does.
    """

    def event(self) -> Any:
        """Something to record and to wait for; waiting for one that was never recorded is nothing."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from the host."""
        target.copy_(source)

    def record_copies(self, event: Any) -> None:
        """The event happens when the copies so far are done."""

    def record_work(self, event: Any) -> None:
        """The event happens when the work so far is done."""

    def copies_wait(self, event: Any) -> None:
        """What is copied from now on follows the event."""

    def work_waits(self, event: Any) -> None:
        """What is worked on from now on follows the event."""

    def enter(self) -> None:
        """A call begins: its work follows that of the call before."""

    def join(self) -> None:
        """What is copied from now on follows all work so far."""

    def wait(self, event: Any) -> None:
        """Let the host wait for an event."""

    def settle(self) -> None:
        """Let the host wait until all copies and all work are done: before memory goes that they use."""


class CudaQueues(Queues):
    """A side stream for copies; work goes to whatever stream is current when it is enqueued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.cuda.Stream(device)
        self.last = torch.cuda.current_stream(device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)

    def record_copies(self, event: torch.cuda.Event) -> None:
        event.record(self.copies)

    def record_work(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self.device))

    def copies_wait(self, event: torch.cuda.Event) -> None:
        self.copies.wait_event(event)

    def work_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def enter(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != self.last:
            current.wait_stream(self.last)
            self.last = current

    def join(self) -> None:
        self.copies.wait_stream(self.last)

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def settle(self) -> None:
        self.copies.synchronize()
        self.last.synchronize()  # the work of calls before it was waited for on the way


def queues_of(device: torch.device) -> Queues:
    """The queues of a device."""
    return CudaQueues(device) if device.type == "cuda" else Queues()
