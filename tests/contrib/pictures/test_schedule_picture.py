"""Pictures of schedules and profiles."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.pictures import Panel, panel_of
from fleetpipe.contrib.pictures.picture import Picture, draw, plot
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, Placement, Timeline, build
from fleetpipe.schedules.forms.trace import Event

pytestmark = pytest.mark.no_paddle


@pytest.fixture
def svg_of(tmp_path: Path) -> Callable[..., str]:
    """Draws a timeline into a file with the options of ``plot``; returns what is in the file."""
    pytest.importorskip("matplotlib")

    def draw_timeline(timeline: Timeline, **options: Any) -> str:
        plot(timeline, tmp_path / "a.svg", **options)
        return (tmp_path / "a.svg").read_text(encoding="utf-8")

    return draw_timeline


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", svg)


def test_a_picture_names_ranks_kinds_bubble_and_peak(svg_of: Callable[..., str]) -> None:
    text = texts(svg_of(build("ZBV", ranks=4, micro_batches=8).simulate()))
    assert "ZBV: 4 ranks, 8 micro-batches, 2 chunks (vee) · bubble 0.00% · peak 8 forwards" in text
    assert {f"rank {rank}" for rank in range(4)} <= set(text)
    assert {"F  forward", "I  input gradient", "W  weight gradient"} <= set(text)
    assert "B  backward" not in text
    # Every action has its micro-batch.
    assert sum(map(str.isdigit, text)) >= 3 * 2 * 8 * 4


def test_the_same_timeline_gives_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suffixes = ("svg", "png", "pdf")
    for name in (f"{time}.{suffix}" for suffix in suffixes for time in ("first", "second")):
        plot(build("ZBH1", ranks=2, micro_batches=3).simulate(), tmp_path / name)
    for suffix in suffixes:
        first, second = (tmp_path / f"{name}.{suffix}" for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("ranks", "m", "widest"), [(4, 8, 9), (16, 64, 16)])
def test_pictures_stay_within_reason(ranks: int, m: int, widest: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "large.png"
    plot(build("FThenB", ranks=ranks, micro_batches=m).simulate(), file)
    header = file.read_bytes()[:24]
    assert header[:4] == b"\x89PNG"
    assert int.from_bytes(header[16:20], "big") <= widest * 130


def test_boxes_have_the_colour_of_their_kind_and_the_shade_of_their_chunk() -> None:
    bars = panel_of(build("ZBV", ranks=1, micro_batches=1).simulate()).bars
    colours = {(bar.kind, bar.shade): bar.colour for bar in bars}
    assert len(set(colours.values())) == 6
    for kind in "FIW":
        light, dark = colours[kind, 0.6], colours[kind, 0]
        assert all(first > second for first, second in zip(light, dark))


def test_numbers_have_a_contrast_of_four_and_a_half_to_one_on_every_box() -> None:
    schedule = build("Interleaved1F1B", ranks=2, micro_batches=4, chunks=4)
    splits = build("ZBV", ranks=2, micro_batches=4)
    bars = [bar for each in (schedule, splits) for bar in panel_of(each.simulate()).bars]
    assert {bar.kind for bar in bars} == set("FBIW")
    for colour, ink in {(bar.colour, bar.ink) for bar in bars}:
        paper, letters = luminance(colour), {"black": 0.0, "white": 1.0}[ink]
        assert (max(paper, letters) + 0.05) / (min(paper, letters) + 0.05) >= 4.5


def luminance(colour: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_kinds_as_dark_as_another_are_hatched(svg_of: Callable[..., str]) -> None:
    for name, hatches in (("1F1B", 0), ("ZBH1", 2)):
        text = svg_of(build(name, ranks=2, micro_batches=2).simulate())
        # One for the boxes and one for the legend; SVG has a pattern for each edge and line.
        assert text.count("<pattern") == 2 * hatches


def test_a_window_shows_what_runs_in_it(tmp_path: Path) -> None:
    panel = panel_of(build("1F1B", ranks=4, micro_batches=64).simulate()).within(100, 110)
    assert min(bar.left for bar in panel.bars) == panel.begin == 100
    assert max(bar.right for bar in panel.bars) == 110
    busy = sum(bar.right - bar.left for bar in panel.bars if bar.top < 0)
    assert busy == 10  # in the middle of a schedule a rank is never idle
    with pytest.raises(ConfigError, match=r"between 0 and 201"):
        panel_of(build("1F1B", ranks=4, micro_batches=64).simulate()).within(300, 400)
    pytest.importorskip("matplotlib")
    command = ["schedule", "1F1B", "--ranks", "4", "--micro-batches", "64"]
    command += ["--plot-window", "100:110", "--plot", str(tmp_path / "a.svg")]
    assert main(command) == 0
    assert {"100", "110"} <= set(texts((tmp_path / "a.svg").read_text(encoding="utf-8")))


def test_below_the_timeline_stands_what_ranks_hold(svg_of: Callable[..., str]) -> None:
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate(Costs(bytes=2.0**21))
    panel = panel_of(timeline, memory=True)
    # F0 F1 B0 B1 on rank 0, with gaps for the other rank: what an action releases goes at its end.
    mib = 2.0**20
    rises = [(0, 0), (0, 2 * mib), (1, 2 * mib), (1, 4 * mib), (2, 4 * mib)]
    falls = [(4, 4 * mib), (6, 2 * mib), (7, 2 * mib), (9, 0), (9, 0)]
    assert list(panel.held[0]) == rises + falls
    assert max(amount for _, amount in panel.held[1]) == (timeline.peak_bytes or ())[1]
    svg = svg_of(timeline, memory=True, title="two ranks", size=(6, 4), dpi=50)
    assert {"held (MiB)", "two ranks"} <= set(texts(svg))


def test_it_draws_into_axes_of_the_users() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 2)).subplots()
    plot(build("ZBH1", ranks=2, micro_batches=4).simulate(), axes=axes, title="here")
    assert axes.get_title(loc="left") == "here"
    assert axes.get_xlim() == (0, build("ZBH1", ranks=2, micro_batches=4).simulate().makespan)
    assert sum(text.get_text() == "3" for text in axes.texts) == 3 * 2


def test_more_than_two_chunks_stand_below_each_other() -> None:
    bars = panel_of(build("Interleaved1F1B", ranks=1, micro_batches=1, chunks=4).simulate()).bars
    lanes = sorted({(bar.top, bar.bottom, bar.shade) for bar in bars})
    assert len(lanes) == 4
    for (top, bottom, shade), (next_top, next_bottom, next_shade) in itertools.pairwise(lanes):
        assert (top, bottom, shade) < (next_top, next_bottom, next_shade)
        assert next_bottom - bottom > 0.1
    # Within the row.
    assert -0.5 < lanes[0][0] < lanes[-1][1] < 0.5


def test_what_waits_for_an_exchange_is_dotted(svg_of: Callable[..., str]) -> None:
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate(Costs(exchange=0.25))
    forward, backward = (bar for bar in panel_of(timeline).bars[:3:2])
    assert (forward.computed, forward.right) == (0.75, 1)
    assert backward.right - backward.computed == 0.25
    text = svg_of(timeline)
    assert "waits for an exchange" in text
    assert text.count("<pattern") == 1


def test_a_fused_pair_is_two_halves_of_one_box() -> None:
    events = [Event(0, "(F0.1|B0.0)", 1, 3), Event(0, "F0.2", 3, 4)]
    first, second, whole = Panel("", events, Placement("loop", 1)).bars
    assert (first.kind, first.number, second.kind, second.number) == ("F", "1", "B", "0")
    assert (first.left, first.right) == (second.left, second.right) == (1, 3)
    assert first.bottom == second.top
    assert (first.top, second.bottom) == pytest.approx((whole.top, whole.bottom))


def test_measured_beside_predicted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate(Costs(forward=0.1))
    events = [Event(0, "F0.0", 0, 0.1), Event(0, "SF0>1.0", 0.1, 0.2), Event(0, "STEP", 4, 5)]
    measured = Panel("measured", events, timeline.schedule.placement, "s")
    assert [bar.kind for bar in measured.bars] == ["F", "other"]
    file = tmp_path / "both.svg"
    draw([panel_of(timeline, "s"), measured], file)
    text = texts(file.read_text(encoding="utf-8"))
    assert {"measured", "time (s)", "other"} <= set(text)
    assert text.count("rank 1") == 2


@pytest.mark.parametrize(
    ("seconds", "unit"), [(60.0, "s"), (0.5, "s"), (0.02, "ms"), (0.0003, "ms"), (2e-6, "µs")]
)
def test_the_axis_has_the_unit_that_suits_it(seconds: float, unit: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate(
        Costs(forward=seconds, input_grad=seconds, weight_grad=seconds)
    )
    draw([panel_of(timeline, "s", "predicted")], tmp_path / "a.svg")
    text = texts((tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert f"time ({unit})" in text
    assert any(title.startswith("predicted: 1F1B: 2 ranks") for title in text)
    ticks = [float(one) for one in text if re.fullmatch(r"[\d.]+", one)]
    assert 1 <= max(ticks) < 3000


@pytest.mark.parametrize("schedule", ["DualPipeV", "ZBV", "Interleaved1F1B"])
def test_nothing_of_the_legend_is_cut(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    plot(build(schedule, ranks=2, micro_batches=4).simulate(), "a.png")
    (figure,) = kept
    figure.canvas.draw()
    (legend,) = figure.legends
    assert figure.bbox.containsx(legend.get_window_extent().x0)
    assert figure.bbox.containsx(legend.get_window_extent().x1)


def test_numbers_too_small_to_read_are_left_out(svg_of: Callable[..., str]) -> None:
    for micro_batches, numbered in ((8, True), (64, False)):
        svg = svg_of(build("ZBH1", ranks=8, micro_batches=micro_batches).simulate())
        assert (texts(svg).count("7") >= 3 * 8) == numbered
        sizes = re.findall(r"font(?:-size)?: ([\d.]+)px", svg)
        assert min(map(float, sizes)) >= 6


def test_other_forms_of_file_are_refused(tmp_path: Path) -> None:
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate()
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        plot(timeline, tmp_path / "a.gif")
    with pytest.raises(ConfigError, match="one of path and axes"):
        plot(timeline, tmp_path / "a.svg", axes=object())  # type: ignore[arg-type]


def test_without_a_place_the_picture_is_what_a_notebook_shows() -> None:
    pytest.importorskip("matplotlib")
    picture = plot(build("1F1B", ranks=2, micro_batches=2).simulate())
    assert isinstance(picture, Picture)
    assert ">rank 1</text>" in picture._repr_svg_()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "a.png"
    words = ["schedule", "1F1B", "--ranks", "2", "--micro-batches", "2", "--plot", str(file)]
    assert main(words) == 2
    output = capsys.readouterr()
    assert "pip install 'fleetpipe[examples]'" in output.err
    assert output.out == ""
    assert not file.exists()
