"""Kill a run at many moments, start it again, and compare the bytes with an unbroken run.

    python benchmarks/kill_and_resume.py --door plain|embedded|dvc --moments 20 [--seed 0] [--params params.magrpo.yaml]

The project has the settings of `params.yaml`, or of `--params`, with less of everything: few tasks, short answers.
Prints one line per kill and a summary; exit code 1 if a file differs, a step was repeated or a process is left.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
COMMANDS = {
    "plain": [str(BIN / "comlrl"), "run", "--plain"],
    "embedded": [str(BIN / "comlrl"), "run"],
    "dvc": [str(BIN / "dvc"), "repro"],
}
SMALL = {
    "num_train": "6",
    "num_eval": "4",
    "max_new_tokens": "16",
    "preference_num_candidates": "4",
    "preference_pairs_per_sample": "2",
    "preference_replay_sample_size": "12",
    "min_reward_gap": "0.0",
    "num_generations": "2",
    "rollout_buffer_size": "4",
    "train_batch_size": "4",
    "reward_train_batch_size": "4",
    "samples_per_task": "2",
}
REQUIRED = ("num_train", "num_eval", "max_new_tokens", "samples_per_task")  # the others as far as the file has them
LONG_STEPS = ("collect", "rollout", "fit", "update")
SKIPPED = 0.25  # of the shortest call of an unbroken run
CHAINS = ("iterations", "epochs")
PATTERNS = ("replay/iteration_*.json", "models/**/*.safetensors", "state/**/*.safetensors", "state/**/*.jsonl")

Work = dict[tuple[int, str], list[float]]


def environment() -> dict[str, str]:
    """One thread, no progress bars, and this interpreter's commands first."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "COMLRL_PROGRESS": "0", "PATH": path}


def make_project(folder: Path, iterations: int = 2, settings: Path | None = None) -> Path:
    """A small project without git; with the settings of `params.yaml`, or of a parameter file."""
    subprocess.run([str(BIN / "comlrl"), "init", str(folder)], check=True, capture_output=True, env=environment())
    params = folder / "params.yaml"
    text = (settings or params).read_text()
    for name, value in SMALL.items():
        text, count = re.subn(rf"(?m)^(\s+{name}:) [^#\s]+", rf"\1 {value}", text)
        assert count == 1 or (count == 0 and name not in REQUIRED), name
    if "preference_num_candidates" in text:  # two chunks: a kill may fall between them
        text = text.replace("  logging_steps:", "  collection_batch_size: 3\n  logging_steps:")
    for chain in CHAINS:  # which `comlrl iterations` fills
        text += "" if re.search(rf"(?m)^{chain}:", text) else f"\n{chain}: {{}}\n"
    params.write_text(text)
    command = [str(BIN / "comlrl"), "iterations", str(iterations)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment())
    return folder


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every result that must not depend on interruptions."""
    files = sorted(path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(folder: Path, door: str) -> "subprocess.Popen[bytes]":
    """Start a run as a process group leader, its output in `run.log`."""
    with (folder / "run.log").open("ab") as log:
        return subprocess.Popen(
            COMMANDS[door], cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True
        )


def finish(folder: Path, door: str, timeout: float = 300.0) -> float:
    """Run to the end; the seconds it took. Raises with the end of the log where it fails."""
    begin = time.monotonic()
    code = start(folder, door).wait(timeout)
    if code != 0:
        raise RuntimeError(f"exit code {code}:\n{(folder / 'run.log').read_text()[-3000:]}")
    return time.monotonic() - begin


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes whose working directory or command line is in `folder`."""
    found = []
    for process in psutil.process_iter(["pid", "cwd", "cmdline"]):
        info = process.info
        words = " ".join(info["cmdline"] or ())
        if process.pid != os.getpid() and (str(info["cwd"] or "").startswith(str(folder)) or str(folder) in words):
            found.append(process)
    return found


def wait_until_gone(folder: Path, seconds: float = 10.0) -> list[psutil.Process]:
    """Processes that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def work_done(folder: Path) -> Work:
    """The noted seconds of every finished call of the long steps."""
    found: Work = {}
    for line in (folder / ".comlrl" / "timings.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that a kill tore
            entry = json.loads(line)
            if entry["stage"] in LONG_STEPS:
                found.setdefault((entry["iteration"], entry["stage"]), []).append(entry["seconds"])
    return found


def _counted(seconds: list[float], unbroken: list[float]) -> int:
    """Calls that did their work; one that found it done takes next to no time."""
    return sum(value > SKIPPED * min(unbroken) for value in seconds)


def kill_and_resume(template: Path, expected: dict[str, str], unbroken: Work, door: str, delay: float) -> str:
    """One trial: kill after `delay` seconds, run again to the end. Returns "" or what is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    try:
        shutil.copytree(template, folder, dirs_exist_ok=True)
        process = start(folder, door)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        finish(folder, door)
        ran = work_done(folder)
        repeated = [step for step, seconds in unbroken.items() if _counted(ran.get(step, []), seconds) > len(seconds)]
        if repeated:
            return f"finished steps ran again: {repeated}"
        differing = [name for name, digest in digests(folder).items() if expected.get(name) != digest]
        if differing or digests(folder).keys() != expected.keys():
            return f"differs: {differing or expected.keys() ^ digests(folder).keys()}"
        left = wait_until_gone(folder)
        if left:
            return f"left running: {[process.cmdline()[:4] for process in left]}"
        return ""
    finally:
        for process in processes_of(folder):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--door", choices=COMMANDS, default="plain")
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, help="parameter file; default: that of `comlrl init`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-base-") as name:
        template = make_project(Path(name) / "template", settings=options.params)
        unbroken = Path(name) / "unbroken"
        shutil.copytree(template, unbroken)
        seconds = finish(unbroken, options.door)
        expected, work = digests(unbroken), work_done(unbroken)
        print(f"unbroken run through {options.door}: {seconds:.1f} s, {len(expected)} files", flush=True)
        rng = random.Random(options.seed)
        failures = 0
        for moment in range(options.moments):
            delay = rng.uniform(0.1, seconds)
            problem = kill_and_resume(template, expected, work, options.door, delay)
            failures += bool(problem)
            print(f"{moment:3d} killed after {delay:5.1f} s: {problem or 'same bytes'}", flush=True)
    print(f"{options.moments - failures} of {options.moments} kills resumed to the same bytes")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
