"""The examples, made small: beside a single device, and what else they print, report and refuse."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import struct
import tarfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.fixtures import Launch
from tests.launching import ROOT

pytestmark = pytest.mark.once

EXAMPLES = ROOT / "examples"
GPT = "--width 32 --length 16 --steps 4"
MLP = "--hidden 64 --steps 20"
TUTORIAL = "--layers 18 --width 4 --steps 2 --batch-size 16 --dp 2"
#: How an example prints the loss of the last step, and on how many ranks.
PRINTED = {
    "dygraph_gpt": ("step {last}: loss {loss:.4f}, ", 1),
    "dygraph_mlp": ("epoch 0, iteration 20: loss {loss:.4f}, ", 1),
    "static_mlp": ("step {last}: loss {loss}, accuracy ", 1),
    "static_resnet": ("[Epoch 0, batch {last}] loss: {loss:.5f}, acc1: ", 1),
    # One rank of each replica has the last stage; the first one of the job prints the sum.
    "colossalai_resnet": ("[Epoch 0, batch {last}] loss: ", 2),
    "mindspore_resnet": ("epoch: 1 step: 2, loss is {loss}", 1),
}


def compared(
    launch: Launch, folder: Path, name: str, nproc: int | None, words: str
) -> tuple[Any, tuple[str, ...]]:
    """Runs an example beside a single device; returns its report, and what its ranks print."""
    report = folder / "report.json"
    args = [*words.split(), "--report", str(report)]
    logs = launch(EXAMPLES / f"{name}.py", nproc, args=args, timeout=280).logs
    found = json.loads(report.read_text())
    assert found.get("passed", found["bit_exact"]), found["first_difference"]
    # Gradients and parameters have the example's own tolerance.
    assert np.allclose(found["pipeline_loss"], found["single_loss"], rtol=1e-6, atol=0)
    assert len(found["single_loss"]) == found["steps"]
    assert not found["bit_exact"] or found["max_abs_diff"] == found["max_abs_param_diff"] == 0.0
    return found, logs


@pytest.mark.parametrize(
    ("name", "nproc", "words", "expected"),
    [
        ("dygraph_alexnet", 4, "--schedule FThenB", {"schedule": "FThenB", "ranks": 4}),
        ("dygraph_gpt", 4, f"{GPT} --dp 2", {"ranks": 2, "dp": 2, "mp": 1}),
        (
            *("dygraph_gpt", 4, f"{GPT} --mp 2 --chunks 2 --dropout 0.1 --recompute 1"),
            {"ranks": 2, "mp": 2, "schedule": "Interleaved1F1B", "steps": 4},
        ),
        ("dygraph_mlp", 4, f"{MLP} --dp 2", {"ranks": 2, "dp": 2}),
        ("dygraph_mlp", None, f"{MLP} --loss-reduction sum", {"bit_exact": True, "steps": 20}),
        ("static_mlp", None, "--pp 3 --steps 2", {"bit_exact": True}),
        (
            *("static_resnet", 4, "--layers 50 --width 8 --steps 2"),
            {"bit_exact": True, "ranks": 4, "steps": 2},
        ),
        (
            *("vision_language", 2, "--steps 2 --micro-batches 3 --rows 2 --layers 2 --width 16"),
            {"bit_exact": True, "ranks": 2, "steps": 2},
        ),
        ("colossalai_resnet", 4, TUTORIAL, {"bit_exact": True, "ranks": 2, "dp": 2}),
        ("mindspore_resnet", 4, TUTORIAL, {"bit_exact": True, "ranks": 2, "dp": 2}),
    ],
)
def test_an_example_trains_as_a_single_device_does(
    launch: Launch,
    tmp_path: Path,
    name: str,
    nproc: int | None,
    words: str,
    expected: dict[str, Any],
) -> None:
    found, logs = compared(launch, tmp_path, name, nproc, words)
    assert {key: found[key] for key in expected} == expected
    assert "alexnet" not in name or found["bit_exact"]
    if name.startswith("dygraph") and not {"dropout", "sum"} & {*re.findall(r"\w+", words)}:
        # Without statistics of a micro-batch, it matters to rounding alone how a batch is cut.
        assert np.allclose(found["pipeline_loss"], found["whole_batch_loss"], rtol=1e-4)
    if name in PRINTED:
        line, ranks = PRINTED[name]
        line = line.format(last=found["steps"] - 1, loss=found["pipeline_loss"][-1])
        assert [line in log for log in logs].count(True) == ranks, line


def test_the_main_job_prints_both_losses_of_each_step(launch: Launch, tmp_path: Path) -> None:
    found, logs = compared(launch, tmp_path, "dygraph_alexnet", 2, "")
    assert (found["steps"], found["data"], found["bit_exact"]) == (5, "digits", True)
    for log in logs:
        assert len(re.findall(r"^single_loss:\s+(\S+) pp_loss:\s+\1$", log, re.MULTILINE)) == 5
        assert "parity: bit-exact (losses, gradients and parameters)" in log


def test_the_gpt_learns_in_any_schedule(launch: Launch, tmp_path: Path) -> None:
    found, _ = compared(launch, tmp_path, "dygraph_gpt", None, f"{GPT} --pp 4 --schedule ZBH1")
    assert (found["ranks"], found["data"]) == (4, "pydoc_data.topics")
    # The bytes of English are far from equally likely, which is the first thing to learn.
    assert found["pipeline_loss"][0] == pytest.approx(np.log(256), rel=0.02)
    assert found["pipeline_loss"][-1] < found["pipeline_loss"][0] - 0.1


def test_the_modes_of_the_benchmark_are_alike(launch: Launch, tmp_path: Path) -> None:
    modes = ("sequential", "1F1B")
    found = []
    for mode in modes:
        report, logs = compared(launch, tmp_path, "dygraph_mlp", 2, f"{MLP} --mode {mode}")
        accuracy = f"test accuracy: {report['test_accuracy']:.4f}"
        assert [accuracy in log for log in logs].count(True) == 1
        found.append(report)
    assert [report["schedule"] for report in found] == [*modes]
    for name in ("pipeline_loss", "test_accuracy"):
        assert found[0][name] == found[1][name]
    assert found[0]["pipeline_loss"][-1] < found[0]["pipeline_loss"][0] - 0.1


def hashed(launch: Launch, name: str, nproc: int | None, words: str) -> str:
    """Returns the hash that an example prints."""
    log = launch(EXAMPLES / f"{name}.py", nproc, args=words.split(), timeout=280).logs[0]
    return re.findall(r"^hash: ([0-9a-f]{64})$", log, re.MULTILINE)[-1]


def test_one_hash_in_every_layout_and_by_hand(launch: Launch, tmp_path: Path) -> None:
    by_hand = hashed(launch, "one_hash_by_hand", None, "2")
    first = f"--checkpoint {tmp_path / 'run'}"
    hashed(launch, "one_hash", 4, f"--steps 1 --mp 2 --dp 2 {first}")
    words = f"--steps 2 --sharding 2 --stage 2 --chunks 2 --recompute 1 {first} --resume"
    assert hashed(launch, "one_hash", 4, words) == by_hand
    dropped = [
        hashed(launch, "one_hash", nproc, f"--steps 2 --dropout 0.1 {words}")
        for nproc, words in ((None, "--schedule ZBV"), (2, "--mp 2"))
    ]
    assert dropped[0] == dropped[1] != by_hand


def test_speed_is_told_where_nothing_is_compared(launch: Launch) -> None:
    job = launch(EXAMPLES / "dygraph_gpt.py", 2, args=GPT.split())
    assert re.search(r"^1F1B: \d+ tokens/s$", job.logs[1], re.MULTILINE)
    (log,) = launch(EXAMPLES / "dygraph_mlp.py", None, args=["--steps", "2"]).logs
    assert re.search(r"^1F1B: \d+ images/s$", log, re.MULTILINE)
    # The stages of the benchmark.
    rows = re.findall(r"^ +([01]) +\1 +\S+ .* (\S+) +\S+%$", log, re.MULTILINE)
    assert rows == [("0", "3,952,640"), ("1", "4,208,650")]
    assert "parity" not in job.logs[1] + log


def test_the_benchmark_learns_to_read_digits(launch: Launch) -> None:
    job = launch(EXAMPLES / "dygraph_mlp.py", None, args=["--hidden", "64", "--epochs", "10"])
    (accuracy,) = re.findall(r"^test accuracy: (\S+)$", job.logs[0], re.MULTILINE)
    assert float(accuracy) > 0.85


def test_the_table_of_schedules(launch: Launch, tmp_path: Path) -> None:
    report = tmp_path / "table.json"
    tiny = ["--hidden", "8", "--epochs", "2", "--batch-size", "256", "--micro-batch-size", "64"]
    example = EXAMPLES / "mnist_mlp_benchmark.py"
    log = launch(example, 2, args=[*tiny, "--report", str(report)]).logs[0]
    rows = json.loads(report.read_text())["rows"]
    assert list(rows) == ["sequential", "FThenB", "1F1B", "Interleaved1F1B"]
    for name, row in rows.items():
        figures = "images_per_second", "train_loss", "test_loss", "accuracy"
        speed, train, test, accuracy = (row[figure] for figure in figures)
        assert speed > 0
        pattern = rf"^{name} +{speed:.0f} +\S+x +{train:.6f} +{test:.6f} +{accuracy:.4f}$"
        assert re.search(pattern, log, re.MULTILINE), log
    assert "losses and accuracy are equal" in log


def test_it_learns_with_model_fit_and_ranks_change_no_bit(launch: Launch, tmp_path: Path) -> None:
    reports = []
    for nproc, words in ((None, []), (2, ["--steps", "4"])):
        report = tmp_path / f"{nproc}.json"
        small = ["--layers", "18", "--width", "8", "--epochs", "1", "--report", str(report)]
        log = launch(EXAMPLES / "resnet_cifar.py", nproc, args=[*small, *words]).logs[0]
        reports.append(json.loads(report.read_text()))
        assert nproc or (log.count("loss is") == 4 and "[Epoch 1 / Test]: Loss = " in log)
    alone, ranks = reports
    assert alone["accuracy"] > 0.7
    assert len(alone["losses"]) == 47
    assert ranks["losses"] == alone["losses"][:4]


LLAMA = (
    "--data.vocabulary 300 --data.length 16 --data.hold_out 4 --model.width 16 --model.blocks 1"
    " --model.heads 2 --model.key_heads 1 --model.perceptron 16 --train.batch_size 4"
    " --train.epochs 2 --train.warm_up 2 --pipeline.captured false"
)


def test_the_llama_learns_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    """What two ranks have saved, one process goes on with: nothing is left but to evaluate."""
    pytest.importorskip("tokenizers", reason="the text extra has it")
    pytest.importorskip("jsonargparse", reason="the project extra has it")
    (tmp_path / "text").mkdir()
    for number, text in enumerate([*topics.values()][:8]):
        (tmp_path / "text" / f"{number}.txt").write_text(text[:400])
    folders = ["--data.text", str(tmp_path / "text"), "--folder", str(tmp_path / "run")]
    script, args = EXAMPLES / "llm" / "train.py", [*LLAMA.split(), *folders, "--prompt", "The"]
    logs = [launch(script, nproc, args=args).logs[0] for nproc in (2, None)]
    found = [re.findall(r"perplexity (\S+) after (\d+) steps$", log, re.MULTILINE) for log in logs]
    assert found[0] == found[1] != []
    assert ["nothing is left to do" in log for log in logs] == [False, True]
    assert float(found[0][0][0]) < 290
    written = [log[log.index(" steps\nThe") :].splitlines()[1] for log in logs]
    assert written[0] == written[1] != "The"


# Data of the user's own, and mistakes


def write_mnist(folder: Path) -> None:
    """Writes digits in the format of MNIST's files, which Paddle's own readers take."""
    folder.mkdir(exist_ok=True)
    digits = load_digits()
    images = np.zeros((200, 28, 28), "uint8")
    images[:, 2:26, 2:26] = digits.images[:200].repeat(3, 1).repeat(3, 2) * 15
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">IIII", 2051, 200, 28, 28) + images.tobytes())
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">II", 2049, 200) + digits.target[:200].astype("uint8").tobytes())


def cifar(path: Path) -> None:
    """Writes the digits in the form of cifar-10-python.tar.gz: five training batches and a test."""
    digits = load_digits()
    images = (digits.images * 15.9).astype("uint8").repeat(4, axis=1).repeat(4, axis=2)
    rows = images.reshape(len(images), 1, -1).repeat(3, axis=1).reshape(len(images), -1)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    with tarfile.open(path, "w:gz") as file:
        for name, part, labels in zip(
            names, np.array_split(rows, 6), np.array_split(digits.target, 6)
        ):
            content = pickle.dumps({b"data": part, b"labels": labels.tolist()})
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


def test_files_of_mnist_and_cifar_10_are_read(launch: Launch, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    words = f"--data {tmp_path} --learning-rate 0.05 --steps 5"
    found, _ = compared(launch, tmp_path, "dygraph_alexnet", None, words)
    assert (found["data"], found["bit_exact"]) == ("MNIST", True)
    cifar(tmp_path / "cifar.tar.gz")
    words = f"--layers 18 --width 4 --steps 2 --data {tmp_path / 'cifar.tar.gz'}"
    found, logs = compared(launch, tmp_path, "static_resnet", None, words)
    assert (found["data"], found["bit_exact"]) == ("CIFAR-10", True)
    assert "CIFAR-10, 1498 images" in logs[0]


@pytest.mark.parametrize(
    ("name", "words", "code", "message"),
    [
        ("dygraph_alexnet", "--data nowhere", 1, "train-images-idx3-ubyte.gz"),
        ("static_resnet", "--data nowhere", 1, "there is none at nowhere"),
        ("static_resnet", "--data text", 1, "there is none at text"),
        ("dygraph_gpt", "--heads 3", 2, "--width (=64) must be divisible by 3"),
        ("dygraph_gpt", "--mp 8", 2, "--heads (=4) must be divisible by 8"),
    ],
)
def test_a_mistake_ends_an_example_with_a_message(
    launch: Launch, tmp_path: Path, name: str, words: str, code: int, message: str
) -> None:
    (tmp_path / "text").write_bytes(b"no archive")
    job = launch(EXAMPLES / f"{name}.py", None, args=words.split(), cwd=tmp_path, check=False)
    assert job.returncode == code
    assert message in job.logs[0]
