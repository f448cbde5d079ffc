"""``generate()`` and other uses of transformers models, on simulated devices."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from language_models import CACHE_NAMES, DECODERS, FAMILIES, build, example_of, inputs_of, padded_inputs
from shortcuts import short_search

import graphplan

transformers = pytest.importorskip("transformers")


@contextmanager
def on_two_devices(family: str, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(model, machine, the model over two devices of which none holds it, and the CPU)."""
    model = build(family)
    size = bytes_of(model)
    budgets = {0: int(0.6 * size) + (1 << 19), 1: int(0.6 * size) + (1 << 19)}
    pin = dict.fromkeys(_first_half(model), 0) | dict.fromkeys(_second_half(model), 1)
    with graphplan.simulate(budgets) as machine:
        options = {"kwargs": example_of(family), "pin": pin, **options}
        yield model, machine, graphplan.partition(model, machine.max_memory, **options)


def _layers(model: Any) -> list[str]:
    """Paths of the layers of the text model."""
    names = [name for name, part in model.named_modules() if name.rpartition(".")[2] in ("0", "1")]
    return [name for name in names if name.count(".") == min(n.count(".") for n in names)]


def _first_half(model: Any) -> list[str]:
    return [name for name in _layers(model) if name.endswith("0")]


def _second_half(model: Any) -> list[str]:
    return [name for name in _layers(model) if name.endswith("1")]


def same_tokens(model: Any, placed: Any, inputs: dict[str, Any], **options: Any) -> None:
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(placed.generate(**inputs, **options), expected)


def check_tokens(placement: tuple[Any, Any, Any], family: str) -> None:
    model, _, placed = placement
    assert set(placed.plan.placement.values()) == {0, 1}
    same_tokens(model, placed, inputs_of(family), max_new_tokens=6)
    graphs = len(placed.plans)
    longer = inputs_of(family, 2, 11)
    same_tokens(model, placed, longer, max_new_tokens=6)
    same_tokens(model, placed, inputs_of(family), max_new_tokens=6, do_sample=True)
    assert len(placed.plans) == graphs  # neither length nor sampling is another structure


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
def test_tokens_equal_eager(family: str) -> None:
    with on_two_devices(family) as placement:
        check_tokens(placement, family)


@pytest.fixture(scope="class")
def t5() -> Iterator[tuple[Any, Any, Any]]:
    with short_search(), on_two_devices("t5") as placement:
        yield placement


@pytest.mark.slow
class TestOnePlacedT5:
    """All of these call one model, which is placed once."""

    def test_tokens_equal_eager(self, t5: tuple[Any, Any, Any]) -> None:
        check_tokens(t5, "t5")

    def test_parts_that_are_called_by_themselves(self, t5: tuple[Any, Any, Any]) -> None:
        model, _, placed = t5
        ids = inputs_of("t5")["input_ids"]
        encoder = placed.get_encoder()
        assert isinstance(encoder, type(model.encoder))
        with torch.no_grad():
            expected = model.get_encoder()(input_ids=ids).last_hidden_state
        assert largest_difference(encoder(input_ids=ids).last_hidden_state, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_tokens(family: str) -> None:
    with on_two_devices(family) as (model, _, placed):
        same_tokens(model, placed, inputs_of(family), max_new_tokens=200)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("whisper", "llava", "mamba")])
def test_padded_and_unpadded_batches(family: str) -> None:
    with on_two_devices(family) as (model, _, placed):
        for inputs in (inputs_of(family), padded_inputs(family), inputs_of(family), padded_inputs(family)):
            same_tokens(model, placed, inputs, max_new_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mamba"])
def test_beams(family: str) -> None:
    with on_two_devices(family) as (model, _, placed):
        same_tokens(model, placed, inputs_of(family), max_new_tokens=8, num_beams=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS[:5])
def test_static_caches(family: str) -> None:
    with on_two_devices(family) as (model, _machine, placed):
        options = {"max_new_tokens": 12, "cache_implementation": "static"}
        same_tokens(model, placed, inputs_of(family), **options)


@pytest.mark.slow
def test_static_cache_layers_may_be_on_different_devices() -> None:
    """Each layer has a batch size, which is not a tensor and has no device."""
    options = {"max_new_tokens": 6, "cache_implementation": "static"}
    with on_two_devices("llama") as (model, _, placed):
        same_tokens(model, placed, inputs_of("llama"), **options)
        steps = [plan for plan in placed.plans if any("index_copy" in name for name in plan.graph.operations)]
        assert steps
        for plan in steps:
            groups = [group for group in plan.graph.together if any("index_copy" in name for name in group)]
            assert len(groups) == len(model.model.layers)


# -- caches ----------------------------------------------------------------------------------------------


def bytes_of_one_layer(cache: Any) -> int:
    return min(int(layer.keys.numel()) * layer.keys.element_size() for layer in cache.layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_caches_are_counted_on_the_devices_of_layers(family: str) -> None:
    with on_two_devices(family) as (_model, machine, placed):
        inputs = inputs_of(family, 2, 60)
        with torch.no_grad():
            found = placed(**inputs, use_cache=True)
        cache = found.past_key_values
        assert {layer.keys.device.index for layer in cache.layers} == {0, 1}
        assert all(layer.device == layer.keys.device for layer in cache.layers)
        step = {"input_ids": inputs["input_ids"][:, :1], "past_key_values": cache, "use_cache": True}
        for number in range(4):
            homes = [layer.keys.device for layer in cache.layers]
            gc.collect()
            machine.reset_peaks()
            again = placed(**step)
            assert again.past_key_values is cache
            if number < 3:
                plan = placed.plans[-1]
                assert sum(state.nbytes for state in plan.graph.cache_inputs) >= 4 * bytes_of_one_layer(cache)
                for key in (0, 1):
                    assert machine.peak_bytes(key) <= plan.peak_bytes[key] <= plan.topology[key].room
            if number > 0:  # the first call has placed the graph
                assert [layer.keys.device for layer in cache.layers] == homes
                # the token goes in, its hidden state over, its logits out; a layer's keys are larger
                assert machine.transfers
                moved = max(t.nbytes for t in machine.transfers)
                assert moved <= 2 * 96 * 4 < bytes_of_one_layer(cache)


def check_one_made_elsewhere(model: Any, placed: Any, ids: torch.Tensor) -> None:
    """It is brought home."""
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values  # on the CPU
        expected = model(input_ids=ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    assert largest_difference(placed(input_ids=ids[:, :1], past_key_values=cache).logits, expected) < 1e-5
    assert {layer.keys.device.type for layer in cache.layers} == {"sim"}


@pytest.mark.slow
def test_cache_that_autograd_computed_has_one_trace() -> None:
    """Regression: an example cache that was computed without ``no_grad`` made a trace for each length."""
    model = build("llama")
    ids = inputs_of("llama", 2, 6)["input_ids"]
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert cache.layers[0].keys.grad_fn is not None
    plan = graphplan.plan(model, {"cpu": "1GiB"}, kwargs={"input_ids": ids[:, :1], "past_key_values": cache})
    assert plan.method == "transformers"
    assert cache.layers[0].keys.shape[2] == 6


# -- one model that is placed once ------------------------------------------------------------------------


class Words:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class Numbers:
    """A tokenizer of which only ``decode`` is asked."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in tokens)


@pytest.fixture(scope="class")
def llama() -> Iterator[tuple[Any, Any, Any]]:
    with short_search(), on_two_devices("llama") as placement:
        yield placement


@pytest.mark.filterwarnings("ignore:8 graphs have been traced")  # one model serves all of these tests
class TestOnePlacedLlama:
    """None of these changes the model, its weights or where they are."""

    def test_one_prefill_and_one_decode_graph_serve_all_lengths(
        self, llama: tuple[Any, Any, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The first of these: it counts what is captured."""
        model, _, placed = llama
        assert set(placed.plan.placement.values()) == {0, 1}
        with caplog.at_level(logging.INFO, "graphplan"):
            for batch, length in ((2, 7), (2, 12), (3, 5), (2, 30)):
                same_tokens(model, placed, inputs_of("llama", batch, length), max_new_tokens=4)
            same_tokens(model, placed, inputs_of("llama"), max_new_tokens=4, do_sample=True)
        captured = [r.getMessage() for r in caplog.records if "capturing another graph" in r.getMessage()]
        assert len(captured) == 2  # a prefill into a cache, a decode
        assert any(f"{name}[0]" in captured[1] for name in CACHE_NAMES)

    def test_passed_cache_stays_the_callers_object(self, llama: tuple[Any, Any, Any]) -> None:
        model, _, placed = llama
        ids = inputs_of("llama")["input_ids"]
        check_one_made_elsewhere(model, placed, ids)
        ours, theirs = transformers.DynamicCache(), transformers.DynamicCache()
        for part in (ids, ids[:, :1], ids[:, :3]):
            with torch.no_grad():
                expected = model(input_ids=part, past_key_values=theirs)
            found = placed(input_ids=part, past_key_values=ours)
            assert found.past_key_values is ours
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert largest_difference(found.logits, expected.logits) < 1e-5
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert largest_difference(mine.keys.cpu(), other.keys) < 1e-5
        ours.crop(-3)
        theirs.crop(-3)
        with torch.no_grad():
            expected = model(input_ids=ids[:, :1], past_key_values=theirs)
        found = placed(input_ids=ids[:, :1], past_key_values=ours)
        assert largest_difference(found.logits, expected.logits) < 1e-5

    def test_to_leaves_weights_where_they_are(self, llama: tuple[Any, Any, Any]) -> None:
        _, _, placed = llama
        homes = {name: tensor.device for name, tensor in placed.named_parameters()}
        assert placed.to("sim:0") is placed
        assert placed.device == torch.device("sim:0")
        assert homes == {name: tensor.device for name, tensor in placed.named_parameters()}
        with pytest.raises(graphplan.PlanError, match="keeps its dtype"):
            placed.to(torch.float16)

    @pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
    def test_a_dtype_is_not_changed_in_place(self, llama: tuple[Any, Any, Any], convert: str) -> None:
        _, _, placed = llama
        with pytest.raises(graphplan.PlanError, match="cannot be moved or converted"):
            getattr(placed, convert)()
        assert placed.float() is placed
        assert placed.cpu() is placed
        placed(**inputs_of("llama"))

    @pytest.mark.slow
    def test_streamers_are_given_every_token(self, llama: tuple[Any, Any, Any]) -> None:
        _, _, placed = llama
        words = Words()
        found = placed.generate(**inputs_of("llama", 1), max_new_tokens=5, streamer=words)
        assert words.tokens == found.flatten().tolist()
        assert words.ended

    @pytest.mark.slow
    def test_embeddings_are_called_by_themselves(self, llama: tuple[Any, Any, Any]) -> None:
        model, _, placed = llama
        ids, options = inputs_of("llama")["input_ids"], {"max_new_tokens": 4, "do_sample": False}
        with torch.no_grad():
            made = placed.get_input_embeddings()(ids)
            assert torch.equal(made, model.get_input_embeddings()(ids))
            found = placed.generate(inputs_embeds=made, **options)
            assert torch.equal(found, model.generate(inputs_embeds=made, **options))

    def test_a_thread_generates_while_another_reads(self, llama: tuple[Any, Any, Any]) -> None:
        model, _, placed = llama
        ids = inputs_of("llama")["input_ids"][:1]
        streamer = transformers.TextIteratorStreamer(Numbers(), timeout=60)
        options = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False}
        thread = threading.Thread(target=placed.generate, kwargs={**options, "streamer": streamer})
        thread.start()
        heard = "".join(streamer)
        thread.join()
        assert [int(token) for token in heard.split()] == model.generate(**options)[0].tolist()


# -- limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"max_length": 2.5}, {"max_length": True}])
def test_limits_are_positive_integers(limits: dict[str, Any]) -> None:
    with pytest.raises(graphplan.InputError, match="must be a positive integer"):
        graphplan.plan(build("llama"), {"cpu": "1GiB"}, **limits)


@pytest.mark.slow
def test_plan_reserves_memory_for_its_limits() -> None:
    model = build("llama")
    plain = graphplan.plan(model, {0: "1GiB"}, kwargs=inputs_of("llama"))
    large = graphplan.plan(model, {0: "1GiB"}, kwargs=inputs_of("llama"), max_batch=8, max_length=256)
    weights = bytes_of(model)
    assert large.peak_bytes[0] - weights > 50 * (plain.peak_bytes[0] - weights)
    with pytest.raises(graphplan.InfeasibleError):
        graphplan.plan(
            model, {0: plain.peak_bytes[0]}, kwargs=inputs_of("llama"), max_batch=8, max_length=256
        )


# -- the model stays the model ---------------------------------------------------------------------------


@pytest.mark.slow
def test_proof_of_later_plans_names_fixed_weights() -> None:
    model, inputs = build("llama"), example_of("llama")
    size = bytes_of(model)
    with graphplan.simulate({i: int(0.62 * size) + (1 << 15) for i in (0, 1)}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        placed.generate(**inputs_of("llama"), max_new_tokens=2)
    first, *others = placed.plans
    assert not first.fixed_weights
    assert "with the weights where they are" not in first.proof
    assert 0 < first.lower_bound <= first.makespan
    assert all(plan.proof.endswith("with the weights where they are") for plan in others)
    assert others


@pytest.mark.slow
def test_placed_model_keeps_config_dtype_and_state_dict(tmp_path: Path) -> None:
    with on_two_devices("llama") as (model, _, placed):
        assert isinstance(placed, type(model))
        assert placed.config is not None
        assert placed.device == torch.device("cpu")  # where its calls come from
        assert placed.dtype == model.dtype
        assert placed.num_parameters() == model.num_parameters()
        assert list(placed.state_dict()) == list(model.state_dict())
        placed.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert largest_difference(dict(again.state_dict()), dict(model.state_dict())) == 0
        model_copy = copy.deepcopy(placed)
        with torch.no_grad():
            model_copy.lm_head.weight.zero_()
        same_tokens(model, placed, inputs_of("llama"), max_new_tokens=4)
        assert int(model_copy.generate(**inputs_of("llama"), max_new_tokens=1)[0, -1]) == 0


@pytest.mark.slow
def test_text_generation_pipeline_runs_placed_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(96)}
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w6"))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="w0", eos_token="w1")
    tokenizer.padding_side = "left"
    texts = ["w7 w8 w9", "w10 w11 w12 w13 w14"]
    with on_two_devices("gpt2") as (model, _, placed):
        options = {"max_new_tokens": 5, "do_sample": False}
        expected = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        found = transformers.pipeline("text-generation", model=placed, tokenizer=tokenizer)
        for batch in (1, 2):
            assert found(texts, batch_size=batch, **options) == expected(texts, batch_size=batch, **options)


FRESH = """
import torch, transformers
from graphplan.capture.transformers.caches import is_cache
from graphplan.capture.model.model_copy import ModelCopy

config = transformers.LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.ones(1, 5, dtype=torch.long)
cache = model(input_ids=ids, use_cache=True).past_key_values
assert not is_cache(cache)
call = ModelCopy(model).bind((), {"input_ids": ids[:, :1], "past_key_values": cache})
print(len(call.tensors), all(isinstance(leaf, (torch.Tensor, int)) for leaf in call.leaves))
"""


@pytest.mark.slow
def test_unpickled_model_registers_its_caches() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["5", "True"]  # the token, and two layers of keys and values


@pytest.mark.slow
def test_max_length_counts_tokens_not_encoder_frames() -> None:
    model = build("whisper")
    with graphplan.simulate({0: "8MiB"}) as machine:
        placed = graphplan.partition(
            model, machine.max_memory, kwargs=example_of("whisper"), max_length=16, max_batch=2
        )
        assert model.model.encoder(**inputs_of("whisper")).last_hidden_state.shape[1] > 16
        same_tokens(model, placed, inputs_of("whisper"), max_new_tokens=8)
        with pytest.raises(graphplan.LimitError, match="17 tokens"):
            placed.generate(**inputs_of("whisper"), max_new_tokens=30, min_new_tokens=30, do_sample=False)


@pytest.mark.slow
def test_generate_can_be_the_first_call() -> None:
    model = build("short llama")
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory)
        same_tokens(model, placed, inputs_of("llama"), max_new_tokens=4)


@pytest.mark.slow
def test_prefill_and_decode_planned_together_serve_generate() -> None:
    model = build("llama")
    ids = inputs_of("llama")["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    prefill = {"input_ids": ids, "use_cache": True}
    decode = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
    half = int(0.6 * bytes_of(model)) + (1 << 18)
    with graphplan.simulate({0: half, 1: half}) as machine:
        placed = graphplan.partition(model, machine.max_memory, calls=[prefill, decode], weights=[1, 200])
        assert len(placed.plans) == 2
        machine.reset_peaks()
        found = placed(**prefill)
        own = found.past_key_values
        with torch.no_grad():
            expected = model(**{**decode, "past_key_values": copy.deepcopy(cache)}).logits
        assert largest_difference(placed(**{**decode, "past_key_values": own}).logits, expected) < 1e-5
        assert all(machine.peak_bytes(key) <= half for key in (0, 1))
        same_tokens(model, placed, {"input_ids": ids}, max_new_tokens=4)


# -- what changes after the model was placed ----------------------------------------------------------------


@pytest.mark.slow
def test_changed_configuration_is_retraced(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = build("llama"), inputs_of("llama")
    with graphplan.simulate({0: "4MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        caplog.set_level(logging.INFO, logger="graphplan")
        placed.config.output_hidden_states = True
        assert "hidden_states" in placed(**inputs)
        assert "config.output_hidden_states is True, but was False" in caplog.text
        placed.config.output_hidden_states = False
        assert "hidden_states" not in placed(**inputs)
        assert len(placed.plans) == 2  # the first serves again
        placed.config.use_cache = False
        assert "past_key_values" not in placed(**inputs)
        placed.config.use_cache = True
        placed.set_attn_implementation("eager")
        found, copied = placed(**inputs, output_attentions=True), copy.deepcopy(model)
        copied.set_attn_implementation("eager")
        expected = copied(**inputs, output_attentions=True)
        assert len(found.attentions) == model.config.num_hidden_layers
        assert largest_difference(found.attentions, expected.attentions) < 1e-5


@pytest.mark.parametrize("budget", [249488])
@pytest.mark.slow
def test_batches_larger_than_the_examples_over_the_cpu(budget: int) -> None:
    """Regression: views of the rotary table, one for each layer, were moved to the CPU as one."""
    model, ids = build("llama"), inputs_of("llama")["input_ids"]
    with graphplan.simulate({0: budget, "cpu": "64MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": ids})
        for batch in (4, 5):
            rows = ids[:1].repeat(batch, 1)
            assert largest_difference(placed(input_ids=rows).logits, model(input_ids=rows).logits) < 1e-5
