"""The report's pictures: small SVG charts of one kind of number each, drawn from the rows of `plots/*.csv`.

The same numbers give the same bytes.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from comlrl_core.evaluation.statistics import wilson_interval
from tasks.report_drawing import (
    LIGHT,
    LINES,
    MARKERS,
    MOST_MARKED,
    SERIES,
    banded,
    new_axes,
    nothing,
    running_mean,
    stacked,
    style,
    svg_text,
    thinned,
    with_legend,
)
from tasks.timing import Timing

Row = dict[str, float]

MOST_BOXES = 10  # iterations that are drawn as boxes; more become bands
MOST_POINTS = 400  # of a curve; more are averaged in groups
MOST_LINES = 40  # marks of iterations on an axis of environment steps
MOST_NAMED_AGENTS = 8
SMOOTHED_SHARE = 5  # a running mean goes over a fifth of an iteration's updates

# In their order; a run collects pairs or rolls out, never both.
STAGE_COLOURS = {
    "prepare": "blue", "collect": "orange", "score": "green", "pair": "pink", "sample": "amber", "fit": "ink",
    "rollout": "orange", "update": "sky", "publish": "brown", "evaluate": "grey",
}  # fmt: skip
STAGES = tuple(STAGE_COLOURS)
FATES = {
    "pairs": ("became pairs", "blue"),
    "not_selected": ("more than the task's share", "sky"),
    "near_ties": ("near-ties", "amber"),
    "ties": ("ties", "orange"),
    "duplicates": ("same text twice", "grey"),
}


@dataclass(frozen=True)
class Numbers:
    """What the pictures show.

    Attributes:
        evaluation, collection, updates: rows of the three files in `plots/`, as far as they are there.
        confidence: level of the intervals.
    """

    evaluation: list[Row]
    collection: list[Row]
    updates: list[Row]
    timings: list[Timing]
    confidence: float


@dataclass(frozen=True)
class Picture:
    """One chart.

    Attributes:
        name: of its file, without `.svg`.
        svg: a whole SVG file; where there was nothing to draw, one that says so.
        empty: True means there was nothing to draw.
    """

    name: str
    title: str
    svg: str
    empty: bool


def draw(numbers: Numbers) -> list[Picture]:
    """All pictures, each one always there: the pipeline expects the same files from every run."""
    return [_picture(name, title, chart, numbers) for name, (title, chart) in CHARTS.items()]


def interval(mean: float, standard_error: float, confidence: float) -> tuple[float, float]:
    """The normal interval around a mean."""
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * standard_error
    return mean - half, mean + half


def reward(numbers: Numbers) -> Figure | None:
    rows = numbers.evaluation
    if not rows:
        return None
    figure, axes = new_axes("iteration", "mean reward")
    first = rows[0]
    if first["iteration"] == 0:
        low, high = _reward_interval(first, "eval", numbers.confidence)
        axes.axhspan(low, high, color=LIGHT["grey"], alpha=0.18, linewidth=0)
        axes.axhline(first["eval_reward_mean"], color=LIGHT["grey"], linestyle="--", label="initial team")
    compared = [row for row in rows if "eval_comparator_reward_mean" in row]
    for name, some, role, marker in (("eval_comparator", compared, "orange", "s"), ("eval", rows, "blue", "o")):
        if some:
            bounds = [_reward_interval(row, name, numbers.confidence) for row in some]
            label = "team" if name == "eval" else "comparator"
            values = [row[f"{name}_reward_mean"] for row in some]
            banded(axes, _iterations(some), values, bounds, role, marker, label)
    _whole_numbers(axes, rows)
    return with_legend(figure, axes, reverse=True)


def win_rates(numbers: Numbers) -> Figure | None:
    named = (
        ("initial", "initial team", "blue", "o", -0.1),
        ("previous", "team one iteration before", "green", "D", 0.0),
        ("comparator", "comparator", "orange", "s", 0.1),
    )
    figure, axes = new_axes("iteration", "comparisons won")
    drawn = False
    for name, label, role, marker, shift in named:
        rows = [row for row in numbers.evaluation if f"eval_win_rate_{name}" in row]
        if rows:
            values = [row[f"eval_win_rate_{name}"] for row in rows]
            bounds = [(row[f"eval_win_rate_{name}_low"], row[f"eval_win_rate_{name}_high"]) for row in rows]
            places = _iterations(rows) if len(rows) > 1 else [rows[0]["iteration"] + shift]  # points side by side
            banded(axes, places, values, bounds, role, marker, label)
            drawn = True
    if not drawn:
        return None
    axes.axhline(0.5, color=LIGHT["grey"], linewidth=1, linestyle="--")
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _whole_numbers(axes, [row for row in numbers.evaluation if row["iteration"] > 0])
    return with_legend(figure, axes)


def distributions(numbers: Numbers) -> Figure | None:
    sides = (("current", "team", "blue", -0.2), ("comparator", "comparator", "orange", 0.2))
    parts = [(*side, [r for r in numbers.collection if f"collect_{side[0]}_reward_median" in r]) for side in sides]
    parts = [part for part in parts if part[-1]]
    if not parts:
        return None
    figure, axes = new_axes("iteration", "reward of single answers")
    for side, label, role, shift, rows in parts:
        summary = [_quartiles(row, side) for row in rows]
        if len(numbers.collection) <= MOST_BOXES:
            places = [row["iteration"] + (shift if len(parts) > 1 else 0) for row in rows]
            _boxes(axes, summary, places, role)
        else:
            _quartile_band(axes, summary, _iterations(rows), role)
        axes.plot([], [], color=LIGHT[role], linewidth=6, label=label)
    _whole_numbers(axes, numbers.collection)
    return with_legend(figure, axes)


def pairs(numbers: Numbers) -> Figure | None:
    rows = [row for row in numbers.collection if row.get("collect_pairs_possible")]
    if not rows:
        return None
    figure, axes = new_axes("iteration", "comparisons")
    parts = [(label, role, [row.get(f"collect_{name}", 0) for row in rows]) for name, (label, role) in FATES.items()]
    stacked(axes, _iterations(rows), parts)
    _whole_numbers(axes, rows)
    return with_legend(figure, axes, columns=2)


def loss(numbers: Numbers) -> Figure | None:
    return _training(numbers, "loss", [("loss", "loss", "blue")])


def accuracy(numbers: Numbers) -> Figure | None:
    figure = _training(numbers, "pairs in the right order", [("accuracy", "accuracy", "blue")])
    if figure is not None:
        axes = figure.axes[0]
        axes.axhline(0.5, color=LIGHT["grey"], linewidth=1, linestyle="--")
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def margin(numbers: Numbers) -> Figure | None:
    figure = _training(numbers, "margin", [("margin", "margin", "blue")])
    if figure is not None:
        figure.axes[0].axhline(0, color=LIGHT["grey"], linewidth=1, linestyle="--")
    return figure


def log_probs(numbers: Numbers) -> Figure | None:
    return _training(
        numbers, "log-probability", [("winner_logps", "winners", "blue"), ("loser_logps", "losers", "orange")]
    )


def reward_accuracy(numbers: Numbers) -> Figure | None:
    rows = [row for row in numbers.collection if "reward_model_heldout_accuracy" in row]
    if not rows:
        return None
    figure, axes = new_axes("iteration", "held-out pairs in the right order")
    values = [row["reward_model_heldout_accuracy"] for row in rows]
    bounds = [
        wilson_interval(value, int(row.get("reward_model_heldout_pairs", 1)), numbers.confidence)
        for value, row in zip(values, rows, strict=True)
    ]
    banded(axes, _iterations(rows), values, bounds, "blue", "o", "accuracy")
    axes.axhline(0.5, color=LIGHT["grey"], linewidth=1, linestyle="--")
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _whole_numbers(axes, numbers.collection)
    return figure


def rank_correlation(numbers: Numbers) -> Figure | None:
    figure, axes = new_axes("iteration", "rank correlation")
    drawn = False
    moments = (
        ("reward_model_rank_correlation", "before the update", "blue"),
        ("reward_model_after_rank_correlation", "after it", "orange"),
    )
    for place, (name, label, role) in enumerate(moments):
        drawn |= _curve(axes, numbers.collection, name, role, place, label)
    if not drawn:
        return None
    axes.axhline(0, color=LIGHT["grey"], linewidth=1, linestyle="--")
    axes.set_ylim(-1.04, 1.04)
    _whole_numbers(axes, numbers.collection)
    return with_legend(figure, axes)


def divergence(numbers: Numbers) -> Figure | None:
    return _per_agent(numbers.collection, r"kl_agent_(\d+)", "nats per answer")


def value_loss(numbers: Numbers) -> Figure | None:
    return _training(numbers, "squared error", [("value_loss", "critics", "blue")])


def explained_variance(numbers: Numbers) -> Figure | None:
    figure, axes = new_axes("iteration", "explained variance")
    if not _curve(axes, numbers.collection, "critic_explained_variance", "blue", 0, None):
        return None
    axes.axhline(0, color=LIGHT["grey"], linewidth=1, linestyle="--")
    axes.set_ylim(top=1.04)
    _whole_numbers(axes, numbers.collection)
    return figure


def entropy(numbers: Numbers) -> Figure | None:
    return _training(numbers, "nats per token", [("entropy", "all agents", "blue")])


def lengths(numbers: Numbers) -> Figure | None:
    return _per_agent(numbers.evaluation, r"eval_agent_(\d+)_tokens", "tokens per answer")


def finished(numbers: Numbers) -> Figure | None:
    figure = _per_agent(numbers.evaluation, r"eval_agent_(\d+)_finished", "answers that end by themselves")
    if figure is not None:
        figure.axes[0].set_ylim(-0.02, 1.02)
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def seconds(numbers: Numbers) -> Figure | None:
    spent = seconds_per_stage(numbers.timings)
    if not spent:
        return None
    figure, axes = new_axes("iteration", "seconds")
    present = [stage for stage in STAGES if any(stage in of_stage for of_stage in spent.values())]
    parts = [
        (stage, STAGE_COLOURS[stage], [of_stage.get(stage, 0.0) for of_stage in spent.values()]) for stage in present
    ]
    stacked(axes, list(spent), parts)
    _whole_numbers(axes, [{"iteration": iteration} for iteration in spent])
    return with_legend(figure, axes, columns=4)


def seconds_per_stage(timings: Sequence[Timing]) -> dict[int, dict[str, float]]:
    """Iteration -> stage -> seconds, all attempts and chunks added up; what makes the initial team is iteration 0."""
    spent: dict[int, dict[str, float]] = {}
    for timing in timings:
        if timing.stage in STAGES:
            of_stage = spent.setdefault(timing.iteration or 0, {})
            of_stage[timing.stage] = of_stage.get(timing.stage, 0.0) + timing.seconds
    return dict(sorted(spent.items()))


Chart = Callable[[Numbers], Figure | None]
CHARTS: dict[str, tuple[str, Chart]] = {
    "reward": ("Reward on held-out tasks", reward),
    "win_rates": ("How often the team wins", win_rates),
    "distributions": ("Rewards of the collected answers", distributions),
    "pairs": ("What became of the comparisons", pairs),
    "loss": ("Loss", loss),
    "accuracy": ("Pairs that the team orders rightly", accuracy),
    "margin": ("Margin between winner and loser", margin),
    "log_probs": ("How likely winners and losers are", log_probs),
    "reward_accuracy": ("Pairs that the reward model orders rightly", reward_accuracy),
    "rank_correlation": ("Agreement of reward model and task reward", rank_correlation),
    "divergence": ("Distance from the reference", divergence),
    "value_loss": ("Error of the critics", value_loss),
    "explained_variance": ("What the critics foresee", explained_variance),
    "entropy": ("How undecided the agents are", entropy),
    "lengths": ("Length of answers", lengths),
    "finished": ("Finished answers", finished),
    "seconds": ("Seconds per stage", seconds),
}


def _picture(name: str, title: str, chart: Chart, numbers: Numbers) -> Picture:
    with style(name):
        figure = chart(numbers)
        if figure is None:
            return Picture(name, title, svg_text(nothing()), empty=True)
        return Picture(name, title, svg_text(figure), empty=False)


def _iterations(rows: Sequence[Row]) -> list[float]:
    return [row["iteration"] for row in rows]


def _whole_numbers(axes: Axes, rows: Sequence[Row]) -> None:
    """Whole iterations on the axis, with room beside the first and the last."""
    if rows:
        axes.set_xlim(rows[0]["iteration"] - 0.5, rows[-1]["iteration"] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))


def _reward_interval(row: Row, name: str, confidence: float) -> tuple[float, float]:
    return interval(row[f"{name}_reward_mean"], row.get(f"{name}_reward_se", 0.0), confidence)


def _quartiles(row: Row, side: str) -> dict[str, Any]:
    names = {
        "whislo": "min", "q1": "first_quartile", "med": "median", "q3": "third_quartile", "whishi": "max",
        "mean": "mean",
    }  # fmt: skip
    return {**{key: row[f"collect_{side}_reward_{name}"] for key, name in names.items()}, "fliers": []}


def _boxes(axes: Axes, summary: list[dict[str, Any]], places: list[float], role: str) -> None:
    line = {"color": LIGHT[role], "linewidth": 1.2}
    axes.bxp(
        summary,
        positions=places,
        widths=0.3,
        patch_artist=True,
        showmeans=True,
        manage_ticks=False,
        boxprops={"facecolor": LIGHT["paper"], "edgecolor": LIGHT[role], "linewidth": 1.4},
        medianprops={"color": LIGHT[role], "linewidth": 2.4},
        whiskerprops=line,
        capprops=line,
        meanprops={
            "marker": "D", "markersize": 4, "markerfacecolor": LIGHT[role], "markeredgecolor": LIGHT["paper"],
        },
    )  # fmt: skip


def _quartile_band(axes: Axes, summary: list[dict[str, Any]], x: list[float], role: str) -> None:
    columns = {key: [item[key] for item in summary] for key in ("whislo", "q1", "med", "q3", "whishi")}
    axes.fill_between(x, columns["q1"], columns["q3"], color=LIGHT[role], alpha=0.2, linewidth=0)
    axes.plot(x, columns["med"], color=LIGHT[role])
    for edge in ("whislo", "whishi"):
        axes.plot(x, columns[edge], color=LIGHT[role], linewidth=0.9, linestyle=":")


def _training(numbers: Numbers, y_label: str, curves: Sequence[tuple[str, str, str]]) -> Figure | None:
    """Curves over environment steps: every update faintly, and a running mean within each iteration."""
    rows = [row for row in numbers.updates if "environment_steps" in row]
    if not any(name in row for row in rows for name, _, _ in curves):
        return None
    figure, axes = new_axes("environment steps (joint answers learned from)", y_label)
    groups: dict[float, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("iteration", 0.0), []).append(row)
    if len(groups) <= MOST_LINES:
        for group in list(groups.values())[1:]:
            axes.axvline(group[0]["environment_steps"], color=LIGHT["grid"], linewidth=0.8)
    share = max(2, MOST_POINTS // len(groups))
    for number, (name, label, role) in enumerate(curves):
        dashes = LINES[number]
        for index, group in enumerate(groups.values()):
            x = np.array([row["environment_steps"] for row in group])
            y = np.array([row.get(name, math.nan) for row in group])
            axes.plot(*thinned(x, y, share), color=LIGHT[role], alpha=0.35, linewidth=0.9)
            mean = running_mean(y, max(1, len(y) // SMOOTHED_SHARE))
            axes.plot(
                *thinned(x, mean, share),
                color=LIGHT[role],
                linestyle=dashes,
                label=label if not index else None,
                marker="o" if len(rows) == 1 else None,
            )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    return with_legend(figure, axes)


def _per_agent(rows: Sequence[Row], pattern: str, y_label: str) -> Figure | None:
    """A curve for every agent over the iterations; the pattern's group is the agent's number, from 1."""
    names = [
        (int(match.group(1)), name)
        for name in dict.fromkeys(name for row in rows for name in row)
        if (match := re.fullmatch(pattern, name))
    ]
    if not names:
        return None
    figure, axes = new_axes("iteration", y_label)
    for agent, name in names:
        label = f"agent {agent}" if len(names) <= MOST_NAMED_AGENTS else None
        _curve(axes, rows, name, SERIES[(agent - 1) % len(SERIES)], agent - 1, label)
    _whole_numbers(axes, rows)
    return with_legend(figure, axes, columns=4)


def _curve(axes: Axes, rows: Sequence[Row], name: str, role: str, place: int, label: str | None) -> bool:
    """One value per iteration that has it, in the marker and dashes of its place; whether there is any."""
    rows = [row for row in rows if name in row]
    if rows:
        axes.plot(
            _iterations(rows),
            [row[name] for row in rows],
            color=LIGHT[role],
            marker=MARKERS[place % len(MARKERS)] if len(rows) <= MOST_MARKED else None,
            linestyle=LINES[place % len(LINES)],
            label=label,
        )
    return bool(rows)
