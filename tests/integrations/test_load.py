from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import loading as benchmark
import pytest
import torch
import transformers
from architectures import TABLE, Architecture
from builders import bytes_of, largest_difference
from language_models import build, inputs_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    dynamic_module_utils,
)

import graphplan
from graphplan.api.load import open_pretrained
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.runtime.checkpoint.converted_checkpoint import Conversion, ConvertedCheckpoint
from graphplan.runtime.checkpoint.deferred_joins import DeferredJoins
from graphplan.runtime.checkpoint.parallel_reads import read_into
from graphplan.runtime.checkpoint.safetensors_header import FileTensor, read_header
from graphplan.runtime.weights.storage import WeightLayout, place_model

FAMILIES = (
    "Llama", "GPT2", "Gemma2", "Gemma3", "Mixtral", "Qwen2Moe", "Mamba", "Bert", "RoFormer", "T5", "Bart",
    "Pegasus", "ViT", "Swin", "ResNet", "Whisper", "Wav2Vec2", "CLIP", "Deberta", "GPTJ",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    transformers.logging.disable_progress_bar()


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def on_the_cpu(folder: Path | str, **options: Any) -> nn.Module:
    model, source = open_pretrained(folder, **options)
    layout = WeightLayout(dict.fromkeys(source.weights.tensors, torch.device("cpu")))
    return place_model(model, source.weights, layout, source=source)[0]


def configs_of(model: Any) -> list[Any]:
    return [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]


def assert_same_tensors(ours: nn.Module, theirs: nn.Module) -> None:
    mine, want = named_tensors(ours), named_tensors(theirs)
    assert mine.keys() == want.keys()
    for name, tensor in want.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name].cpu(), tensor), name
    tied = {(a, b) for a in mine for b in mine if mine[a] is mine[b]}
    assert tied == {(a, b) for a in want for b in want if want[a] is want[b]}


def small_llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {**benchmark.SMALL, "num_hidden_layers": 2, "vocab_size": 120}
    config = LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, **more)
    return LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # MobileBert's own
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, id=a.name, marks=[] if a.stem in FAMILIES else [pytest.mark.slow]) for a in TABLE],
)
def test_weights_and_buffers_equal_from_pretrained(architecture: Architecture, tmp_path: Path) -> None:
    model, _ = architecture.build()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    for dtype in (torch.float32, torch.float16):
        theirs: Any = type(model).from_pretrained(tmp_path, dtype=dtype)
        ours: Any = on_the_cpu(tmp_path, dtype=dtype)
        assert_same_tensors(ours, theirs)
        mine, want = ([getattr(one, "dtype", None) for one in configs_of(model)] for model in (ours, theirs))
        assert mine == want


@pytest.mark.parametrize(
    "stem", ["Llama", *(pytest.param(s, marks=pytest.mark.slow) for s in ("T5", "GPT2", "Mixtral"))]
)
def test_loaded_model_runs_on_its_planned_devices(stem: str, tmp_path: Path) -> None:
    (architecture,) = [a for a in TABLE if a.stem == stem]
    model, inputs = architecture.build()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    theirs = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(**inputs)
    budget = int(0.6 * bytes_of(model))
    with graphplan.simulate({0: 2 * budget, 1: 2 * budget}) as machine:  # Mixtral is taken apart to be saved
        placed = graphplan.load(tmp_path, {0: budget, 1: budget, "cpu": "1GiB"}, kwargs=inputs)
        assert type(placed).__name__ == type(model).__name__
        assert not placed.training
        assert_same_tensors(placed, theirs)
        machine.reset_peaks()
        result = placed(**inputs)
        assert largest_difference(result, expected) < 1e-5
        assert all(machine.peak_bytes(i) <= placed.plan.peak_bytes[i] <= budget for i in (0, 1))
        placed.save_pretrained(tmp_path / "again")
        del placed
        gc.collect()
    assert_same_tensors(type(model).from_pretrained(tmp_path / "again"), theirs)


@pytest.mark.slow
def test_the_first_call_places_a_loaded_model(tmp_path: Path) -> None:
    (architecture,) = [a for a in TABLE if a.stem == "ViT"]
    model, inputs = architecture.build()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="the first call will be traced"):
        placed = graphplan.load(tmp_path, {"cpu": "1GiB"}, dtype="float32")
    with torch.no_grad():
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-6


def test_generation_settings_come_from_the_folder(tmp_path: Path) -> None:
    model = small_llama()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    assert open_pretrained(tmp_path)[0].generation_config.max_new_tokens == 7
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.warns(UserWarning, match=r"generation_config\.json cannot be read"):
        open_pretrained(tmp_path)


# -- names ------------------------------------------------------------------------------------------------


def test_base_checkpoint_loads_with_a_head_and_back(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "whole")
    assert_same_tensors(on_the_cpu(tmp_path / "base", model_class=LlamaForCausalLM), model)
    assert_same_tensors(on_the_cpu(tmp_path / "whole", model_class=LlamaModel), model.model)


def test_missing_weight_raises_or_is_initialised_if_not_strict(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=False)
    model.model.save_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match=r"missing 'lm_head\.weight'\. With strict=False"):
        graphplan.load(tmp_path, {"cpu": "1GiB"}, kwargs=benchmark.IDS, model_class=LlamaForCausalLM)
    with pytest.warns(UserWarning, match=r"newly initialised: 'lm_head\.weight'"):
        placed = graphplan.load(
            tmp_path, {"cpu": "1GiB"}, kwargs=benchmark.IDS, model_class=LlamaForCausalLM, strict=False
        )
    assert 0 < float(placed.lm_head.weight.detach().std()) < 0.1
    assert torch.equal(placed.model.norm.weight, model.model.norm.weight)


def test_unexpected_tensors_warn(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"LlamaModel does not use these tensors of .*: 'lm_head\.weight'"):
        on_the_cpu(tmp_path, model_class=LlamaModel)


def test_weights_of_other_shapes_raise(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(
        graphplan.CheckpointError, match=r"'model\.norm\.weight' has shape \[3\], but \[64\] in the model"
    ):
        open_pretrained(tmp_path)


def test_tied_weights_stored_twice(tmp_path: Path, caplog: Any) -> None:
    model = small_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    save_file({**state, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    tied = on_the_cpu(tmp_path)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    save_file({**state, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    apart = on_the_cpu(tmp_path)
    assert "differ in the checkpoint" in caplog.text
    assert torch.equal(apart.lm_head.weight, apart.model.embed_tokens.weight + 1)


def test_models_loaded_in_parallel_keep_tied_weights(tmp_path: Path) -> None:
    """transformers disables weight tying in all threads while it builds a model: builds must not overlap."""
    small_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    tie_weights, both = transformers.PreTrainedModel.tie_weights, Barrier(2)

    class Meeting(LlamaForCausalLM):
        met = False

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            try:
                both.wait(timeout=1)
            except BrokenBarrierError:
                return
            Meeting.met = True

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(on_the_cpu, tmp_path, model_class=Meeting) for _ in range(2)]
        models = [load.result() for load in loads]
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)
    assert transformers.PreTrainedModel.tie_weights is tie_weights
    assert not Meeting.met


def test_experts_are_read_in_place(tmp_path: Path, monkeypatch: Any) -> None:
    (architecture,) = [a for a in TABLE if a.stem == "Mixtral"]
    model, _ = architecture.build()
    model.save_pretrained(tmp_path)
    assert any("experts.0.w1" in name for name in load_file(tmp_path / "model.safetensors"))

    def refuse(self: Conversion, *_: Any) -> None:
        raise AssertionError(f"{self.sources[0].name} is read into memory of its own")

    monkeypatch.setattr(Conversion, "results", refuse)
    assert_same_tensors(on_the_cpu(tmp_path), type(model).from_pretrained(tmp_path))


# -- what is not run, and what is not there ---------------------------------------------------------------


def test_folder_code_runs_only_if_trusted(tmp_path: Path, monkeypatch: Any) -> None:
    small_llama().save_pretrained(tmp_path)
    code = "import os\nos.environ['GRAPHPLAN_TEST_RAN'] = 'yes'\n"
    code += "from transformers import LlamaForCausalLM\nclass OwnModel(LlamaForCausalLM): pass\n"
    (tmp_path / "modeling_own.py").write_text(code)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["OwnModel"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("GRAPHPLAN_TEST_RAN", "no")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with pytest.raises(
        graphplan.CheckpointError, match="trust_remote_code=True, which runs the folder's code"
    ):
        open_pretrained(tmp_path)
    assert os.environ["GRAPHPLAN_TEST_RAN"] == "no"
    opened, _ = open_pretrained(tmp_path, trust_remote_code=True)
    assert type(opened).__name__ == "OwnModel"
    assert os.environ["GRAPHPLAN_TEST_RAN"] == "yes"


@pytest.mark.slow
def test_generation_settings_may_be_in_the_configuration(tmp_path: Path) -> None:
    """As in old folders of BART and T5, without a generation_config.json."""
    model, inputs = build("bart"), inputs_of("bart")
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"num_beams": 3, "max_length": 12, "no_repeat_ngram_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    expected = type(model).from_pretrained(tmp_path).generate(**inputs)
    example = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :1]}
    placed = graphplan.load(tmp_path, {"cpu": "1GiB"}, kwargs=example)
    assert placed.generation_config.num_beams == 3
    assert torch.equal(placed.generate(**inputs), expected)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = small_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(graphplan.CheckpointError, match=r"only in pytorch_model\.bin: such files run code"):
        open_pretrained(tmp_path)


def test_gguf_files_raise_with_remedy(tmp_path: Path) -> None:
    """Regression: the error said that the file was no folder, or that config.json or safetensors lacked."""
    file = tmp_path / "small-Q4_0.gguf"
    file.write_bytes(b"GGUF")
    remedy = r"small-Q4_0\.gguf is a GGUF file.*from_pretrained\('.*', gguf_file='small-Q4_0\.gguf'\)"
    for path in (tmp_path, file):
        with pytest.raises(graphplan.CheckpointError, match=remedy):
            open_pretrained(path)
    small_llama().config.save_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match=remedy):
        open_pretrained(tmp_path, model_class=LlamaForCausalLM)
    small_llama().save_pretrained(tmp_path)
    assert_same_tensors(on_the_cpu(tmp_path), small_llama())
    with pytest.raises(TypeError, match="'gguf_file'; load the model with from_pretrained"):
        graphplan.load(tmp_path, {"cpu": "1GiB"}, gguf_file="small-Q4_0.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "names no architecture: give model_class="),
        ({"architectures": ["NoSuchModel"]}, "transformers has no class 'NoSuchModel': give model_class=$"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"is quantised \(gptq\)"),
    ],
)
def test_incomplete_configs_raise(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(graphplan.CheckpointError, match=message):
        open_pretrained(tmp_path)


def test_unknown_arguments_of_load_raise(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    no_classes: dict[str, Any] = {"AutoModel": AutoModel, "'LlamaModel'": "LlamaModel", "Linear": nn.Linear}
    for named, given in no_classes.items():
        with pytest.raises(graphplan.InputError, match=f"{named} is not a model class of transformers"):
            open_pretrained(tmp_path, model_class=given)
    for name, value in {"torch_dtype": torch.float16, "checkpoint": tmp_path}.items():
        with pytest.raises(TypeError, match=rf"load\(\) got an unexpected keyword argument '{name}'"):
            graphplan.load(tmp_path, {"cpu": "1GiB"}, **{name: value})


@pytest.mark.slow
def test_given_configuration_is_used(tmp_path: Path) -> None:
    model = small_llama()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager", max_position_embeddings=99)
    before = copy.deepcopy(config)
    placed = graphplan.load(
        tmp_path, {"cpu": "1GiB"}, kwargs=benchmark.IDS, config=config, dtype=torch.float64
    )
    assert placed.config._attn_implementation == "eager"
    assert placed.config.max_position_embeddings == 99
    assert config == before
    assert config.dtype == before.dtype
    with torch.no_grad():
        assert largest_difference(placed(**benchmark.IDS), model.double()(**benchmark.IDS)) < 1e-5
    with pytest.raises(
        graphplan.InputError, match="config must be a configuration of transformers, not a dict"
    ):
        open_pretrained(tmp_path, config={})
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(graphplan.CheckpointError, match=r"is quantised \(gptq\)"):
        open_pretrained(tmp_path, config=config)
    config.save_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match=r"is quantised \(gptq\)"):  # the given one is not
        open_pretrained(tmp_path, config=before)


def test_hub_model_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    model.save_pretrained(tmp_path / "models--some--llama" / "snapshots" / "abc")
    (tmp_path / "models--some--llama" / "refs").mkdir()
    (tmp_path / "models--some--llama" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ours, _ = open_pretrained("some/llama")
    assert ours.config.name_or_path == "some/llama"
    assert_same_tensors(on_the_cpu("some/llama"), model)
    with pytest.raises(graphplan.CheckpointError, match=r"snapshot_download\(name, allow_patterns="):
        open_pretrained("some/other")


def test_invalid_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(graphplan.CheckpointError, match=r"has no config\.json: give the folder"):
        open_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match="there is no folder 'nonexist'"):
        open_pretrained("nonexist")
    small_llama().config.save_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match="no checkpoint at"):
        open_pretrained(tmp_path, model_class=LlamaForCausalLM)
    small_llama().save_pretrained(tmp_path)
    with pytest.raises(graphplan.CheckpointError, match=r"a floating-point torch\.dtype, not torch\.int8"):
        open_pretrained(tmp_path, dtype=torch.int8)


# -- deferred joins ---------------------------------------------------------------------------------------

MOVEMENTS = {
    "stack": lambda a, b: torch.stack([a, b], dim=0),
    "stack inside": lambda a, b: torch.stack([a, b], dim=1),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat of stacks": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "transposed": lambda a, b: torch.cat([a.transpose(0, 1), b.t().contiguous()]),
    "columns": lambda a, b: torch.cat([a[:, :2], b[:, 2:]], dim=1),
    "reshaped": lambda a, b: torch.cat([a.reshape(3, 8), b.view(3, 8)]),
    "chunk": lambda a, b: torch.cat([b, a.chunk(2)[1], a.chunk(2)[0]]),
    "split": lambda a, b: torch.cat([b.split([1, 5])[1], a[1:3]]),
    "squeezed": lambda a, b: torch.stack([a.unsqueeze(0).squeeze(0), b[:]]).clone(),
    "one for many": lambda a, b: a[0].expand(6, 4),
}


def two_tensors(folder: Path) -> tuple[list[FileTensor], list[torch.Tensor]]:
    state = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(24.0, 48.0).reshape(6, 4)}
    save_file(state, folder / "ab.safetensors")
    header = read_header(folder / "ab.safetensors")
    return [header[name] for name in state], list(state.values())


@pytest.mark.parametrize("name", MOVEMENTS)
def test_joined_tensors_are_read_into_their_places(name: str, tmp_path: Path) -> None:
    files, tensors = two_tensors(tmp_path)
    expected = MOVEMENTS[name](*tensors)
    with DeferredJoins(files) as deferred:
        made = MOVEMENTS[name](*deferred.tensors)
    assert made.shape == expected.shape
    assert not deferred.computes
    target = torch.full_like(expected, -1)
    read_into(list(deferred.reads(made, target, lambda _: None)), lambda _: None)
    assert torch.equal(target, expected)


COMPUTED = {
    "sum": lambda a, b: a + b,
    "permuted": lambda a, b: torch.stack([a, b]).permute(2, 0, 1)[:, 0, :6].t().contiguous()[:, :4],
    "in place": lambda a, b: torch.cat([a, b]).mul_(2)[:6],
    "bytes of another dtype": lambda a, b: a.view(torch.int32),
    "joined bytes of another dtype": lambda a, b: torch.cat([a[:3], b[:3]]).view(torch.int32),
}


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_conversions_beyond_joins_are_computed(make: Any, tmp_path: Path) -> None:
    files, tensors = two_tensors(tmp_path)
    with DeferredJoins(files) as deferred:
        make(*deferred.tensors)
    assert deferred.computes
    model = nn.Linear(4, 6, bias=False)
    conversion = Conversion(tuple(files), torch.float32, lambda made: {"weight": make(*made)})
    source = ConvertedCheckpoint(ModelWeights(model), {}, {"weight": conversion})
    assert "weight" in source
    assert "weight" not in source.mappable()
    target = torch.zeros(6, 4)
    source.read({"weight": target}, lambda _: None)
    assert torch.equal(target, make(*tensors).to(target.dtype))


def test_views_of_complex_numbers_as_real_are_computed(tmp_path: Path) -> None:
    files, _ = two_tensors(tmp_path)
    with DeferredJoins([replace(files[0], dtype=torch.complex64)]) as deferred:
        torch.view_as_real(deferred.tensors[0])
    assert deferred.computes


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loading_needs_little_more_than_host_weights(tmp_path: Path) -> None:
    total = benchmark.write_checkpoint(tmp_path, benchmark.LARGE, layers=2, shard=100_000_000)
    row = benchmark.alone(benchmark.load, 0.8, str(tmp_path))
    assert 0.3 * total < row["on_host"] < 0.8 * total
    assert row["over_host"] < 1.1


@pytest.mark.parametrize("budgets", [{"cpu": "1MiB"}, {0: 1024, "cpu": "1MiB"}, {0: "1MiB"}], ids=str)
def test_a_checkpoint_is_read_at_the_first_call(tmp_path: Path, budgets: dict[Any, Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(1, 8)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with graphplan.simulate({0: "1MiB"}):
        with pytest.warns(graphplan.GraphplanWarning, match="first call"):
            placed = graphplan.partition(empty, budgets, checkpoint=tmp_path)
        held = list(placed.parameters())
        assert torch.equal(placed(x).cpu(), model(x))
        assert all(parameter is held[i] for i, parameter in enumerate(placed.parameters()))


def test_a_distributed_checkpoint_of_a_placed_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with (
        graphplan.simulate({0: "1MiB"}),
        warnings.catch_warnings(action="ignore", category=UserWarning),  # no process group
    ):
        placed = graphplan.partition(model, {0: 1024, "cpu": "1MiB"}, (torch.ones(1, 8),))
        checkpoint.save(placed.state_dict(), checkpoint_id=tmp_path)
        found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        checkpoint.load(found, checkpoint_id=tmp_path)
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


UNPICKLED = """
import sys, torch, pickle
placed = pickle.loads(sys.stdin.buffer.read())
placed(torch.ones(1, 64))
"""


@pytest.mark.slow
def test_unpickling_without_the_devices_raises() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with graphplan.simulate({0: "1MiB"}):
        placed = graphplan.partition(model, {0: 40 * 1024, "cpu": "1MiB"}, (torch.ones(1, 64),))
        assert placed.plan.streams
        data = pickle.dumps(placed)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run(
        [sys.executable, "-c", UNPICKLED], input=data, env=env, capture_output=True, check=False
    )
    assert b"DeviceError: device 0 (sim:0) is not here" in said.stderr
