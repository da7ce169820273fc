"""What Prefect, DVC and MLflow cost on top of the Python trainer: the same settings both ways, each in a cold process.

    OMP_NUM_THREADS=1 python benchmarks/orchestration.py [--repeats 1] [--iterations 2 6]

Ours is `comlrl run` with its embedded API in a project without results, bare is `MADPOIterTrainer` in a Python process
that also writes pairs and policies. Both include Python's start and all imports, which are also given apart. The
evaluation of each iteration is no orchestration; `comlrl run` does it and the trainer does not, so its noted seconds
are subtracted, and so are the report's. The difference of the longer and the shorter run gives the cost of an
iteration. Bars: 45 s a run, 5 s an iteration.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_and_resume import BIN, environment, make_project

COLD_RUN_BAR, ITERATION_BAR = 45.0, 5.0
NOT_IN_TRAINER = ("evaluate", "summarize", "report")
TRAINER = """
import sys
from pathlib import Path
from comlrl_core.config.files import read_params
from comlrl_core.config.run import RunConfig
from comlrl_core.environments.length_ratio import make_tasks
from comlrl_core.team.formatters import text_formatters
from comlrl_core.trainers.preference import MADPOIterTrainer
project, out = Path(sys.argv[1]), Path(sys.argv[2])
config = read_params(project / "params.yaml").run_config()
folders = {"preference_replay_dir": str(out / "replay"), "policy_checkpoint_dir": str(out / "models")}
MADPOIterTrainer(
    agent_model=config.team.agent_model,
    formatters=text_formatters(2, config.team.templates, None),
    reward_func=config.reward.function,
    args=config.training.model_copy(update=folders),
    train_dataset=make_tasks(config.tasks.num_train, config.tasks.num_eval, config.tasks.seed)[0],
).train()
"""
IMPORTS = {
    "bare": "import comlrl_core.trainers.preference",
    "ours": "import comlrl_core.trainers.preference, flows.training, mlflow, dvc.repo",
}


def seconds(command: list[str], folder: Path) -> float:
    """How long a command takes; raises with its output where it fails."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    taken = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return taken


def noted(project: Path) -> float:
    """The noted seconds of stages that the trainer does not have."""
    lines = (project / ".comlrl" / "timings.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return float(sum(entry["seconds"] for entry in entries if entry["stage"] in NOT_IN_TRAINER))


def measure(template: Path, work: Path, iterations: int) -> dict[str, float]:
    """One cold run of each kind."""
    project = work / f"ours-{iterations}-{time.monotonic_ns()}"
    shutil.copytree(template, project)
    subprocess.run(
        [str(BIN / "comlrl"), "iterations", str(iterations)],
        cwd=project, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    bare = seconds([sys.executable, "-c", TRAINER, str(project), str(project.with_suffix(".bare"))], work)
    whole = seconds([str(BIN / "comlrl"), "run"], project)
    return {"bare": bare, "whole": whole, "evaluation and report": noted(project), "ours": whole - noted(project)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--iterations", type=int, nargs=2, default=(2, 6))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orchestration-") as name:
        work = Path(name)
        template = make_project(work / "template")
        imports = {kind: seconds([sys.executable, "-c", code], work) for kind, code in IMPORTS.items()}
        print("imports:  " + ", ".join(f"{kind} {value:.1f} s" for kind, value in imports.items()), flush=True)
        added: dict[int, float] = {}
        for iterations in options.iterations:
            runs = [measure(template, work, iterations) for _ in range(options.repeats)]
            best = {kind: min(run[kind] for run in runs) for kind in runs[0]}
            added[iterations] = min(run["ours"] - run["bare"] for run in runs)
            figures = ", ".join(f"{kind} {value:.1f} s" for kind, value in best.items())
            print(f"{iterations} iterations: {figures}; on top {added[iterations]:.1f} s", flush=True)
    short, long = options.iterations
    per_iteration = (added[long] - added[short]) / (long - short)
    cold = max(added.values())
    print(f"on top of a cold run: {cold:.1f} s (bar {COLD_RUN_BAR:g} s); an iteration: {per_iteration:.2f} s "
          f"(bar {ITERATION_BAR:g} s)")  # fmt: skip
    return int(cold > COLD_RUN_BAR or per_iteration > ITERATION_BAR)


if __name__ == "__main__":
    sys.exit(main())
