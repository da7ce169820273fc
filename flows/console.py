"""What a run says to the person at the keyboard when it ends."""

import os
import sys
from typing import Any

from flows.jobs import Plan
from tasks.evaluate import read_curve

BAR_WIDTH = 32


def report(planned: Plan, summary: dict[str, Any]) -> None:
    """The evaluation curve, where the results are, and three things to do next."""
    job = planned.job
    for row in read_curve(job.plots / "evaluation.csv"):
        print(curve_line(row))
    evaluation = summary.get("evaluation")
    if evaluation:
        print(f"best: iteration {evaluation['best_iteration']} with reward {evaluation['best_reward']:.3f}")
    policies = os.path.relpath(job.store.policy(job.config.num_iterations))
    print(f"policies in {policies}, numbers in {os.path.relpath(job.metrics)}")
    print("next:")
    comlrl = command()
    more = job.config.num_iterations + 2
    if job.work_root == planned.project.work_root:
        steps = [(f"{comlrl} iterations {more} && {comlrl} repro", "two more iterations; nothing else runs again")]
    else:
        steps = [(f"{comlrl} run --set num_iterations={more} ...", "the same settings, two more iterations")]
    steps += [
        (f"{comlrl} run --set training.agent_learning_rate=1e-3", "another setting, in a folder of its own"),
        (f"{comlrl} serve", "start runs in the Prefect UI, compare them in the MLflow UI"),
    ]
    width = max(len(step) for step, _ in steps)
    for step, purpose in steps:
        print(f"  {step:{width}}   # {purpose}")


def curve_line(row: dict[str, float]) -> str:
    """One evaluation as a line with a bar."""
    reward = row["eval_reward_mean"]
    bar = "#" * round(BAR_WIDTH * max(0.0, min(1.0, reward)))
    win = row.get("eval_win_rate_initial")
    beside = "" if win is None else f"  better than the initial team in {win:.0%}"
    figures = f"reward {reward:.3f} ± {row['eval_reward_se']:.3f}"
    return f"iteration {row['iteration']:3.0f}  {figures}  {bar:{BAR_WIDTH}}{beside}"


def command() -> str:
    """How to call this program from here."""
    active = os.environ.get("VIRTUAL_ENV")
    if active and os.path.realpath(active) == os.path.realpath(sys.prefix):
        return "comlrl"
    relative = os.path.relpath(sys.prefix)
    return os.path.join(sys.prefix if relative.startswith("..") else relative, "bin", "comlrl")
