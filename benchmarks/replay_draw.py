"""Time and memory of a draw of 256 from a million stored pairs, once their offsets are there.

python benchmarks/replay_draw.py [--pairs 1000000] [--files 20]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from comlrl_core.preference.files import write_iteration
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.replay import ReplaySettings, sample_replay

DRAWS = 256


def write_files(folder: Path, pairs: int, files: int) -> None:
    """`pairs` pairs of two agents, 16 tokens an answer, in `files` iteration files."""
    ids = tuple(range(16))
    for iteration in range(1, files + 1):
        records = [
            PairRecord(
                prompts=("write something short", "write something longer"),
                winner_completions=(f"answer {n}", "the longer answer"),
                loser_completions=(f"other {n}", "another"),
                winner_reward=1.0,
                loser_reward=0.5,
                candidate_reward_mean=0.75,
                task_id=f"{iteration}-{n}",
                winner_token_ids=(ids, ids),
                loser_token_ids=(ids, ids),
            )
            for n in range(pairs // files)
        ]
        write_iteration(folder, iteration, records, {})


def draw(folder: Path, files: int) -> None:
    """One draw; prints its seconds and the growth of this process's memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    settings = ReplaySettings(mode="all_history", sample_size=DRAWS)
    sample = sample_replay(folder, files, list(range(1, files + 1)), settings, (0, "benchmark"))
    seconds = time.perf_counter() - begin
    assert len(sample.records) == DRAWS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": round(seconds, 3), "peak_mb": peak // 1024, "grown_mb": (peak - before) // 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw:
        draw(options.draw, options.files)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, options.pairs, options.files)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        print(f"{options.pairs} pairs in {options.files} files, {size:.0f} MB", flush=True)
        for what in ("first draw (offsets are made)", "second draw", "third draw"):
            command = [sys.executable, __file__, "--draw", name, "--files", str(options.files)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            print(f"{what}: {output}", flush=True)


if __name__ == "__main__":
    main()
