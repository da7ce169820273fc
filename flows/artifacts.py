"""What a person sees in the Prefect UI beside states and logs."""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from comlrl_core.preference.records import PairRecord

SHOWN_PAIRS = 8
SHOWN_CHARACTERS = 160


def publish_pairs_table(iteration: int, records: Sequence[PairRecord]) -> None:
    """A table of some of an iteration's pairs, as an artifact of its flow run."""
    rows = [
        {
            "task": record.task_id or "",
            "prompt": shortened(record.prompts[0]),
            "winner": shortened(" | ".join(record.winner_completions)),
            "loser": shortened(" | ".join(record.loser_completions)),
            "rewards": f"{record.winner_reward:.3f} > {record.loser_reward:.3f}",
        }
        for record in records[:SHOWN_PAIRS]
    ]
    create_table_artifact(
        rows or [{"task": "no pairs in this iteration"}],
        key=f"pairs-{iteration:04d}",
        description=f"Sample pairs of iteration {iteration}",
    )


def publish_progress(done: int, total: int, artifact: UUID | None) -> UUID:
    """A bar of how many iterations are done, as an artifact of the run: a new one, or `artifact` moved on."""
    percent = 100.0 * done / total
    text = f"{done} of {total} iterations"
    if artifact is None:
        return cast(UUID, create_progress_artifact(percent, key="iterations", description=text))
    return cast(UUID, update_progress_artifact(artifact, percent, description=text))


def publish_summary(text: str) -> None:
    """The run's summary as a Markdown artifact."""
    create_markdown_artifact(text, key="summary", description="How the run went")


def shortened(text: str) -> str:
    """At most `SHOWN_CHARACTERS` of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARACTERS else flat[: SHOWN_CHARACTERS - 1] + "…"


def summary_markdown(rows: Sequence[Mapping[str, Any]], links: Mapping[str, str]) -> str:
    """A Markdown table of the evaluation curve (rows of `plots/evaluation.csv`), and links."""
    lines = ["| iteration | evaluation reward | win rate against the initial team |", "| --- | --- | --- |"]
    for row in rows:
        win = row.get("eval_win_rate_initial")
        lines.append(
            f"| {row['iteration']:.0f} | {row['eval_reward_mean']:.3f} ± {row['eval_reward_se']:.3f} | "
            f"{'' if win is None else f'{win:.2f}'} |"
        )
    lines += ["", *(f"- [{name}]({url})" for name, url in links.items())]
    return "\n".join(lines)
