"""``generate()`` of a model over several machines: every rank runs it, the last one chooses the tokens.

Each rank runs transformers' own loop over its own stage and its own caches. The last rank has the scores:
after all other processors it chooses a token, which it sends to the others, and all go on with scores that
leave no other choice. So hidden states and chosen tokens cross the network, and nothing else does.
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
from graphplan.errors import ClusterError, InputError, first_line

_MODES = ("greedy_search", "sample")


def generator_of(
    model: nn.Module, forward: Callable[..., Any], last: int, traffic: Counter[str]
) -> Callable[..., Any] | None:
    """What generates text with a model; None for a model that does not.

    Args:
        model: any; its configuration and code are used, its weights are not.
        forward: runs it over all ranks, as
            :meth:`graphplan.runtime.distributed.cluster_module.ClusterModule.forward_in_place`.
        last: rank of the last stage.
        traffic: to which the bytes of tokens are added.
    """
    if not hasattr(model, "generate") or not hasattr(model, "generation_config"):
        return None
    cls = type(model)

    def run(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def choose(generation_config: Any) -> Callable[..., torch.Tensor]:
        _require_simple(generation_config)
        return functools.partial(_choose, last, bool(generation_config.do_sample), traffic)

    body = {
        "forward": functools.wraps(cls.forward)(run),
        "device": property(lambda _: torch.device("cpu")),
        "_valid_auto_compile_criteria": lambda *_: False,
        "__module__": cls.__module__,
    }
    shell = copy.copy(model)
    shell.__class__ = with_last_processor(type(cls.__name__, (cls,), body), choose)

    def generate(*args: Any, **kwargs: Any) -> Any:
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]  # of transformers
            raise InputError("generate() over several machines is for decoder-only models so far")
        return shell.generate(*args, **kwargs)  # type: ignore[operator]  # of transformers

    return generate


def _require_simple(config: Any) -> None:
    """Raise InputError for what needs more of the scores than the chosen token."""
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in _MODES:
        raise InputError(f"generate() over several machines is greedy or samples: {mode!r} needs all scores")
    asked = [name for name in ("output_scores", "output_logits") if getattr(config, name, False)]
    asked += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)]
    if asked:
        raise InputError(f"{asked[0]}: only the chosen tokens are on all machines")


def _choose(
    last: int, sample: bool, traffic: Counter[str], _input_ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Scores that leave no choice but the token that the last rank chooses.

    Args:
        last: its rank.
        sample: whether it draws.
        traffic: to which the bytes of tokens are added.
        scores: (batch, tokens) of the next token, after all other processors.
    """
    tokens = torch.zeros(scores.shape[0], dtype=torch.int64)
    if dist.get_rank() == last:
        if sample:  # the loop draws once more, from what is left, with the same numbers
            state = torch.get_rng_state()
            tokens = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
            torch.set_rng_state(state)
        else:
            tokens = scores.argmax(-1)
        traffic["tokens"] += tokens.nbytes
    try:
        dist.broadcast(tokens, last)
    except RuntimeError as error:
        raise ClusterError(
            f"rank {dist.get_rank()} waited for the next token of rank {last}, which has the last stage: "
            f"{first_line(error)}"
        ) from error
    return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)
