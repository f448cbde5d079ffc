"""``generate()`` of a model over several machines: every rank runs it, the last one chooses the tokens.

Each rank runs transformers' own loop over its own stage and caches. The last rank has the scores: after all
other logits processors it chooses a token and sends it to the others. All ranks go on with scores that allow
only this token. So only hidden states and chosen tokens cross the network.

An encoder runs within the first forward pass, together with the decoder. Until then its inputs stand in for
its outputs. These are sent to all ranks once, since later forward passes take them as inputs.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.transformers import with_last_processor
from graphplan.errors import InputError
from graphplan.runtime.distributed.agreement import broadcast_from_last

_MODES = ("greedy_search", "sample")


def generator_of(
    model: nn.Module, forward: Callable[..., Any], last: int, traffic: Counter[str]
) -> Callable[..., Any] | None:
    """Return the ``generate`` of a model over several machines; None if the model has none.

    Args:
        model: any module, of which only configuration and code are used.
        forward: runs the model over all ranks, as
            :meth:`graphplan.runtime.distributed.cluster_module.ClusterModule.forward_in_place`.
        last: rank of the last stage.
        traffic: name -> bytes, to which the bytes of tokens and encoder outputs are added.
    """
    if not hasattr(model, "generate") or not hasattr(model, "generation_config"):
        return None
    cls = type(model)

    def run(_self: Any, *args: Any, **kwargs: Any) -> Any:
        encoded = kwargs.get("encoder_outputs")
        if not isinstance(encoded, _Unencoded):
            return forward(*args, **kwargs)
        if encoded.outputs is None:
            result = forward(*args, **{**kwargs, "encoder_outputs": None, **encoded})
            encoded.outputs = _broadcast_encoder_output(result, last, traffic)
            return result
        return forward(*args, **{**kwargs, "encoder_outputs": encoded.outputs})

    def choose(generation_config: Any) -> Callable[..., torch.Tensor]:
        _require_simple(generation_config)
        return functools.partial(_choose, last, traffic, sample=bool(generation_config.do_sample))

    body: dict[str, Any] = {
        "forward": functools.wraps(cls.forward)(run),
        "device": property(lambda _: torch.device("cpu")),
        "_valid_auto_compile_criteria": lambda *_: False,
        "__module__": cls.__module__,
    }
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]  # of transformers
        body["get_encoder"] = lambda _: _DeferredEncoder(model.get_encoder())  # type: ignore[operator]
    shell = copy.copy(model)
    shell.__class__ = with_last_processor(type(cls.__name__, (cls,), body), choose)
    generate: Callable[..., Any] = shell.generate  # type: ignore[assignment]  # of transformers
    return generate


class _Unencoded(dict[str, Any]):
    """The inputs of an encoder in place of its outputs; generate() may repeat their rows."""

    outputs: Any = None


class _DeferredEncoder:
    """Stands in for the encoder that generate() calls."""

    def __init__(self, encoder: nn.Module) -> None:
        self.forward = encoder.forward  # for its signature

    def __call__(self, **inputs: Any) -> _Unencoded:
        return _Unencoded({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})


def _require_simple(config: Any) -> None:
    """Raise InputError for options that need more than the chosen tokens on all ranks."""
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in _MODES:
        raise InputError(
            f"generate() over several machines only decodes greedily or samples, and {mode!r} needs all "
            "scores on all machines: give num_beams=1, and do_sample=True with num_return_sequences= for "
            "several texts"
        )
    outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    requested = [name for name in outputs if getattr(config, name, False)]
    if requested:
        raise InputError(f"{requested[0]}: generate() over several machines returns only tokens")


def _choose(
    last: int, traffic: Counter[str], _input_ids: torch.Tensor, scores: torch.Tensor, *, sample: bool
) -> torch.Tensor:
    """Return scores that allow only the token that the ``last`` rank chooses, or draws if ``sample``.

    ``scores`` are the (batch, vocabulary) scores of the next token, after all other processors.
    """
    tokens = torch.zeros(scores.shape[0], dtype=torch.int64)
    if dist.get_rank() == last:
        if sample:  # the loop draws again from the returned scores, with the same random numbers
            state = torch.get_rng_state()
            tokens = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
            torch.set_rng_state(state)
        else:
            tokens = scores.argmax(-1)
        traffic["tokens"] += tokens.nbytes
    broadcast_from_last(tokens, last, "the next token")
    return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def _broadcast_encoder_output(result: Any, last: int, traffic: Counter[str]) -> Any:
    """Return the encoder's output on all ranks, sent from the last rank, which has it in its result."""
    from transformers.modeling_outputs import BaseModelOutput

    hidden = result.get("encoder_last_hidden_state")
    if hidden is None:
        raise InputError("the model does not return encoder_last_hidden_state, which later passes need")
    if dist.get_rank() == last:
        hidden = hidden.cpu().contiguous()
        traffic["encoder_last_hidden_state"] += hidden.nbytes
    else:
        hidden = torch.empty(hidden.shape, dtype=hidden.dtype)
    broadcast_from_last(hidden, last, "the encoder's result")
    return BaseModelOutput(last_hidden_state=hidden)
