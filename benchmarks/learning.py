"""The default run for several seeds, and its control with rewards shuffled among the answers, as a table.

    OMP_NUM_THREADS=1 python benchmarks/learning.py [--seeds 1 2 3 4 5] [--no-control]

Settings are those of `params.yaml`. Prints the evaluation reward before training and after each iteration, and the
seconds of training (start-up, tracking and pipeline included, no Prefect API).
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMLRL = [sys.executable, "-m", "flows.cli"]
SHUFFLED = '''
import random
from comlrl_core.rewards.length_ratio import length_ratio


def shuffled(first, second):
    """The rewards of the answers, dealt out among them at random: nothing can be learned."""
    rewards = length_ratio(first, second)
    random.Random("".join(first + second)).shuffle(rewards)
    return rewards
'''


def run(project: Path, settings: list[str]) -> tuple[float, Path]:
    """Train with `settings` in a folder of its own; the seconds and that folder."""
    before = set(project.glob("runs/*"))
    command = [*COMLRL, "run", "--plain", *(word for setting in settings for word in ("--set", setting))]
    begin = time.monotonic()
    environment = {**os.environ, "COMLRL_PROGRESS": "0"}
    subprocess.run(command, cwd=project, check=True, capture_output=True, env=environment)
    seconds = time.monotonic() - begin
    (folder,) = set(project.glob("runs/*")) - before
    return seconds, folder


def curve(folder: Path) -> list[float]:
    """Evaluation reward per iteration, the initial team first."""
    with (folder / "plots" / "evaluation.csv").open() as file:
        return [float(row["eval_reward_mean"]) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--no-control", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        subprocess.run([*COMLRL, "init", name], check=True, capture_output=True)
        (project / "shuffled.py").write_text(SHUFFLED)
        kinds = {"trained": ["tracking.log_policies=false"]}  # never the project's own settings: all in runs/<key>
        if not options.no_control:
            kinds["control"] = ["tracking.log_policies=false", "reward.function=shuffled.py:shuffled"]
        print("| run | seed | reward on held-out tasks, initially and after each iteration | seconds |")
        print("| --- | --- | --- | --- |", flush=True)
        for kind, settings in kinds.items():
            for seed in options.seeds:
                seconds, folder = run(project, [*settings, f"training.seed={seed}", "evaluation.confidence=0.9"])
                rewards = " ".join(f"{reward:.2f}" for reward in curve(folder))
                print(f"| {kind} | {seed} | {rewards} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
