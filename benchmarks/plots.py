"""Pictures of a benchmark, as PNG. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.tables import tokens

Series = dict[str, list[tuple[float, float]]]
SIZE = (7.0, 4.5)
DPI = 120


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


def _figure():  # type: ignore[no-untyped-def]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(path, figure, axes, y_label) -> None:  # type: ignore[no-untyped-def]
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
