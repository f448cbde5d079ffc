"""Traces read from a folder: equal to a retrace, and never those of other code."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import math
import operator
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map_impl
from torch.nn import functional

import graphplan
from graphplan.analysis.plan import Plan
from graphplan.capture.saved.description import Description
from graphplan.capture.saved.plain_values import plain_target, target_from_plain

SOURCE = """
import helper_of_saved
import torch
from torch import nn
from helper_of_saved import shift

SCALE = 2.0
SETTINGS = {"offset": [1.0]}
TABLE = torch.arange(8.0)


class Block(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.factor = factor
        self.plain = torch.ones(8)

    def forward(self, x):
        y = self.linear(x) * SCALE + SETTINGS["offset"][0] + TABLE + helper_of_saved.STEP
        return {"y": shift(torch.relu(y)) * self.factor + self.plain, "rows": x.shape[0]}
"""
HELPER = """
STEP = 1.0
def shift(x):
    return x + 1
"""
X = torch.linspace(-1, 1, 24).reshape(3, 8)
BUDGETS = {0: "64KiB", 1: "64KiB"}


class Counter:
    """Counts the traces of ``torch.export``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, own = 0, torch.export.export

        def export(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(torch.export, "export", export)

    def during(self, work: Callable[[], Any]) -> tuple[int, Any]:
        before = self.count
        result = work()
        return self.count - before, result


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


class Sources:
    """Modules of a user, in files that change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("helper_of_saved", HELPER)
        self.write("model_of_saved", SOURCE)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def load(self) -> ModuleType:
        """The model's module, as a new process would import it."""
        for name in ("helper_of_saved", "model_of_saved"):
            spec = importlib.util.spec_from_file_location(name, self.folder / f"{name}.py")
            assert spec is not None
            made = importlib.util.module_from_spec(spec)
            sys.modules[name] = made
            code = (self.folder / f"{name}.py").read_text()  # its loader would look for older bytecode
            exec(compile(code, made.__file__ or "", "exec", dont_inherit=True), vars(made))
        return made


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    yield Sources(tmp_path)
    for name in ("helper_of_saved", "model_of_saved"):
        sys.modules.pop(name, None)


def planned(model: nn.Module, folder: Path, **options: Any) -> Plan:
    found: Plan = graphplan.plan(model, BUDGETS, (X,), capture_cache=folder / "captures", **options)
    return found


def runs_as_eager(model: nn.Module, folder: Path) -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        placed = graphplan.partition(model, BUDGETS, (X,), capture_cache=folder / "captures")
        for x in (X, torch.cat([X, X])):
            found, wanted = placed(x), model(x)
            assert found["rows"] == wanted["rows"]
            torch.testing.assert_close(found["y"], wanted["y"])


@pytest.mark.slow
def test_a_second_process_does_not_trace(sources: Sources) -> None:
    script = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
def export(*args, **kwargs):
    raise AssertionError("it traces")
if sys.argv[2] == "second":
    torch.export.export = export
import graphplan
from model_of_saved import Block
x = torch.linspace(-1, 1, 24).reshape(3, 8)
found = graphplan.plan(Block(), {0: "64KiB", 1: "64KiB"}, (x,), capture_cache=Path(sys.argv[1], "captures"))
print(found.to_json())
"""
    sources.load()  # which writes the files
    command = [sys.executable, "-c", script, str(sources.folder)]
    made = [
        subprocess.run([*command, which], capture_output=True, text=True) for which in ("first", "second")
    ]
    for done in made:
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    assert json.loads(made[0].stdout) == json.loads(made[1].stdout)


def test_captures_are_saved_without_an_installation(
    sources: Sources, exports: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name == "graphplan":
            raise importlib.metadata.PackageNotFoundError(name)
        return own(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)
    model = sources.load().Block()
    assert exports.during(lambda: planned(model, sources.folder))[0] == 1
    assert exports.during(lambda: planned(model, sources.folder))[0] == 0


def test_saved_capture_equals_the_traced_one(sources: Sources, exports: Counter) -> None:
    model = sources.load().Block().eval()
    assert exports.during(lambda: runs_as_eager(model, sources.folder))[0] == 1
    assert exports.during(lambda: runs_as_eager(model, sources.folder))[0] == 0
    assert not list((sources.folder / "captures").glob("*.tmp"))


CHANGES: dict[str, Callable[[Sources], nn.Module]] = {}


def change(function: Callable[[Sources], nn.Module]) -> Callable[[Sources], nn.Module]:
    CHANGES[function.__name__] = function
    return function


@change
def source(sources: Sources) -> nn.Module:
    sources.write("model_of_saved", SOURCE.replace("torch.relu", "torch.sigmoid"))
    return sources.load().Block()


@change
def helper(sources: Sources) -> nn.Module:
    sources.write("helper_of_saved", HELPER.replace("x + 1", "x + 2"))
    return sources.load().Block()


@change
def global_number(sources: Sources) -> nn.Module:
    module = sources.load()
    module.SCALE = 5.0
    return module.Block()


@change
def global_container(sources: Sources) -> nn.Module:
    module = sources.load()
    module.SETTINGS["offset"][0] = 7.0
    return module.Block()


@change
def global_tensor(sources: Sources) -> nn.Module:
    module = sources.load()
    module.TABLE[0] = 9.0
    return module.Block()


@change
def number_of_a_module(sources: Sources) -> nn.Module:
    module = sources.load()
    module.helper_of_saved.STEP = 4.0
    return module.Block()


@change
def attribute(sources: Sources) -> nn.Module:
    return sources.load().Block(3.0)


@change
def tensor_attribute(sources: Sources) -> nn.Module:
    model = sources.load().Block()
    model.plain = torch.full((8,), 2.0)
    return model


@change
def replaced_method(sources: Sources) -> nn.Module:
    module = sources.load()
    module.Block.forward = lambda self, x: {"y": self.linear(x), "rows": x.shape[0]}
    return module.Block()


@change
def hook(sources: Sources) -> nn.Module:
    model = sources.load().Block()
    model.linear.register_forward_hook(lambda module, args, result: result * 2)
    return model


@change
def dtype(sources: Sources) -> nn.Module:
    model = sources.load().Block()
    model.linear.bias = nn.Parameter(model.linear.bias.detach().clone(), requires_grad=False)
    return model


QUICK_CHANGES = {"source", "global_container", "global_tensor", "attribute", "replaced_method", "hook"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK_CHANGES)) for one in CHANGES]
)
def test_changed_model_code_or_data_is_retraced(name: str, sources: Sources, exports: Counter) -> None:
    for count in (1, 0):
        block = sources.load().Block().eval()
        assert exports.during(lambda block=block: runs_as_eager(block, sources.folder))[0] == count
    model = CHANGES[name](sources).eval()
    assert exports.during(lambda: runs_as_eager(model, sources.folder))[0] == 1
    assert exports.during(lambda: runs_as_eager(model, sources.folder))[0] == 0


def test_global_named_like_an_attribute_does_not_count(sources: Sources, exports: Counter) -> None:
    for count, unrelated in ((1, torch.ones(2)), (0, torch.zeros(2)), (0, torch.Generator())):
        module = sources.load()
        module.plain = unrelated  # forward reads self.plain
        model = module.Block().eval()
        assert exports.during(lambda model=model: planned(model, sources.folder))[0] == count


PACKAGE = {
    "__init__": "",
    "model": "from torch import nn\nfrom package_of_saved.helper import f\nTABLE = {'g': abs}\n"
    "class Block(nn.Module):\n    def forward(self, x):\n"
    "        return {'y': TABLE['g'](f(x)), 'rows': x.shape[0]}\n",
    "helper": "from package_of_saved import deep\ndef f(x):\n    return deep.g(x)\n",
    "deep": "def g(x):\n    return x * 2\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Loads the class of a model of an installed package, as a new process would."""
    folder = tmp_path / "site-packages" / "package_of_saved"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(folder.name)]:
            del sys.modules[name]

    def load() -> Any:
        forget()
        return importlib.import_module(f"{folder.name}.model").Block

    yield load
    forget()


@pytest.mark.parametrize(
    "how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in ("function", "table"))]
)
def test_change_deep_in_a_package_is_retraced(
    how: str, package: Callable[[], Any], tmp_path: Path, exports: Counter
) -> None:
    runs_as_eager(package()().eval(), tmp_path)
    assert exports.during(lambda: runs_as_eager(package()().eval(), tmp_path))[0] == 0
    if how == "file":
        deep = tmp_path / "site-packages" / "package_of_saved" / "deep.py"
        deep.write_text(PACKAGE["deep"].replace("2", "3.0"))
    block = package()
    if how == "function":
        sys.modules["package_of_saved.deep"].g = lambda x: x * 5  # type: ignore[attr-defined]  # a user's
    if how == "table":
        sys.modules["package_of_saved.model"].TABLE["g"] = lambda x: x * 5  # type: ignore[attr-defined]
    assert exports.during(lambda: runs_as_eager(block().eval(), tmp_path))[0] == 1
    assert exports.during(lambda: runs_as_eager(block().eval(), tmp_path))[0] == 0


SAVED = "__import__('deep.of.saved').of.saved"
DEEP = {  # what is imported, computed, and an attribute of the model
    "submodule": ("import deep.of.saved as _\nimport deep", "deep.of.saved.f(x)", "None"),
    "imported by forward": ("", f"{SAVED}.f(x)", "None"),
    "module in a dict": ("import deep.of.saved as m\nOPS = {'a': m}", "OPS['a'].f(x)", "None"),
    "enum": ("", "x * self.kind.factor()", f"{SAVED}.Kind.A"),
    "dict with methods": ("", "x * self.kind.factor()", f"{SAVED}.Config()"),
    "class around a function": (
        "",
        "x * self.kind()",
        f"(lambda kind: lambda: kind.A.factor())({SAVED}.Kind)",
    ),
}
DEEP_MODEL = """
from torch import nn
{imports}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = {kind}
    def forward(self, x):
        return {{"y": {computes}, "rows": x.shape[0]}}
"""
DEEP_CODE = """
import enum
def f(x): return x * {factor}
class Kind(enum.Enum):
    A = 1
    def factor(self): return {factor}
class Config(dict):
    def factor(self): return {factor}
"""


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] * (turn % 3 > 0)) for turn, how in enumerate(DEEP)]
)
def test_change_deep_in_user_code_is_retraced(
    how: str, tmp_path: Path, exports: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    imports, computes, kind = DEEP[how]
    (tmp_path / "deep" / "of").mkdir(parents=True)
    (tmp_path / "deep_model.py").write_text(DEEP_MODEL.format(imports=imports, computes=computes, kind=kind))
    for factor, count in ((2.0, 1), (2.0, 0), (3.0, 1)):
        (tmp_path / "deep" / "of" / "saved.py").write_text(DEEP_CODE.format(factor=factor))
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.split(".")[0] in ("deep", "deep_model")]:
            monkeypatch.delitem(sys.modules, name)
        model = importlib.import_module("deep_model").Block().eval()
        assert exports.during(lambda made=model: runs_as_eager(made, tmp_path))[0] == count


def test_change_in_a_file_without_module_is_retraced(tmp_path: Path, exports: Counter) -> None:
    for factor, count in ((2.0, 1), (2.0, 0), (3.0, 1)):
        file = tmp_path / "loaded.py"
        file.write_text(DEEP_MODEL.format(imports=f"F = {factor}", computes="scaled(x)", kind="None"))
        with file.open("a") as opened:
            opened.write(f"\ndef scaled(x): return x * {factor}\n")
        code, made = compile(file.read_text(), str(file), "exec"), ModuleType("loaded")  # not in sys.modules
        exec(code, vars(made))
        model = made.Block().eval()
        assert exports.during(lambda model=model: runs_as_eager(model, tmp_path))[0] == count


@pytest.mark.slow
def test_a_llama_of_plain_attention_is_saved(tmp_path: Path, exports: Counter) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    config._attn_implementation = "eager"
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(16).view(2, 8)
    for count in (1, 0):
        assert exports.during(lambda: plan_of(model, tmp_path, ids))[0] == count


def plan_of(model: nn.Module, folder: Path, ids: torch.Tensor) -> None:
    graphplan.plan(model, {"cpu": "1GiB"}, kwargs={"input_ids": ids}, capture_cache=folder)


def test_patched_torch_function_is_retraced(
    sources: Sources, exports: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    planned(model, sources.folder)
    own = functional.relu
    monkeypatch.setattr(functional, "relu", lambda x, inplace=False: own(x) * 2)
    assert exports.during(lambda: planned(model, sources.folder))[0] == 1


def test_other_trace_settings_are_retraced(sources: Sources, exports: Counter) -> None:
    model, batch = sources.load().Block(), torch.export.Dim("batch", min=1, max=64)
    ways: list[dict[str, Any]] = [{}, {"dynamic_shapes": {"x": {0: batch}}}]
    assert [exports.during(lambda w=way: planned(model, sources.folder, **w))[0] for way in ways] == [1, 1]
    model.eval()
    assert exports.during(lambda: planned(model, sources.folder))[0] == 1

    def on_cpu() -> None:
        graphplan.plan(model, {"cpu": "1MiB"}, (X,), capture_cache=sources.folder / "captures")

    on_cpu()
    with torch.autocast("cpu", torch.bfloat16):
        assert exports.during(on_cpu)[0] == 1


def _only(folder: Path) -> Path:
    (found,) = (folder / "captures").iterdir()
    return found


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    file.write_bytes(data)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _foreign(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("capture.json", "{}")
        archive.writestr("constants.safetensors", b"")


def _rewrite(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    content = json.loads(parts["capture.json"])
    edit(content)
    parts["capture.json"] = json.dumps(content).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def _of_another(file: Path) -> None:
    _rewrite(file, lambda content: content.update(key="0" * 64))


def _with_code(file: Path) -> None:
    code = "__import__('sys').modules.update(run_of_saved=1)"
    _rewrite(file, lambda content: content["capture"].update(guards=[["", code]]))


def _node_with_code(op: str, name: str, target: Any) -> Callable[[Path], None]:
    """A change of a file: another node, before the result, whose argument would be code."""
    code = "__import__('sys').modules.update(run_of_saved=1) or 0"

    def change(content: dict[str, Any]) -> None:
        nodes = content["capture"]["graph"]["nodes"]
        node = [op, name.replace("*", code), target, ["tuple", code], ["dict"], {"value": ["plain", 0]}]
        nodes.insert(len(nodes) - 1, node)

    return lambda file: _rewrite(file, change)


_CALLING = [
    ("call_function", "run", ["function", "builtins", "eval"]),
    ("call_function", "run", ["function", "_operator", "call"]),
    ("call_function", "run", ["function", "sys", "sym_exec"]),
    ("call_function", "*", ["function", "builtins", "len"]),
    ("call_method", "run", "format"),
    ("get_attr", "run", "'*'"),
]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _of_another,
        _with_code,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (_flip, _empty, _foreign)),
        *(
            pytest.param(_node_with_code(*one), marks=[pytest.mark.slow] * (turn > 1))
            for turn, one in enumerate(_CALLING)
        ),
    ],
)
def test_damaged_file_is_retraced(damage: Callable[[Path], None], sources: Sources, exports: Counter) -> None:
    model = sources.load().Block()
    wanted = planned(model, sources.folder)
    damage(_only(sources.folder))
    with pytest.warns(graphplan.GraphplanWarning, match=r"\.zip .* retracing the model"):
        count, found = exports.during(lambda: planned(model, sources.folder))
    assert (count, found.to_json()) == (1, wanted.to_json())
    assert "run_of_saved" not in sys.modules
    with warnings.catch_warnings():  # it was written again
        warnings.simplefilter("error", graphplan.GraphplanWarning)
        assert exports.during(lambda: planned(model, sources.folder))[0] == 0


class ByData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ByData(), "sizes that depend on values of inputs"),
        (Opaque(), r"Opaque\.state is an object of .*Generator"),
    ],
)
def test_unsavable_trace_warns(model: nn.Module, why: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planned(model, tmp_path)
    assert any(re.search(why, str(one.message)) for one in told)
    assert not list((tmp_path / "captures").iterdir())


class Rounded(nn.Linear):
    """Branches on parts of a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = math.ceil(x.shape[0] / 2) > 1 and math.floor(x.shape[0] * 1.5) < 100
        return super().forward(x) if half else x


def test_conditions_on_parts_of_sizes_are_saved(tmp_path: Path, exports: Counter) -> None:
    model = Rounded(X.shape[-1], X.shape[-1])
    assert exports.during(lambda: planned(model, tmp_path))[0] == 1
    assert exports.during(lambda: planned(model, tmp_path))[0] == 0


def test_warnings_of_a_trace_are_repeated(tmp_path: Path) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.found = nn.Linear(X.shape[-1], 4), SimpleNamespace(loss=None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.found.loss = self.linear(x).square().mean()
            return x * 2

    for _ in range(2):
        with pytest.warns(graphplan.GraphplanWarning, match="leaves .*loss with a gradient"):
            graphplan.partition(Leaves(), {"cpu": "1GiB"}, (X,), grad=True, capture_cache=tmp_path)


class Text(str):
    pass


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


class PrivateSlots:
    __slots__ = ("__a",)  # whose name in the object is another

    def __init__(self, a: int) -> None:
        self.__a = a


def around(n: int) -> Callable[[int], int]:
    return lambda x: x * n


class Pair(NamedTuple):
    first: int
    second: int


class Single:
    one: Any  # which the description of the class reads, and so makes an entry in it


Single.one = Single()

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Settled(nn.Module):
    """Adds what fixes the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + self.table


class Masked(nn.Module):
    """Masks what is padding: the largest length is a size of the other input."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        padding = torch.arange(longest).expand(len(x), longest) >= lengths[:, None]
        return x.relu().masked_fill(padding[..., None], 0.0)


@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
@pytest.mark.parametrize(
    ("model", "args"),
    [(Settled(), (torch.randn(2, 4),)), (Masked(), (torch.randn(2, 4, 2), torch.tensor([4, 3])))],
)
def test_trace_with_a_specialized_size_is_saved(
    model: nn.Module, args: tuple[torch.Tensor, ...], tmp_path: Path, exports: Counter
) -> None:
    # regression: a warning claimed that the saved trace differs
    wanted = graphplan.plan(model, {"cpu": "1MiB"}, args, capture_cache=tmp_path)
    count, found = exports.during(
        lambda: graphplan.plan(model, {"cpu": "1MiB"}, args, capture_cache=tmp_path)
    )
    assert (count, found.to_json()) == (0, wanted.to_json())


class Notes(nn.Module):
    """Writes to a view of a buffer, in a block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.seen[0].add_(y[0].detach())
        return (y * self.seen.sum(0)).chunk(2)[0]


def test_saved_trace_keeps_shared_memory_of_values(tmp_path: Path, exports: Counter) -> None:
    # the buffer of what was read was one that nothing writes to
    def placed() -> Any:
        return graphplan.partition(
            Notes(), {"cpu": "1MiB"}, (torch.randn(2, 4),), grad=True, strict=True, capture_cache=tmp_path
        )

    wanted = placed().plan.to_json()
    count, found = exports.during(placed)
    assert (count, found.plan.to_json()) == (0, wanted)
    assert found.plan.graph.weights["seen"].mutated


class Lazy(ModuleType):
    """A module that is imported when something is asked of it, which fails here."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} is of an optional package")


def test_lazy_modules_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: Counter
) -> None:
    monkeypatch.setitem(sys.modules, "lazy_of_saved", Lazy("lazy_of_saved"))
    for wanted in (1, 0):
        count, _ = exports.during(
            lambda: graphplan.plan(nn.Linear(8, 8), BUDGETS, (X,), capture_cache=tmp_path)
        )
        assert count == wanted


def test_values_of_one_description_are_saved_once(tmp_path: Path) -> None:
    # each memory was another value, which took most of the time in which a trace of many layers is read
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    graphplan.plan(model, {"cpu": "1MiB"}, (torch.randn(2, 4),), capture_cache=tmp_path)
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        tables = json.loads(archive.read("capture.json"))["capture"]["tables"]
    assert len(tables["values"]) == 3  # weights, biases, activations


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: Text("a"), lambda: Text("b")),
        (lambda: Slots(1), lambda: Slots(2)),
        (lambda: PrivateSlots(1), lambda: PrivateSlots(2)),
        (lambda: {1: 2}.get, lambda: {1: 3}.get),
        (lambda: (1,), lambda: [1]),
        (lambda: CYCLE, lambda: [CYCLE]),
        (lambda: around(1), lambda: around(2)),
        (lambda: np.sin, lambda: np.cos),
        (lambda: np.shape, lambda: np.size),
        (lambda: str.upper, lambda: str.lower),
        (lambda: datetime.UTC, lambda: datetime.timezone(datetime.timedelta(hours=1))),
        (lambda: vars(Pair)["first"], lambda: vars(Pair)["second"]),
        (lambda: vars(dict)["fromkeys"], lambda: vars(bytes)["fromhex"]),
        (lambda: Single, lambda: Slots),
        (lambda: torch.ones(2), lambda: torch.ones(2, 1)),
        (lambda: {"a": 1, "b": 2}, lambda: {"a": 1, "b": 3}),
    ],
)
def test_equal_values_alone_have_one_description(
    make: Callable[[], object], other: Callable[[], object]
) -> None:
    def digest(value: object) -> str:
        found = Description({})
        found.add(value, "it")
        return found.digest()

    assert digest(make()) == digest(make()) != digest(other())


@pytest.mark.parametrize("target", [operator.mul, torch.sym_max, torch.ops.aten.add.Tensor, map_impl])
def test_node_targets_are_saved_by_name(target: Any) -> None:
    assert target_from_plain(json.loads(json.dumps(plain_target(target)))) is target


def test_capture_cache_must_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for no_folder in (file, True):
        with pytest.raises(graphplan.InputError, match="capture_cache must be a folder"):
            graphplan.plan(nn.Linear(8, 8), BUDGETS, (X,), capture_cache=no_folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    graphplan.plan(nn.Linear(8, 8), BUDGETS, (X,), capture_cache="~/captures")
    assert len(list((tmp_path / "captures").iterdir())) == 1


def test_a_training_step_is_read(tmp_path: Path, exports: Counter) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    gradients = []
    for wanted in (1, 0):
        with graphplan.simulate({0: "1MiB"}):

            def trained() -> list[torch.Tensor]:
                placed = graphplan.partition(model, {0: "1MiB"}, (X,), train=True, capture_cache=tmp_path)
                placed(X).sum().backward()
                return [p.grad.cpu().clone() for p in placed.parameters()]

            count, found = exports.during(trained)
        assert count == wanted
        gradients.append(found)
    model(X).sum().backward()
    for each in gradients:
        for one, parameter in zip(each, model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x)
        return {"scores": scores, "loss": scores.sum()}


def test_saved_step_keeps_inputs_without_gradient(tmp_path: Path, exports: Counter) -> None:
    model = WithLoss()
    steps = []
    for wanted in (1, 0):
        with graphplan.simulate({0: "1MiB"}):
            options: dict[str, Any] = {"train": True, "capture_cache": tmp_path}
            count, placed = exports.during(lambda: graphplan.partition(model, {0: "1MiB"}, (X,), **options))  # noqa: B023
            program = placed._graphplan.programs[0]
            steps.append((program.signature.leaves, program.backward.others))
        assert count == wanted
    assert steps[0] == steps[1]
    assert not steps[0][0][0].gradient
    assert steps[0][1] == {0: "scores"}


def test_calls_of_a_function_read_their_saved_traces(sources: Sources, exports: Counter) -> None:
    def made() -> Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphplan.GraphplanWarning)
            found: Plan = graphplan.plan(
                sources.load().Block(),
                BUDGETS,
                calls=lambda m: m.linear(m(X)["y"]),
                capture_cache=sources.folder / "captures",
            )
        return found

    counts, plans = zip(*(exports.during(made) for _ in range(2)), strict=True)
    assert counts == (2, 0)
    assert len(plans[1].calls) == 2


@pytest.mark.slow
def test_generate_reads_its_traces(tmp_path: Path, exports: Counter) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 9).reshape(1, 8)
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    def generated() -> torch.Tensor:
        with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
            placed = graphplan.partition(
                model, {0: "1MiB", 1: "1MiB"}, kwargs={"input_ids": ids}, capture_cache=tmp_path
            )
            tokens: torch.Tensor = placed.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return tokens

    counts, tokens = zip(*(exports.during(generated) for _ in range(2)), strict=True)
    assert counts[0] > 0
    assert counts[1] == 0
    assert all(torch.equal(one, wanted) for one in tokens)
