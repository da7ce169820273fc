"""The report's page: what the numbers mean in words, laid out by `templates/report.html`.

Prompts and answers come from people and models, and nothing in them may act in the page: every text passes `visible`,
and the template escapes everything.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from comlrl_core.config.fields import ComparatorFields
from comlrl_core.config.run import RunConfig
from comlrl_core.preference.records import COMPARATOR, CURRENT, PairRecord
from tasks.evaluate import fall
from tasks.report_drawing import PALETTE, inline
from tasks.report_pictures import FATES, MOST_BOXES, STAGES, Numbers, Picture, Row, interval, seconds_per_stage

HELD_OUT = ("reward", "win_rates", "lengths", "finished")
SHOWN_CHARACTERS = 1500  # of one text
SHOWN_VALUE = 300  # characters of one setting
SOURCES = {CURRENT: "the team", COMPARATOR: "the comparator", None: "the team"}
COMPARATORS = {
    "current": "the team as it was before the iteration's update, answering once more",
    "current_copy": "a copy of the team from before the iteration's update, answering once more",
    "history": "an earlier state of the team",
    "model": "a fixed other team",
}
# Invisible, or able to change how the text around them is read: everything that Unicode calls control, format,
# surrogate or line separator, but for tab and line feed.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\ufffe\uffff]"
)


@dataclass(frozen=True)
class Facts:
    """All that a page is made of."""

    config: RunConfig
    key: str
    numbers: Numbers
    pictures: list[Picture]
    samples: list[tuple[int, PairRecord]]
    versions: dict[str, str]


def render(facts: Facts) -> str:
    """The page as HTML text."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["visible"] = visible
    template = environment.from_string((resources.files("tasks") / "templates/report.html").read_text(encoding="utf-8"))
    return template.render(_view(facts))


def visible(value: Any) -> Markup:
    """A text, escaped, in which every character can be seen and none changes another: controls become their codes."""
    return Markup(_HIDDEN.sub(_code, str(escape(str(value)))))


def _code(match: re.Match[str]) -> str:
    code = ord(match.group())
    text = rf"\x{code:02x}" if code <= 0xFF else rf"\u{code:04x}"
    return f'<i class="code">{text}</i>'


def _view(facts: Facts) -> dict[str, Any]:
    numbers, config = facts.numbers, facts.config
    evaluation = numbers.evaluation
    return {
        "colours": PALETTE,
        "algorithm": config.algorithm,
        "from_pairs": not config.learns_from_rewards(),
        "direct": not config.learns_from_rewards() and not config.fits_reward_model(),
        "key": facts.key,
        "agents": config.training.num_agents,
        "verdict": _verdict(facts),
        "warning": fall([_evaluated(row) for row in evaluation]),
        "cards": _cards(facts),
        "comparator": _comparator(config),
        "confidence": f"{numbers.confidence:.0%}",
        "figure": _figures(facts),
        "evaluation": [_evaluation_cells(row, numbers.confidence) for row in evaluation],
        "counts": [_count_cells(row) for row in numbers.collection],
        "samples": [_sample(iteration, record) for iteration, record in facts.samples],
        "seconds": _seconds_table(numbers),
        "settings": _settings(config.values()),
        "versions": facts.versions,
    }


def _verdict(facts: Facts) -> str:
    rows = facts.numbers.evaluation
    if not rows:
        if facts.config.tasks.eval is None:
            return "There are no held-out tasks, so this page shows how training went, not what it achieved."
        return "The team has not been measured on held-out tasks yet."
    first, last = rows[0], rows[-1]
    began, ended = first["eval_reward_mean"], last["eval_reward_mean"]
    if len(rows) == 1 or last["iteration"] == 0:
        return f"The team earns a mean reward of {ended:.3f} on held-out tasks."
    count = int(last["iteration"])
    iterations = "1 iteration" if count == 1 else f"{count} iterations"
    text = f"After {iterations} the team earns {ended:.3f} on held-out tasks; it began at {began:.3f}."
    low, high = (last.get(f"eval_win_rate_initial_{end}", 0.5) for end in ("low", "high"))
    if low > 0.5:
        return f"{text} It is better than the initial team, beyond what chance explains."
    if high < 0.5:
        return f"{text} It is worse than the initial team, beyond what chance explains."
    return f"{text} Its wins over the initial team are no more than chance may explain."


def _evaluated(row: Row) -> Row:
    """A row of `plots/evaluation.csv` under the metrics' own names, as far as `fall` reads them."""
    return {
        "iteration": row["iteration"],
        "eval/reward_mean": row["eval_reward_mean"],
        "eval/reward_se": row["eval_reward_se"],
    }


def _cards(facts: Facts) -> list[dict[str, str]]:
    numbers = facts.numbers
    cards = []
    rows = numbers.evaluation
    if rows:
        best = max(rows, key=lambda row: row["eval_reward_mean"])
        named = [("Initial team", rows[0]), ("Best team", best), ("Last team", rows[-1])]
        for name, row in named:
            value, note = _reward(row, numbers.confidence)
            cards.append({"name": name, "value": value, "note": f"{note}, iteration {row['iteration']:.0f}"})
        opponents = {"initial": "initial team", "previous": "team before", "comparator": "comparator"}
        for name, words in opponents.items():
            cells = _win_rate(rows[-1], name)
            if cells:
                cards.append({"name": f"Last team beats the {words}", "value": cells[0], "note": cells[1]})
    if numbers.collection and not facts.config.learns_from_rewards():
        total = sum(row.get("collect_pairs", 0) for row in numbers.collection)
        cards.append({"name": "Preference pairs", "value": f"{total:,.0f}", "note": "made in all iterations"})
    if numbers.updates:
        skipped = sum(row.get("skipped", 0) for row in numbers.updates)
        note = f"in {len(numbers.updates):,} updates" + (f", {skipped:.0f} of them skipped" if skipped else "")
        steps = numbers.updates[-1].get("environment_steps", 0)
        cards.append({"name": "Answers learned from", "value": f"{steps:,.0f}", "note": note})
    return cards


def _reward(row: Row, confidence: float) -> tuple[str, str]:
    low, high = interval(row["eval_reward_mean"], row["eval_reward_se"], confidence)
    return f"{row['eval_reward_mean']:.3f}", f"{low:.3f} to {high:.3f}"


def _win_rate(row: Row, name: str) -> tuple[str, str] | None:
    if f"eval_win_rate_{name}" not in row:
        return None
    rate, low, high = (row[f"eval_win_rate_{name}{end}"] for end in ("", "_low", "_high"))
    return _percent(rate), f"{low:.0%} to {high:.0%}"


def _percent(share: float) -> str:
    """Whole percents; all and nothing are said only where they are exact."""
    text = f"{share:.0%}"
    if text == "100%" and share < 1.0:
        return "over 99%"
    return "under 1%" if text == "0%" and share > 0.0 else text


def _comparator(config: RunConfig) -> str | None:
    training = config.training
    return COMPARATORS[training.comparator_policy] if isinstance(training, ComparatorFields) else None


def _figures(facts: Facts) -> dict[str, dict[str, Any]]:
    """Per picture its title, its SVG (None: nothing to draw), what to see in it, and what is said where it lacks."""
    captions = _captions(facts)
    return {
        picture.name: {
            "title": picture.title,
            "svg": None
            if picture.empty
            else Markup(inline(picture.svg, str(escape(f"{picture.title}. {captions[picture.name]}")))),
            "caption": captions[picture.name],
            "missing": "There are no held-out tasks."
            if facts.config.tasks.eval is None and picture.name in HELD_OUT
            else "Nothing to show yet.",
        }
        for picture in facts.pictures
    }


def _captions(facts: Facts) -> dict[str, str]:
    level = f"{facts.numbers.confidence:.0%}"
    boxes = "Box: the middle half of the answers; thick line: median; diamond: mean; whiskers: lowest and highest."
    if len(facts.numbers.collection) > MOST_BOXES:
        boxes = "Line: median; band: the middle half of the answers; dotted: lowest and highest."
    smoothed = "Faint: every update; strong: running mean within an iteration; upright lines: a new iteration begins."
    compared = any("eval_comparator_reward_mean" in row for row in facts.numbers.evaluation)
    return {
        "reward": f"Mean reward of answers to tasks that are never trained on, with {level} intervals. "
        "The dashed line is the team before any training"
        + (f"; the comparator is {_comparator(facts.config)}." if compared and _comparator(facts.config) else "."),
        "win_rates": "Share of held-out comparisons in which the team's answer earns more; a tie counts one half. "
        f"Above the dashed line it wins more often than it loses. Bands: {level} intervals over tasks.",
        "distributions": f"Answers to the training tasks, before each iteration's update. {boxes}",
        "pairs": "Answers are compared two by two. A comparison becomes a pair unless both earn (nearly) the same, "
        "read the same, or the task has enough pairs already.",
        "loss": f"What the updates make smaller. {smoothed}",
        "accuracy": "Share of pairs whose winner is more likely than its loser, just before an update. Dashed: chance. "
        f"{smoothed}",
        "margin": "How much more likely (in log-probability) winners are than losers; the team learns to widen it. "
        f"{smoothed}",
        "log_probs": "Log-probability of whole joint answers, summed over agents. Both may fall while the winners "
        f"gain on the losers. {smoothed}",
        "reward_accuracy": "Share of pairs of tasks that are kept from the reward model in which it scores the winner "
        f"higher, fitted anew in each iteration. Dashed: chance. Band: {level} intervals over pairs.",
        "rank_correlation": "Spearman's correlation of the reward model's scores with the task reward, on fresh "
        "answers of the team: 1 is the same order, 0 none. A fall after the update means that the team learned what "
        "the model likes and the task does not.",
        "divergence": "Mean divergence (KL, sampled) of each agent's answers from the team before any training, while "
        "they were collected.",
        "value_loss": f"Mean squared difference between what a critic says and its target. {smoothed}",
        "explained_variance": "Share of the targets' variance that the critics' values account for, when the answers "
        "were collected: 1 is a perfect critic; at 0 it tells histories apart no better than a constant.",
        "entropy": "Minus the mean log-probability of the sampled tokens that an update trains on. Near 0 an agent "
        f"always says the same. {smoothed}",
        "lengths": "Mean length of each agent's answers to held-out tasks, the end-of-text token included.",
        "finished": "Share of each agent's held-out answers that were not cut off at the longest length.",
        "seconds": "Time that each stage took, attempts added up; iteration 0 makes and measures the initial team.",
    }


def _evaluation_cells(row: Row, confidence: float) -> dict[str, str]:
    value, between = _reward(row, confidence)
    cells = {"iteration": f"{row['iteration']:.0f}", "reward": f"{value} ({between})"}
    other = row.get("eval_comparator_reward_mean")
    cells["comparator"] = "" if other is None else f"{other:.3f}"
    for name in ("initial", "previous", "comparator"):
        rate = _win_rate(row, name)
        cells[f"win_{name}"] = "" if rate is None else f"{rate[0]} ({rate[1]})"
    return cells


def _count_cells(row: Row) -> dict[str, str]:
    names = ("tasks", "candidates", "dropped", "unmatched", "pairs_possible", *FATES)
    cells = {name: f"{row[key]:,.0f}" if (key := f"collect_{name}") in row else "" for name in names}
    return {"iteration": f"{row['iteration']:.0f}", **cells}


def _seconds_table(numbers: Numbers) -> dict[str, Any] | None:
    spent = seconds_per_stage(numbers.timings)
    if not spent:
        return None
    stages = [stage for stage in STAGES if any(stage in of_stage for of_stage in spent.values())]
    rows = [
        [f"{n}", *(_seconds(s.get(stage)) for stage in stages), _seconds(sum(s.values()))] for n, s in spent.items()
    ]
    sums = [sum(s.get(stage, 0.0) for s in spent.values()) for stage in stages]
    total = sum(sums)
    shares = [
        (stage, _seconds(value), _percent(value / total) if total else "")
        for stage, value in zip(stages, sums, strict=True)
    ]
    return {"stages": stages, "rows": rows, "shares": shares, "total": _duration(total)}


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _sample(iteration: int, record: PairRecord) -> dict[str, Any]:
    loser_source = {CURRENT: COMPARATOR, COMPARATOR: CURRENT, None: None}[record.winner_source]
    sides = (
        ("Winner", record.winner_completions, record.winner_reward, record.winner_source, record.winner_finished),
        ("Loser", record.loser_completions, record.loser_reward, loser_source, record.loser_finished),
    )
    return {
        "iteration": iteration,
        "task": record.task_id or "",
        "prompts": _prompts(record.prompts),
        "sides": [
            {
                "name": name,
                "reward": f"{value:.3f}",
                "source": SOURCES[source],
                "answers": [
                    {"agent": agent, **_cut(text), "finished": finished is None or finished[agent - 1]}
                    for agent, text in enumerate(texts, start=1)
                ],
            }
            for name, texts, value, source, finished in sides
        ],
    }


def _prompts(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """One prompt for all agents where they were asked the same."""
    if len(set(prompts)) == 1:
        return [{"agent": None, **_cut(prompts[0])}]
    return [{"agent": agent, **_cut(prompt)} for agent, prompt in enumerate(prompts, start=1)]


def _cut(text: str) -> dict[str, Any]:
    return {"text": text[:SHOWN_CHARACTERS], "left_out": max(0, len(text) - SHOWN_CHARACTERS)}


def _settings(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            rows += _settings(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((f"{prefix}{name}", text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 1]}…"))
    return rows
