"""Find the calls that ``generate`` makes after an example, without computing any of them.

Only transformers' code knows the arguments of a prefill and a decode step. So that code runs on the copy of
the model that is traced. Each of its calls is traced, and returns zeros of the shapes in the trace::

    model.generate(input_ids)
        model(input_ids, attention_mask, use_cache)    traced; returns logits and keys of zeros
        model(token, past_key_values, ...)             traced; returns logits and keys of zeros
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from graphplan.capture.signature import BoundCall
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.compiler.pipeline import Compiler
from graphplan.errors import GraphplanError, NoGraphError
from graphplan.integrations.rehearsal import Rehearsal, Rehearsed, RepeatedCallError
from graphplan.message_text import first_line
from graphplan.warnings import silenced, warn

logger = logging.getLogger("graphplan")

_TOKENS = 2  # a prefill and a decode step
_LATER = ("decoder_", "labels")  # arguments that generate makes itself or does not need
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@one_at_a_time
def calls_of_generate(compiler: Compiler, call: BoundCall) -> list[Rehearsed]:
    """Return one call of each structure that ``generate`` would make, except for the example's structure.

    Return nothing for a model that cannot generate. If generation fails, return the calls until then, and
    warn unless a call could not be traced.
    """
    can_generate = getattr(compiler.model_copy.module, "can_generate", None)  # a plain module has none
    if call.args or not callable(can_generate) or not can_generate():
        return []
    rehearsal = Rehearsal(compiler, call)
    try:
        for prompt in _prompts(call.on_cpu(), compiler.options.size_limits.max_length):
            _generate(rehearsal, prompt)
    except NoGraphError as error:
        logger.info("no memory is reserved for a forward pass of generate() that cannot be traced: %s", error)
    except Exception as error:  # the model's own code may raise anything
        reason = str(error) if isinstance(error, GraphplanError) else first_line(error)
        warn(
            f"the prefill and decode of generate() could not be traced ahead, so no memory is reserved for "
            f"them ({reason}): pass a prefill and a decode to partition as calls="
        )
    return rehearsal.calls[1:]


def _generate(rehearsal: Rehearsal, prompt: Mapping[str, torch.Tensor]) -> None:
    """Rehearse ``generate`` up to the first decode step."""
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1}
    with silenced("transformers"), suppress(RepeatedCallError), rehearsal.model() as model:
        model.generate(**prompt, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, **greedy)


def _prompts(call: BoundCall, longest: int | None) -> list[dict[str, torch.Tensor]]:
    """Return arguments for ``generate``: the example's tensors, and for plain text also the longest prompt.

    The longest prompt matters because calls differ beyond a sliding window. Prompts leave room for tokens.
    """
    named = {
        name: value
        for name, value in call.kwargs.items()
        if isinstance(value, torch.Tensor) and not name.startswith(_LATER)
    }
    ids = named.get("input_ids")
    plain = ids is not None and all(value.dim() == 2 and value.shape == ids.shape for value in named.values())
    if ids is None or not plain or longest is None or not set(named) <= set(_TEXT):
        return [named]
    most, size = max(1, longest - _TOKENS), ids.shape[1]
    lengths = [most] if size >= most else [size, most]
    return [
        {name: value[:, torch.arange(length) % size] for name, value in named.items()} for length in lengths
    ]
