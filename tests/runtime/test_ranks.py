"""Models over real processes of a gloo group on loopback, compared with eager mode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import WORKER, Ranks, said, said_by_case

from graphplan._compat.torch import stages_go_backward
from graphplan.errors import InputError
from graphplan.runtime.distributed.shared_gradients import SharedGradients

# at every change the first of these on two ranks; all 32 on two and on three under -m slow
FIRST = ("ResNet",)
THREE = ("CLIP", "Llama", "T5", "GPT2", "Qwen2Moe", "Mamba", "DebertaV2", "Bart", "Swin", "Segformer")
REST = (
    "Gemma3", "Mixtral", "Bert", "ModernBert", "OPT", "GPTNeoX", "Bloom", "RecurrentGemma", "Albert", "FNet",
    "Marian", "ConvNext", "ViT", "MobileNetV2", "Hiera", "Wav2Vec2", "AST", "Siglip", "Mistral", "Qwen3",
    "Whisper",
)  # fmt: skip
PLAIN = ("UNet", "DenseNet", "Branches", "SharedWeight", "Views", "EarlyViews")
GENERATE = ("Llama",)
MORE_GENERATE = (
    ("T5",),
    ("Gemma3", "Mixtral", "GPT2", "OPT", "GPTNeoX"),
    ("Qwen2Moe", "Bloom", "Mistral", "Qwen3", "Gemma2"),
    ("Bart", "Marian", "Whisper", "UMT5"),
)
TRAINS = stages_go_backward()
trains = pytest.mark.skipif(not TRAINS, reason="pipelining goes backward past integers since torch 2.12")


def outputs_of(ranks: int, *arguments: str) -> list[str]:
    with Ranks(ranks, *arguments) as group:
        return group.outputs()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that three ranks save, from which two resume."""
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile that each rank writes."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def two(checkpoint: Path, three: object, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The output of two ranks in each case, by rank: processes are started once for all."""
    assert three
    cases = [
        "architectures",
        *FIRST,
        "--",
        "weights",
        "--",
        "no_batches",
        "--",
        "values",
        "--",
        *(["tied", "--", "closed", "--", "steps", str(checkpoint), "3", "--"] if TRAINS else []),
        *(["interleaved", "--"] if TRAINS else []),
        *(["no_stage", str(tmp_path_factory.mktemp("no_stage")), "--"] if TRAINS else []),
        "fault",
        "forms",
        "0",
    ]
    return [said_by_case(output) for output in outputs_of(2, *cases)]


@pytest.fixture(scope="module")
def three(checkpoint: Path, traces: Path) -> list[dict[str, str]]:
    """The output of three ranks in each case."""
    cases = ["plain", "--", "differs", "--", "constants", "--", "profile", str(traces)]
    if TRAINS:
        cases += [
            "--",
            "training",
            "--",
            "stopped",
            "--",
            "steps",
            str(checkpoint),
            "2",
            "--",
            "planned",
            "gpipe",
            "2MiB",
        ]
    return [said_by_case(output) for output in outputs_of(3, *cases)]


def check_equal(outputs: Sequence[str], names: Sequence[str]) -> None:
    """Every rank prints for each model that it is divided and equals eager mode."""
    for output in outputs:
        lines = {line.partition(":")[0]: line for line in said(output)}
        assert set(lines) == set(names), output[-2000:]
        for line in lines.values():
            found = re.search(r": (\d)/\d stages, same type True, difference (\S+)$", line)
            assert found is not None, line
            assert int(found[1]) > 1, line
            assert float(found[2]) < 1e-5, line


def test_architectures_on_two_ranks(two: list[dict[str, str]]) -> None:
    check_equal([cases["architectures"] for cases in two], FIRST)


def test_plain_modules_with_skips_on_ranks(three: list[dict[str, str]]) -> None:
    check_equal([cases["plain"] for cases in three], PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stems"), [(2, THREE), (2, REST), (3, FIRST), (3, THREE), (3, REST)])
def test_other_architectures_on_two_ranks(ranks: int, stems: Sequence[str]) -> None:
    check_equal(outputs_of(ranks, "architectures", *stems), stems)


@pytest.mark.slow
def test_plain_modules_on_two_ranks() -> None:
    check_equal(outputs_of(2, "plain"), PLAIN)


def check_generation(outputs: Sequence[str], stems: Sequence[str]) -> None:
    """Tokens are eager's on every rank; the last sends only tokens and what an encoder returns, the others
    only what crosses cuts."""
    for rank, output in enumerate(outputs):
        lines = {line.partition(":")[0]: line for line in said(output)}
        assert set(lines) == set(stems), output[-2000:]
        for line in lines.values():
            assert "greedy True, sampled True" in line
            sent = line.partition("; sent ")[2]
            assert ("tokens" in sent) == (rank == len(outputs) - 1), line
            assert "logits" not in sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stems"),
    [(2, GENERATE), (3, GENERATE), *((ranks, stems) for ranks in (2, 3) for stems in MORE_GENERATE)],
)
def test_generation_of_more_families(ranks: int, stems: Sequence[str]) -> None:
    check_generation(outputs_of(ranks, "generation", *stems), stems)


@pytest.mark.parametrize("kind", ["dies", pytest.param("stops", marks=pytest.mark.slow)])
def test_silent_rank_is_named_in_errors(kind: str) -> None:
    with Ranks(3, "fault", kind, "1") as group:
        first, last = (said(output)[-1] for output in group.outputs([0, 2]))
    assert re.match(r"ClusterError: rank 0 \(stage 0 of 3\) waited for rank 1 to receive 'linear_\d'", first)
    assert re.match(r"ClusterError: rank 2 \(stage 2 of 3\) waited for rank 1 to send 'linear_\d'", last)


@pytest.mark.slow
def test_unreachable_rank_fails_all_ranks() -> None:
    with Ranks(3, "fault", "unreachable", "1") as group:
        first, middle, last = (said(output)[-1] for output in group.outputs())
    assert re.match(r"ClusterError: rank 0 \(stage 0 of 3\) waited for rank 1 to receive 'linear_\d'", first)
    assert re.match(r"ClusterError: rank 1 \(stage 1 of 3\) waited for rank \d to \w+ 'linear_\d'", middle)
    assert re.match(r"ClusterError: rank 2 \(stage 2 of 3\) waited for rank 1 to send 'linear_\d'", last)


def test_rank_with_two_stages_names_the_waiting_one() -> None:
    with Ranks(2, "fault", "dies", "1") as group:
        line = said(group.outputs([0])[0])[-1]
    assert re.match(r"ClusterError: rank 0 \(stage 2 of 4\) waited for rank 1 to send 'linear_\d'", line)


@trains
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("backward", "ZeroDivisionError: "),
        ("without gradient", "InputError: the loss has no gradient"),
        pytest.param("raises", "RuntimeError: size mismatch", marks=pytest.mark.slow),
        pytest.param("rows", r"InputError: .* one number .*, not a tensor of \[2\]", marks=pytest.mark.slow),
    ],
)
def test_error_in_the_loss_is_raised_on_its_rank(loss: str, message: str) -> None:
    with Ranks(2, "fault", loss, "1") as group:
        first, last = (said(output) for output in group.outputs())
    assert re.match(message, last[0]), last
    assert re.match(r"ClusterError: rank 0 \(stage [02] of 4\) waited for rank 1", first[0])
    for error, then in (
        first,
        last,
    ):  # without the second error, the process was ended by what had come too late
        assert then.startswith("ClusterError: a call before this one failed on this rank")
        assert error.split(":")[0] in then


@trains
def test_no_port_is_opened_and_nothing_unpickled(two: list[dict[str, str]]) -> None:
    for cases in two:
        (line,) = said(cases["closed"])
        assert re.match(r"2 stages, [1-9]\d* ports, 0 opened$", line), line


def test_differences_between_ranks_raise_at_the_start(three: list[dict[str, str]]) -> None:
    for cases in three:
        budgets, weights, code, numbers, results = said(cases["differs"])
        assert "ClusterError: ranks 0, 2 and rank 1 differ in machines=" in budgets
        assert "ClusterError: ranks 0, 2 and rank 1 differ in the weights' names and sizes" in weights
        assert "ClusterError: ranks 0, 2 and rank 1 differ in the traced graph" in code
        assert "ClusterError: ranks 0, 2 and rank 1 differ in the traced graph" in numbers
        assert "ClusterError: ranks 0, 2 and rank 1 differ in return_outputs=" in results


def test_indivisible_inputs_raise(two: list[dict[str, str]]) -> None:
    for cases in two:
        vector, empty, then, copied, *rows, other = said(cases["no_batches"])
        assert "InputError: input has 1 dimensions, but 2 in the example" in vector
        assert "InputError: a batch of 0 rows does not divide into 2 microbatches" in empty
        assert then == "then True"
        assert "cannot be copied or pickled" in copied
        assert rows == ["rows True"] * 3
        assert "InputError: last has 4 rows, but the batch has 2" in other


@pytest.mark.usefixtures("group_of_one")
def test_post_accumulate_hook_on_a_shared_weight_raises() -> None:
    layer = torch.nn.Linear(4, 4)
    handle = layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    shared = SharedGradients({"weight": (0,)})
    with pytest.raises(InputError, match="'weight' is read by several stages"), shared.summed(layer):
        pass
    handle.remove()
    with shared.summed(layer):
        layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(4, 4))


def test_calls_that_differ_in_constants_are_detected(three: list[dict[str, str]]) -> None:
    for cases in three:
        assert said(cases["constants"]) == ["True"] * 4


def test_calls_that_differ_in_branch_values(two: list[dict[str, str]]) -> None:
    for cases in two:
        *one, apart = said(cases["values"])[:6]
        assert one == ["True"] * 5
        assert apart.startswith("InputError: the code branches on values of mask, which differ between")
        assert said(cases["values"])[6:] == ["True"] * (3 if TRAINS else 0)


def test_other_sizes_on_one_rank_raise(two: list[dict[str, str]]) -> None:
    said_by_last = said(two[1]["fault"])[-1]
    assert "rank 1 was called with inputs of other names or sizes than rank 0" in said_by_last


def test_weights_are_sent_by_rank_0_or_read(two: list[dict[str, str]]) -> None:
    kinds = "CheckpointError", "ClusterError: opening the checkpoint failed on rank 0"
    for cases, kind in zip(two, kinds, strict=True):
        *sent, absent, loaded = said(cases["weights"])
        assert [*sent, loaded] == ["sent: equal True", "read: equal True", "loaded: equal True"]
        assert absent.startswith(kind), absent
        assert "there is no folder" in absent


@trains
def test_training_step_gradients_equal_eager_mode(three: list[dict[str, str]]) -> None:
    for cases in three:
        (line,) = said(cases["training"])
        assert float(line.rpartition(" ")[2]) < 1e-5, line


@trains
def test_detached_gradients_equal_eager_mode(three: list[dict[str, str]]) -> None:
    for cases in three:
        *models, rows = said(cases["stopped"])
        assert len(models) == 4
        for line in models:
            assert re.search(r": 3 stages, gradients differ by (0\.0e\+00|\d\.\de-0[6-9])$", line), line
        assert "a target of shape [3, 16]" in rows
        assert "give it 6 rows" in rows


def check_planned(outputs: Sequence[str]) -> None:
    """After two steps, weights equal eager mode's, and no device exceeds the plan's peak."""
    for output in outputs:
        _, memory, difference = said(output)
        peak, planned, budget = map(int, re.findall(r"\d+", memory))
        assert 0 < peak <= planned <= budget
        assert float(difference.rpartition(" ")[2]) < 1e-4, difference


@trains
def test_planned_training_keeps_the_budgets(three: list[dict[str, str]]) -> None:
    outputs = [cases["planned"] for cases in three]
    check_planned(outputs)
    stages = [said(output)[0] for output in outputs]
    assert any("recomputed 0" not in stage for stage in stages), stages
    assert all(int(stage.rpartition(" ")[2]) > 0 for stage in stages)


@trains
@pytest.mark.slow
def test_planned_training_by_1f1b_keeps_the_budgets() -> None:
    outputs = outputs_of(3, "planned", "1f1b", "2MiB")
    check_planned(outputs)
    first, middle, last = (int(said(output)[0].rpartition(" ")[2]) for output in outputs)
    assert min(first, middle) > last == 0


@trains
@pytest.mark.slow
def test_planned_training_with_two_stages_each_keeps_the_budgets() -> None:
    outputs = outputs_of(2, "planned", "interleaved", "3MiB")
    check_planned(outputs)
    stages = [said(output)[0] for output in outputs]
    assert all(line.startswith("4 stages") for line in stages), stages
    assert all(int(line.rpartition(" ")[2]) > 0 for line in stages), stages


@trains
def test_shared_weight_sums_gradients_of_both_stages(two: list[dict[str, str]]) -> None:
    for cases in two:
        stages, gradients, weights, kept = said(cases["tied"])
        assert kept == "kept: True"  # what was there before a step that failed
        assert stages == "2 stages, copies equal True"
        assert float(gradients.rpartition(" ")[2]) < 1e-5, gradients
        assert float(weights.rpartition(" ")[2]) < 1e-3, weights  # after AdamW, which divides small by small


@trains
def test_training_loop_on_rank_without_stage(two: list[dict[str, str]]) -> None:
    used, unused = (said(cases["no_stage"])[-1] for cases in two)
    assert used == "parameters [64, 8], losses 4, norm True"
    assert unused == "parameters [0], losses 0, norm True"


def check_turns(outputs: Sequence[str], names: str) -> None:
    """Two stages on each rank equal eager mode."""
    for output in outputs:
        lines = dict(line.split(": ") for line in said(output))
        assert list(lines) == names.split()
        assert lines.pop("generate", "True") == "True"
        for name, line in lines.items():
            assert float(line.split()[-1]) < 1e-5, (name, line)
            assert name == "single" or line.startswith("4 stages"), (name, line)
        assert "1 parameters twice" in lines.get("turns", "1 parameters twice")


@trains
def test_two_stages_per_rank_equal_eager_mode(two: list[dict[str, str]]) -> None:
    check_turns([cases["interleaved"] for cases in two], "UNet turns")


@trains
@pytest.mark.slow
def test_more_models_with_two_stages_per_rank() -> None:
    names = "forward single generate train grad DenseNet ends"
    check_turns(outputs_of(2, "interleaved_more"), names)


@trains
def test_two_ranks_resume_from_checkpoint_of_three(
    two: list[dict[str, str]], three: list[dict[str, str]]
) -> None:
    for group, begins in ((three, "after 0 steps, 3 stages"), (two, "after 2 steps, 4 stages")):
        for cases in group:
            (line,) = said(cases["steps"])
            assert line.startswith(begins)
            assert float(line.rpartition(" ")[2]) < 1e-5, line


def test_all_ranks_return_the_same_profile(three: list[dict[str, str]], traces: Path) -> None:
    expected = ["gpipe: 3 stages", "interleaved: 6 stages"]
    assert [said(cases["profile"]) for cases in three] == [expected] * 3
    for schedule, stages in (
        ("gpipe", ["stage 0", "stage 1", "stage 2"]),
        ("interleaved", ["stages 0, 3", "stages 1, 4", "stages 2, 5"]),
    ):
        first, *others = (path.read_text() for path in traces.glob(f"{schedule}-*"))
        assert others == [first] * 2
        events = json.loads(first)["traceEvents"]
        lanes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert lanes[:3] == [f"machine {i} ({own})" for i, own in enumerate(stages)]
        assert lanes[3:] == [f"machine {i} ({own}, measured)" for i, own in enumerate(stages)]


@trains
@pytest.mark.slow
def test_torchrun_resumes_from_checkpoint_after_rank_failure(tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER)]
    ended = subprocess.run(
        [*command, "steps", str(tmp_path), "3", "dies"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = said(ended.stdout)
    assert len(lines) == 2, ended.stdout
    for line in lines:
        assert line.startswith("after 1 steps, 4 stages"), line
        assert float(line.rpartition(" ")[2]) < 1e-5, line


@pytest.mark.slow
def test_process_memory_grows_by_its_stage_alone(tmp_path: Path) -> None:
    """For a model of 1 GB from a checkpoint, it exceeds the stage's weights by 10 % and 32 MiB at most."""
    for _ in range(2):  # rank 0 writes the checkpoint the first time, and is larger for it
        with Ranks(2, "memory", str(tmp_path / "llama")) as group:
            lines = [said(output)[-1].split() for output in group.outputs()]
    for _, weights, _, grown in lines:
        assert int(weights) > 400_000_000
        assert int(grown) < 1.1 * int(weights) + (32 << 20)


@pytest.mark.skipif(TRAINS, reason="of older torch")
def test_training_with_older_torch_raises() -> None:
    for output in outputs_of(2, "planned", "gpipe", "2MiB"):
        assert "training over machines needs torch 2.12 or newer" in output
