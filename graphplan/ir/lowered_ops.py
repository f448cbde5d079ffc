"""The operations of lowered graphs that torch does not have, and how methods of streams and parts are called.

Weight streaming, for a weight ``w`` on the CPU that a multiplication on an accelerator reads::

    stream_0 = self._stream_0
    w = self.w
    loaded_0 = stream_0.load(0, w)       # enqueues the copy
    segment_0 = loaded_0.wait()          # later kernels are enqueued behind the copy
    w_on_0 = segment_0[0]
    mm = x_on_0 @ w_on_0
    released_0 = loaded_0.release()      # the slot may be loaded again behind this

A part of a sliced weight is a view of it on the CPU, or a copy that resides on an accelerator::

    w_part = torch.narrow(w, 0, 0, 4096)
    w_part_1 = self._part_1.current(w)   # copied again if w has changed

A value that a CUDA device copies to the CPU is waited for before its first reader there::

    mm_on_cpu = mm.to('cpu', non_blocking=True)   # enqueues the copy, to pinned memory
    mm_arrived = arrived(mm_on_cpu, 'cuda:0')

The backward pass of a training step takes the values that the forward pass has saved, one by one. It adds
gradients to those of the parameters, on their devices; on the CPU, in host memory that is kept for them::

    mm = take_saved(saved, 0)
    mm_1_on_cpu = gradient_to(mm_1, 'cpu', w, self._host_gradients)
    w_gradient = add_gradient(w, mm_1_on_cpu, True, True)

Hooks that run when a gradient has been added may change the parameter, as an optimizer's step does. If the
backward pass still reads the parameter, they run after its last reader, as in autograd::

    w_gradient = add_gradient(w, mm_1_on_cpu, True, False)
    mm_2 = mm @ w_on_0
    w_added = gradient_added(w_gradient, loaded_0)
"""

from __future__ import annotations

from typing import Any

import torch

from graphplan._compat.torch import gradient_hooks, holders_of_storage


def constant_attribute(name: str) -> str:
    """Return the graph module's attribute for a constant of the code."""
    return "_constant_" + name.replace("_", "__").replace(".", "_d")  # distinct for distinct names


def stream_attribute(index: int) -> str:
    """Return the graph module's attribute for the stream of the schedule's prefetch buffer ``index``."""
    return f"_stream_{index}"


def part_attribute(index: int) -> str:
    """Return the graph module's attribute for part ``index`` of the graph's parts."""
    return f"_part_{index}"


GRADIENTS = "_host_gradients"
"""The graph module's attribute for the host memory of gradients."""


def is_bound(attribute: str) -> bool:
    """Whether forward and backward code share an attribute: streams, parts, gradients' host memory."""
    return attribute.startswith(("_stream_", "_part_", GRADIENTS))


def arrived(value: torch.Tensor, device: str) -> torch.Tensor:
    """Return ``value`` once all work on the current stream of the CUDA device that copies it is done."""
    torch.cuda.current_stream(device).synchronize()
    return value


def take_saved(saved: list[Any], index: int) -> Any:
    """Return a value that the forward pass has saved, and drop it from the list."""
    value, saved[index] = saved[index], None
    return value


def keep_on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Keep a value in CPU memory until it is read; this runs on the CPU, on a copy of the value."""
    return value


def gradient_to(gradient: torch.Tensor, _device: str, parameter: torch.nn.Parameter, copies: Any) -> Any:
    """Return a copy of a gradient on the CPU, where its parameter is."""
    return copies.copied(gradient, parameter)


def add_gradient(
    parameter: torch.nn.Parameter, gradient: torch.Tensor, owned: bool, last: bool
) -> torch.nn.Parameter:
    """Add a gradient to that of its parameter, on the parameter's device, as autograd does, hooks included.

    Args:
        parameter: its ``grad`` is changed in place, or set.
        gradient: gradient, of the parameter's shape.
        owned: whether nothing else uses its memory, now or later, so that it need not be copied.
        last: whether the parameter is not read after this; if it is, :func:`gradient_added` follows.
    """
    before, _ = gradient_hooks(parameter)
    if before:
        holders = holders_of_storage(gradient)
        for hook in before:
            changed = hook(gradient.detach())
            if changed is not None:
                gradient, owned = changed, False
        owned = owned and holders_of_storage(gradient) == holders  # no hook has kept it
    held = parameter.grad
    if held is not None:
        held.add_(gradient)
    elif owned and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return gradient_added(parameter) if last else parameter


def gradient_added(parameter: torch.nn.Parameter, *loaded: Any) -> torch.nn.Parameter:
    """Run the hooks for a gradient that has been added, and return the parameter.

    Args:
        parameter: has the gradient.
        loaded: the segments in which it is streamed. Hooks may write to it once these are copied.
    """
    _, after = gradient_hooks(parameter)
    for segment in loaded if after else ():
        segment.await_copy()
    for hook in after:
        hook(parameter)
    return parameter
