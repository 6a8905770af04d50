"""Pictures of a benchmark, as PNG. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import tokens

Series = dict[str, list[tuple[float, float]]]
SIZE = (7.0, 4.5)
DPI = 120
PANEL_WIDTH = 6.0
PANELS_A_ROW = 2
# Of the range of x, how far apart points stand at least.
APART = 1 / 48
MARKERS = "os^Dv<>PXphHd8*"
MAPS = ("Greys", "Blues", "Oranges", "Greens", "Purples")


@dataclass(frozen=True)
class Spot:
    """A point with the interval of its y. Series of one family share a hue."""

    series: str
    family: str
    x: float
    y: float
    low: float
    high: float


def lines(
    path: Path,
    x_label: str,
    y_label: str,
    series: Series,
    is_log: bool = True,
    tick: Callable[[float], str] = lambda place: tokens(int(place)),
    beside: Series | None = None,
) -> None:
    """One line a series, points sorted by x; x in powers of two where `is_log`. Writes nothing without points.

    tick: the words at a place of a logarithmic x. beside: for a series, another one, dashed in its colour.
    """
    if not any(series.values()):
        return
    figure, axes = _figure()
    for name, points in series.items():
        (drawn,) = axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        if beside and name in beside:
            axes.plot(*zip(*sorted(beside[name]), strict=True), "--", color=drawn.get_color())
    if is_log:
        places = sorted({x for points in series.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [tick(place) for place in places])
    axes.set_xlabel(x_label)
    axes.set_ylim(bottom=0)
    _finish(path, figure, axes, y_label)


def bars(
    path: Path,
    y_label: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    is_log: bool = False,
) -> None:
    """A group of bars for each name, one bar a series; None leaves its place empty."""
    if not names:
        return
    figure, axes = _figure()
    width = 0.8 / max(1, len(series))
    for index, (label, values) in enumerate(series.items()):
        places = [place + index * width for place in range(len(names))]
        axes.bar(places, [value or 0.0 for value in values], width, label=label)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=45, ha="right")
    if is_log:
        axes.set_yscale("log")
    _finish(path, figure, axes, y_label)


def timeline(
    path: Path,
    x_label: str,
    y_label: str,
    spans: Sequence[tuple[int, float, float]],
    events: Mapping[str, float],
) -> None:
    """A bar from begin to end in each row, of (row, begin, end), and a line at each event."""
    figure, axes = _figure()
    rows, begins, ends = zip(*spans, strict=True)
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    axes.barh(rows, lengths, left=begins, height=0.7, label="asked for to ready")
    for number, (name, place) in enumerate(events.items(), start=1):
        axes.axvline(place, color=f"C{number}", label=name)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    _finish(path, figure, axes, y_label)


def over_time(
    path: Path, x_label: str, panels: Mapping[str, Series], events: Sequence[tuple[float, str]]
) -> None:
    """Panels below one another, by their y labels, logarithmic; a line at each event, a colour for each of its
    names."""
    figure = _blank(1.6 * SIZE[0], SIZE[1] * len(panels))
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(name for _, name in events))}
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
    for axes, (y_label, series) in zip(grid, panels.items(), strict=True):
        for number, (name, points) in enumerate(series.items()):
            if points:
                axes.plot(*zip(*points, strict=True), color=str(0.17 * number), linewidth=1.0, label=name)
        for at, name in events:
            axes.axvline(at, color=colors[name], linewidth=1.0, alpha=0.7)
        axes.set_yscale("log")
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper right")
    axes.set_xlabel(x_label)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper center", ncols=6, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def panels(path: Path, x_label: str, y_label: str, spots: Mapping[str, Sequence[Spot]]) -> None:
    """Shares in [0, 1] over a logarithmic x: a panel for each title, one legend. Writes nothing without points.

    Where points would hide each other they are drawn side by side, as near to their x as that allows; short lines at
    the bottom stand at every x itself.
    """
    drawn = [spot for of_panel in spots.values() for spot in of_panel]
    if not drawn:
        return
    num_columns = min(len(spots), PANELS_A_ROW)
    num_rows = -(-len(spots) // num_columns)
    figure = _blank(PANEL_WIDTH * num_columns + 2.0, SIZE[1] * num_rows)
    grid = list(figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat)
    styles, handles = _styles(drawn), {}
    logs = [math.log2(spot.x) for spot in drawn]
    apart = (max(logs) - min(logs) + 1) * APART
    for axes, (title, of_panel) in zip(grid, spots.items(), strict=False):
        ordered = sorted(of_panel, key=lambda spot: (spot.x, spot.series))
        for place, spot in zip(spread([math.log2(s.x) for s in ordered], apart), ordered, strict=True):
            handles[spot.series] = _draw(axes, 2**place, spot, *styles[spot.series])
        for x in {spot.x for spot in of_panel}:
            axes.axvline(x, ymax=0.03, color="black", linewidth=0.8)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_ylim(-0.05, 1.05)
    for axes in grid[len(spots) :]:
        axes.set_visible(False)
    figure.supxlabel(x_label)
    figure.supylabel(y_label)
    _legend(figure, drawn, handles)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes, x, spot, marker, color):  # type: ignore[no-untyped-def]
    return axes.errorbar(
        x,
        spot.y,
        # A bound that equals the value may lie beyond it by rounding.
        [[max(0.0, spot.y - spot.low)], [max(0.0, spot.high - spot.y)]],
        fmt=marker,
        color=color,
        markeredgecolor="black",
        markeredgewidth=0.4,
        elinewidth=0.8,
        markersize=7,
    )


def _legend(figure, spots, handles) -> None:  # type: ignore[no-untyped-def]
    """The series under their families' names."""
    from matplotlib.lines import Line2D

    heading = Line2D([], [], linestyle="none")
    entries = []
    for family in sorted({spot.family for spot in spots}):
        entries.append((heading, family))
        names = dict.fromkeys(spot.series for spot in spots if spot.family == family)
        entries += [(handles[name], name) for name in names]
    figure.legend(*zip(*entries, strict=True), loc="outside right upper", fontsize="small")


def spread(places: Sequence[float], apart: float) -> list[float]:
    """Ascending places moved as little as it takes for `apart` between any two (least squares)."""
    # what is too near forms runs: (sum of where the first would stand, length)
    runs: list[tuple[float, int]] = []
    for index, place in enumerate(places):
        total, length = place - index * apart, 1
        while runs and runs[-1][0] / runs[-1][1] > total / length:
            before, num_before = runs.pop()
            total, length = total + before, length + num_before
        runs.append((total, length))
    firsts = [total / length for total, length in runs for _ in range(length)]
    return [first + index * apart for index, first in enumerate(firsts)]


def _styles(spots: Sequence[Spot]) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Marker and colour of each series: a hue for a family, shades of it, and another marker for each."""
    from matplotlib import colormaps

    styles: dict[str, tuple[str, tuple[float, ...]]] = {}
    for number, family in enumerate(sorted({spot.family for spot in spots})):
        shades = colormaps[MAPS[number % len(MAPS)]]
        names = list(dict.fromkeys(spot.series for spot in spots if spot.family == family))
        for index, name in enumerate(names):
            shade = 0.95 if len(names) == 1 else 0.35 + 0.6 * index / (len(names) - 1)
            styles[name] = MARKERS[index % len(MARKERS)], shades(shade)
    return styles


def _figure():  # type: ignore[no-untyped-def]
    figure = _blank(*SIZE)
    return figure, figure.add_subplot()


def _blank(width: float, height: float):  # type: ignore[no-untyped-def]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(path, figure, axes, y_label) -> None:  # type: ignore[no-untyped-def]
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
