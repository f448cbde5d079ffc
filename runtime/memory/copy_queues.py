"""The copy queue and the compute queue of an accelerator, and events by which one waits for the other.

Copies have their own queue, so that they overlap with computation. The host enqueues, and waits for neither.
"""

from __future__ import annotations

from typing import Any

import torch


class Queues:
    """The copy queue and the compute queue of a device without streams: everything runs synchronously.

    :class:`CudaQueues` is for devices with streams.
    """

    def event(self) -> Any:
        """Return an event to record and to wait for; waiting for one that was never recorded does nothing."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from the host."""
        target.copy_(source)

    def record_copies(self, event: Any) -> None:
        """Record the event after all copies enqueued so far."""

    def record_work(self, event: Any) -> None:
        """Record the event after all computation enqueued so far."""

    def copies_wait(self, event: Any) -> None:
        """Let later copies wait for the event."""

    def work_waits(self, event: Any) -> None:
        """Let later computation wait for the event."""

    def adopt_current_stream(self) -> None:
        """Make the current stream the compute queue; it waits for the work of the previous one."""

    def copies_wait_for_all_work(self) -> None:
        """Let later copies wait for all computation enqueued so far."""

    def synchronize_event(self, event: Any) -> None:
        """Let the host wait for an event."""

    def synchronize(self) -> None:
        """Let the host wait for all copies and computation, before memory that they use is freed."""


class CudaQueues(Queues):
    """A side stream for copies; computation goes to the stream that is current when it is enqueued."""

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

    def adopt_current_stream(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != self.last:
            current.wait_stream(self.last)
            self.last = current

    def copies_wait_for_all_work(self) -> None:
        self.copies.wait_stream(self.last)

    def synchronize_event(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self.copies.synchronize()
        self.last.synchronize()  # ``adopt_current_stream`` has it wait for earlier streams


def queues_of(device: torch.device) -> Queues:
    """Return the queues for a device."""
    return CudaQueues(device) if device.type == "cuda" else Queues()
