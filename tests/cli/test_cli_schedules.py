from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.schedules import Schedule, build
from tests.fixtures import Capture
from tests.launching import ROOT


def run(words: str) -> int:
    return main(["schedule", *words.split()])


def test_text_draws_and_gives_the_figures(capsys: Capture) -> None:
    assert run("1f1b --ranks 2 --micro-batches 2") == 0
    output = capsys.readouterr()
    assert "rank 0  F0 F1 .  .  B0--- .  B1---" in output.out
    assert "bubble            3 (33.33% of the span)" in output.out
    assert output.err == ""


def test_json_has_exactly_these_keys(capsys: Capture) -> None:
    assert run("GPipe --ranks 4 --micro-batches 8 --format json") == 0
    value = json.loads(capsys.readouterr().out)
    actions = value.pop("actions")
    assert value == {
        "name": "FThenB",
        "ranks": 4,
        "micro_batches": 8,
        "chunks": 1,
        "makespan": 33,
        "span": 33,
        "busy": 24,
        "bubble": 9,
        "bubble_rate": 9 / 33,
        "peak_activations": [8, 8, 8, 8],
    }
    assert actions[3][:2] == ["F3.0", "F3.1"]


def test_actions_are_the_text_of_the_schedule(capsys: Capture) -> None:
    assert run("Eager1F1B --ranks 3 --micro-batches 4 --format actions") == 0
    text = capsys.readouterr().out
    assert Schedule.parse(text) == build("Eager1F1B", ranks=3, micro_batches=4)


def test_costs_come_from_a_file_and_from_options(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"forward": [1, 2], "input_grad": 2, "weight_grad": [1, 1], "bytes": [5, 7]}')
    words = f"1F1B --ranks 2 --micro-batches 1 --format json --costs {file}"
    assert run(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["makespan"] == 1 + 2 + 3 + 3
    assert value["peak_bytes"] == [5, 7]
    assert run(f"{words} --comm 0.5 --forward 1") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 1 + 0.5 + 1 + 3 + 0.5 + 3
    assert run(f"{words} --backward 1.5") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 1 + 2 + 1.5 + 1.5
    assert run(f"{words} --input-grad 1 --weight-grad 3") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 1 + 2 + 4 + 4
    assert run(f"{words} --input-grad-frees 0.5") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1F1B --ranks 0 --micro-batches 2", "ranks=0"),
        ("1F1B --ranks 2", "--micro-batches"),
        ("1F1B --ranks two --micro-batches 2", "invalid int value"),
        ("ZBH2 --ranks 2 --micro-batches 2 --chunks 2", "chunks=2"),
        ("1F1B --ranks 2 --micro-batches 2 --forward -1", "forward=-1"),
        ("1F1B --ranks 2 --micro-batches 2 --forward 1e300", "0..1e+100"),
        ("1F1B --ranks 2 --micro-batches 2 --comm x", "invalid"),
        ("1F1B --ranks 2 --micro-batches 2 --groups 1,1", "no option 'groups'"),
        ("VPP --ranks 2 --micro-batches 2 --groups 1,x", "invalid"),
        ("1F1B --ranks 2 --micro-batches 2 --plot a.gif", ".png, .svg, .pdf"),
        ("1F1B --ranks 2 --micro-batches 2 --backward 2 --input-grad 1", "given together"),
        ("1F1B --ranks 2 --micro-batches 2 --format xml", "invalid choice"),
    ],
)
def test_a_refused_request_exits_with_2(words: str, message: str, capsys: Capture) -> None:
    assert run(words) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_memory_cap_that_is_passed_exits_with_1(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"bytes": [10, 20]}')
    words = f"1F1B --ranks 2 --micro-batches 4 --costs {file} --memory-cap"
    assert run(f"{words} 20") == 0
    capsys.readouterr()
    assert run(f"{words} 19") == 1
    output = capsys.readouterr()
    assert "at most 19 bytes" in output.err
    assert output.out == ""


def test_options_reach_the_schedule_and_its_costs(capsys: Capture) -> None:
    words = "--ranks 4 --micro-batches 10 --format json"
    peaks = []
    for options in ("", "--groups 6,4", "--warmup-slack 1"):
        assert run(f"Interleaved1F1B {words} {options}") == 0
        value = json.loads(capsys.readouterr().out)
        assert value["bubble"] == 9
        peaks.append(value["peak_activations"][0])
    assert peaks == [12, 13, 9]
    assert run(f"DualPipeV {words} --overlapped 2.4") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(57.6)


def test_plot_and_trace_write_files(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "zbv.png", tmp_path / "zbv.json"
    words = "ZBV --ranks 3 --micro-batches 5 --format json"
    assert run(f"{words} --plot {picture} --trace {trace}") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = json.loads(capsys.readouterr().out)
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event["name"] for event in events if event["ph"] == "X"]
    assert slices == [token for row in shown["actions"] for token in row]
    assert run(f"{words} --trace {tmp_path}/missing/zbv.json") == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize("lowered", [False, True])
def test_verify_tells_what_is_valid_from_what_is_not(
    lowered: bool, tmp_path: Path, capsys: Capture
) -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    text = str(schedule.lower() if lowered else schedule)
    file = tmp_path / "file.txt"
    file.write_text(text)
    assert main(["verify", str(file)]) == 0
    assert f"valid {'plan' if lowered else 'schedule'}: 1F1B" in capsys.readouterr().out
    file.write_text(text.replace("B0.1", "B0.1junk"))
    assert main(["verify", str(file)]) == 1
    assert "'B0.1junk'" in capsys.readouterr().err
    file.write_text(text.replace(" B0.1", ""))
    assert main(["verify", str(file)]) == 1
    assert "B0.1 is missing" in capsys.readouterr().err


def test_verify_options_stand_in_for_the_header(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file.txt"
    file.write_text("F0.0 F3.0 B3.0 B0.0\nF1.0 F2.0 B2.0 B1.0\n")
    assert main(["verify", str(file)]) == 1
    assert "no header" in capsys.readouterr().err
    assert main(["verify", str(file), "--micro-batches", "1", "--placement", "vee"]) == 0
    assert main(["verify", str(file), "--micro-batches", "1"]) == 1
    assert "F3.0 is on the wrong rank" in capsys.readouterr().err
    file.write_text(str(build("1F1B", ranks=2, micro_batches=2)))
    assert main(["verify", str(file), "--micro-batches", "3"]) == 1
    assert "F0.2 is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        f"# fleetpipe-schedule 1 name=x ranks={'9' * 100_000} micro_batches=1 chunks=1 "
        "placement=loop\nF0.0 B0.0\n",
        f"F0.{'9' * 100_000} B0.0\n",
    ],
    ids=["header", "token"],
)
def test_a_file_with_endless_numbers_is_refused(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "schedule.txt").write_text(text)
    assert main(["verify", str(tmp_path / "schedule.txt")]) == 2
    told = capsys.readouterr().err
    assert "a number has too many digits" in told
    assert len(told) < 400


def test_a_plan_of_json_has_its_schedule_verified(tmp_path: Path, capsys: Capture) -> None:
    plan = ROOT / "tests" / "data" / "plan.json"
    assert main(["verify", str(plan)]) == 0
    assert capsys.readouterr().out.startswith("valid schedule: Eager1F1B, 2 ranks, 3 micro-batches")
    (tmp_path / "run.json").write_text('{"seconds": 0.12345678901234567890123}')
    assert main(["verify", str(tmp_path / "run.json")]) == 2
    told = capsys.readouterr().err
    assert "this is JSON, and no plan" in told
    assert "digits" not in told


def test_names_of_a_file_do_not_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "schedule.txt"
    header = "name=\x1b[31m ranks=1 micro_batches=1 chunks=1 placement=loop"
    file.write_text(f"# fleetpipe-schedule 1 {header}\nF0.0\n")
    assert main(["verify", str(file)]) == 1
    file.write_text(file.read_text().replace("F0.0", "F0.0 B0.0"))
    assert main(["verify", str(file)]) in (0, 1)
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
