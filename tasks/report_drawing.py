"""How the report's charts look: colours, type, and the few shapes that they are made of.

Every colour is a role (`PALETTE`). A file shows the light colours; in a page the roles become CSS variables (`inline`),
so that one picture serves light and dark screens and paper.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# role: (light, dark). Okabe and Ito's colours, which people with colour-blindness can tell apart, deepened until each
# stands out from its background at 3:1 or more (the grid aside).
PALETTE = {
    "paper": ("#fffffe", "#161b22"),
    "ink": ("#1f2329", "#e6edf3"),
    "grid": ("#d8dee5", "#343b44"),
    "blue": ("#0072b2", "#58b0f0"),
    "orange": ("#d05a00", "#ff9457"),
    "grey": ("#6e7782", "#9aa4af"),
    "green": ("#00805b", "#3fc28f"),
    "pink": ("#b0508a", "#e58fc0"),
    "amber": ("#a87600", "#e0b040"),
    "sky": ("#3d93c6", "#9fd8ff"),
    "brown": ("#7a5230", "#c9a27a"),
}
LIGHT = {role: colours[0] for role, colours in PALETTE.items()}
SERIES = ("blue", "orange", "green", "pink", "amber", "sky", "brown", "grey")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

WIDTH, HEIGHT = 400, 270  # points; narrow, so that type stays readable where a phone shrinks the picture
MOST_MARKED = 40  # points of a curve that get a marker


def inline(svg: str, label: str) -> str:
    """An SVG file as an element of a page: colours by role, no ids but those that it uses itself, `label` for readers.

    `label` must be escaped already.
    """
    svg = svg[svg.index("<svg") :]
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda match: match.group() if match.group(1) in used else "", svg)
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # the page has the style
    for role, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{role})")
    head, _, rest = svg.partition(">")
    head = re.sub(r' (width|height|version|xmlns(:\w+)?)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest.strip()}'


@contextmanager
def style(name: str) -> Iterator[None]:
    """The style of a chart; `name` makes the ids in its file."""
    settings: Any = {
        "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
        "svg.hashsalt": f"comlrl {name}",
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "text.color": LIGHT["ink"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.edgecolor": LIGHT["grid"],
        "axes.facecolor": LIGHT["paper"],
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.formatter.useoffset": False,
        "figure.facecolor": LIGHT["paper"],
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.8,
        "xtick.color": LIGHT["grid"],
        "xtick.labelcolor": LIGHT["ink"],
        "ytick.color": LIGHT["grid"],
        "ytick.labelcolor": LIGHT["ink"],
        "ytick.left": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "legend.frameon": False,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc says
        matplotlib.rcParams.update(settings)
        yield


def new_axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty chart."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def nothing() -> Figure:
    """A chart that says that it is empty."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    figure.text(0.5, 0.5, "nothing to show yet", ha="center", va="center", color=LIGHT["grey"])
    return figure


def svg_text(figure: Figure) -> str:
    """The figure as an SVG file: text stays text in the reader's own font, and the same figure gives the same bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"font-family: [^;\"]+", f"font-family: {FONT}", out.getvalue())
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", rf"font: \1 {FONT}", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def with_legend(figure: Figure, axes: Axes, columns: int = 3, reverse: bool = False) -> Figure:
    """The figure, with a legend above the chart where several things are drawn."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, reverse=reverse, fontsize=10)
    return figure


def banded(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    role: str,
    marker: str,
    label: str,
) -> None:
    """A curve in its band of intervals; one point alone gets a bar."""
    low, high = [bound[0] for bound in bounds], [bound[1] for bound in bounds]
    colour = LIGHT[role]
    if len(x) > 1:
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    else:
        axes.vlines(x, low, high, color=colour, linewidth=1.2)
    axes.plot(x, values, color=colour, marker=marker if len(x) <= MOST_MARKED else None, label=label)


def stacked(axes: Axes, x: Sequence[float], parts: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Bars of parts, (label, role, one value per bar) each, bottom first."""
    below = np.zeros(len(x))
    for label, role, values in parts:
        heights = np.asarray(values, dtype=float)
        if heights.any():
            axes.bar(
                x,
                heights,
                0.72,
                bottom=below,
                color=LIGHT[role],
                edgecolor=LIGHT["paper"],
                linewidth=0.8,
                label=label,
            )
        below += heights


def running_mean(y: np.ndarray, reach: int) -> np.ndarray:
    """Means over up to `reach` updates before and after each; missing ones are left out."""
    windows = [y[max(0, i - reach) : i + reach + 1] for i in range(len(y))]
    return np.array([math.nan if np.isnan(window).all() else np.nanmean(window) for window in windows])


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: means of neighbours."""
    if len(x) <= most:
        return x, y
    groups = np.array_split(np.arange(len(x)), most)
    kept = [group for group in groups if not np.isnan(y[group]).all()]
    return np.array([x[group].mean() for group in kept]), np.array([np.nanmean(y[group]) for group in kept])
