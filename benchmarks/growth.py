"""Memory and disk of a long run: 20 iterations in one process, looked at from outside.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--iterations 20] [--keep-last 2]

Memory is the largest resident size of `comlrl run --plain` while each iteration worked; the first two iterations are
its warm-up. Disk is that of the iterations' files, of DVC's cache and of `.comlrl`, per iteration, and once more after
`comlrl prune`, after which `comlrl repro` must have nothing to do. Bar: the last five peaks within 3 % of the first
five after the warm-up.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import psutil
from kill_and_resume import BIN, environment, make_project, start

WARM_UP, COMPARED, BAR = 2, 5, 0.03
POLL_SECONDS = 0.02


def peaks(project: Path) -> list[float]:
    """Run the project; the peak resident memory in MB of every iteration, in order."""
    process = start(project, "plain")
    watched = psutil.Process(process.pid)
    found: list[float] = []
    highest = 0.0
    while process.poll() is None:
        try:
            highest = max(highest, watched.memory_info().rss / 1e6)
        except psutil.Error:
            break
        if (project / "models" / f"iteration_{len(found) + 1:04d}" / "manifest.json").is_file():
            found.append(highest)
            highest = 0.0
        time.sleep(POLL_SECONDS)
    if process.wait() != 0:
        raise RuntimeError((project / "run.log").read_text()[-3000:])
    return found


def megabytes(*folders: Path) -> float:
    """Bytes on disk; a file with several names (DVC may link) counts once."""
    files = {(s.st_dev, s.st_ino): s.st_size for folder in folders for p in folder.rglob("*") for s in [p.stat()]
             if p.is_file()}  # fmt: skip
    return sum(files.values()) / 1e6


def disk(project: Path) -> dict[str, float]:
    """MB of the iterations' files, of DVC's cache and of the run's state."""
    outputs = [project / name for name in ("data", "replay", "models", "state")]
    parts = {"outputs": megabytes(*outputs), "DVC cache": megabytes(project / ".dvc" / "cache")}
    return {**parts, "outputs and cache": megabytes(*outputs, project / ".dvc" / "cache"),
            ".comlrl": megabytes(project / ".comlrl")}  # fmt: skip


def command(project: Path, *words: str) -> str:
    done = subprocess.run([str(BIN / "comlrl"), *words], cwd=project, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--keep-last", type=int, default=2)
    options = parser.parse_args()
    if options.iterations < WARM_UP + 2 * COMPARED:
        parser.error(f"--iterations must be at least {WARM_UP + 2 * COMPARED}")
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        project = make_project(Path(name) / "project", options.iterations)
        found = peaks(project)
        print("peak memory per iteration, MB: " + " ".join(f"{value:.0f}" for value in found), flush=True)
        first, last = found[WARM_UP : WARM_UP + COMPARED], found[-COMPARED:]
        growth = fmean(last) / fmean(first) - 1
        print(f"first {COMPARED} after warm-up {fmean(first):.1f} MB, last {COMPARED} {fmean(last):.1f} MB: "
              f"{growth:+.2%} (bar {BAR:.0%})")  # fmt: skip
        whole = disk(project)
        each = {part: round(value / (options.iterations + 1), 2) for part, value in whole.items()}
        print(f"disk, MB: { ({k: round(v, 1) for k, v in whole.items()}) }; per iteration: {each}")
        print(command(project, "prune", "--keep-last", str(options.keep_last)).strip())
        print(f"disk after it, MB: { ({k: round(v, 1) for k, v in disk(project).items()}) }")
        output = command(project, "repro")
        idle = "Running stage" not in output and "up to date" in output
        print(f"`comlrl repro` after it {'has nothing to do' if idle else 'RUNS SOMETHING'}")
    return int(growth > BAR or not idle)


if __name__ == "__main__":
    sys.exit(main())
