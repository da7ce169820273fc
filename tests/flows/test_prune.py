"""What may be pruned, what stays, and that a pruned project goes on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.config.run import RunConfig
from comlrl_core.errors import ConfigError
from comlrl_core.files import read_json
from comlrl_core.store import MANIFEST, Store
from flows import pipeline
from flows.project import Project, ProjectBusy
from flows.prune import needed_iterations, prune
from flows.training import train
from tasks.evaluate import read_curve

Settings = Callable[..., RunConfig]
HISTORY = "  comparator_policy: history\n  comparator_history_k: 2\n"


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("training.comparator_policy=current", 1),
        ("training.comparator_policy=current_copy", 1),
        ("training.comparator_policy=history", 2),
        ("training.comparator_history_k=3", 4),
    ],
)
def test_how_far_back_the_next_iteration_looks(settings_of: Settings, override: str, needed: int) -> None:
    overrides = [override, "training.comparator_policy=history"] if "history_k" in override else [override]
    assert needed_iterations(settings_of(*overrides)) == needed


def test_history_that_is_needed_is_refused(small_project: Project) -> None:
    text = small_project.params.read_text()
    before = "".join(line for line in text.splitlines(True) if "comparator_policy:" in line)
    small_project.params.write_text(text.replace(before, HISTORY))
    for number in range(5):
        publish(small_project, number)
    with pytest.raises(ConfigError, match="--keep-last must be at least 3 with these settings, not 2"):
        prune(small_project, 2)
    assert iterations(small_project.models) == [0, 1, 2, 3, 4]
    assert prune(small_project, 3)[0] == [1]
    assert iterations(small_project.models) == iterations(small_project.state) == [0, 2, 3, 4]


def publish(project: Project, number: int) -> None:
    """Stand-ins for the files of a published iteration."""
    store = Store.below(project.work_root)
    for folder in (store.policy(number), store.training_state(number)):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 100)
    (store.policy(number) / MANIFEST).write_text("{}")
    (store.training_state(number) / "updates.jsonl").write_text("{}\n")


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iteration_")) for path in folder.iterdir())


def test_pairs_the_initial_team_and_the_newest_stay(small_project: Project) -> None:
    for number in range(4):
        publish(small_project, number)
    small_project.replay.mkdir()
    pairs = [small_project.replay / f"iteration_{number:04d}.json" for number in (1, 2, 3)]
    for path in pairs:
        path.write_text("[]")
    pruned, freed = prune(small_project, 2)
    assert pruned == [1] and freed >= 200
    assert iterations(small_project.models) == [0, 2, 3]
    assert all(path.is_file() for path in pairs)
    kept = small_project.work_root / ".comlrl" / "pruned" / "iteration_0001"
    assert sorted(path.name for path in kept.iterdir()) == [MANIFEST, "updates.jsonl"]
    assert prune(small_project, 2) == ([], 0)


def test_nothing_is_pruned_under_a_run(small_project: Project) -> None:
    for number in range(3):
        publish(small_project, number)
    with small_project.run_lock("run"), pytest.raises(ProjectBusy):
        prune(small_project, 1)
    assert iterations(small_project.models) == [0, 1, 2]


DVC = """\
stages:
  iterate:
    foreach: ['0001', '0002']
    do:
      cmd: python stage.py ${item}
      outs: ['models/iteration_${item}', 'replay/iteration_${item}.json']
"""
STAGE = """\
import sys
from pathlib import Path
key = sys.argv[1]
folder = Path(f"models/iteration_{key}")
folder.mkdir(parents=True)
(folder / "tokenizer").write_text("the same in every iteration")
(folder / "weights").write_text(f"of {key}")
Path("replay").mkdir(exist_ok=True)
Path(f"replay/iteration_{key}.json").write_text("of " + key)
"""


@pytest.fixture
def reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of two stages that do next to nothing, up to date."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    root = tmp_path / "project"
    root.mkdir()
    (root / "dvc.yaml").write_text(DVC)
    (root / "stage.py").write_text(STAGE)
    pipeline.init(root)
    subprocess.run(["dvc", "repro", "-q"], cwd=root, check=True)
    return root


def test_missing_outputs_come_back_one_by_one_as_far_as_the_cache_has_them(reproduced: Path) -> None:
    """The pairs of an iteration whose weights were pruned; and what the cache lacks is named."""
    root, pairs = reproduced, reproduced / "replay" / "iteration_0001.json"
    pipeline.drop_from_cache(root, ["iterate@0001"], lambda out: out.def_path.startswith("models"))
    for folder in ("models/iteration_0001", "models/iteration_0002"):
        shutil.rmtree(root / folder)
    pairs.unlink()
    assert pipeline.bring_back_outputs(root) == {"iterate@0001": ["models/iteration_0001"]}
    assert pairs.read_text() == "of 0001"
    assert (root / "models" / "iteration_0002" / "weights").read_text() == "of 0002"
    assert not (root / "models" / "iteration_0001").exists()


def test_cache_objects_that_a_kept_iteration_shares_stay(reproduced: Path) -> None:
    root = reproduced
    freed = pipeline.drop_from_cache(root, ["iterate@0001"], lambda out: out.def_path.startswith("models"))
    cached = [p.read_text() for p in (root / ".dvc" / "cache" / "files").rglob("*") if p.is_file()]
    assert "of 0001" in cached  # the pairs, which have the same bytes as the weights
    assert {"the same in every iteration", "of 0002"} <= set(cached)
    assert freed > 0  # the list of the folder's files alone
    assert pipeline.drop_from_cache(root, ["iterate@0001"], lambda out: True) == len("of 0001")
    assert pipeline.is_current(root, "iterate@0002")


def test_a_longer_run_still_shows_pruned_iterations(small_project: Project, settings_of: Settings) -> None:
    """Without DVC: the curves of a run of three iterations are the same whether iteration 1 was pruned or not."""
    pipeline.set_iterations(small_project.params, 2)
    train(small_project, settings_of())
    before = read_curve(small_project.plots / "evaluation.csv")
    prune(small_project, 1)
    from flows.jobs import plan
    from tasks.evaluate import summarize_run

    job = plan(small_project, settings_of()).job
    summarize_run.fn(job)
    assert read_curve(small_project.plots / "evaluation.csv") == before
    assert {row["iteration"] for row in read_curve(small_project.plots / "training.csv")} == {1, 2}


def test_what_is_measured_otherwise_after_pruning_is_left_out(
    small_project: Project, settings_of: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    from flows.jobs import plan
    from tasks.evaluate import summarize_run

    train(small_project, settings_of())
    prune(small_project, 1)
    params = small_project.params
    params.write_text(params.read_text().replace("samples_per_task: 2", "samples_per_task: 3"))
    caplog.clear()
    summarize_run.fn(plan(small_project, settings_of()).job)
    rows = read_curve(small_project.plots / "evaluation.csv")
    assert [row["iteration"] for row in rows] == [0, 2]
    assert "eval_win_rate_initial" in rows[1] and "eval_win_rate_previous" not in rows[1]
    assert "iteration 1 was pruned" in caplog.text


@pytest.mark.slow
@pytest.mark.endurance
def test_a_pruned_project_has_nothing_to_do_and_goes_on(shell: Any, tmp_path: Path) -> None:
    project = shell.project(tmp_path / "project", iterations=3)
    shell.run(project, "comlrl", "run", "--plain")
    curve = read_curve(project / "plots" / "evaluation.csv")
    cache = size(project / ".dvc" / "cache")
    output = shell.run(project, "comlrl", "prune", "--keep-last", "1")
    assert "pruned 2 iterations" in output
    assert size(project / ".dvc" / "cache") < cache
    assert shell.repro(project, "comlrl", "repro") == []  # neither command brings anything back or runs anything
    output = shell.run(project, "comlrl", "run", "--plain")
    assert output.count("is up to date") == 7 and "WARNING" not in output and "pairs from" not in output
    assert iterations(project / "models") == iterations(project / "state") == [0, 3]

    names = ("report.html", "plots/reward.svg", "replay/iteration_0001.json", "metrics.json")
    lost = [project / name for name in names]
    before = [path.read_bytes() for path in lost[1:]]
    shutil.rmtree(project / "models" / "iteration_0003")  # the newest, and nobody pruned it
    for path in lost:
        path.unlink()
    assert shell.repro(project, "comlrl", "repro") == ["evaluate", "report"]  # the rest is in DVC's cache
    assert lost[0].is_file() and [path.read_bytes() for path in lost[1:]] == before
    assert iterations(project / "models") == iterations(project / "state") == [0, 3]

    shell.run(project, "comlrl", "iterations", "4")
    output = shell.run(project, "comlrl", "run", "--plain")
    assert output.count("pairs from") == 1  # iteration 4 alone
    assert iterations(project / "models") == [0, 3, 4]
    longer = read_curve(project / "plots" / "evaluation.csv")
    assert longer[:4] == curve and len(longer) == 5
    assert {row["iteration"] for row in read_curve(project / "plots" / "training.csv")} == {1, 2, 3, 4}
    assert read_json(project / "metrics.json")["evaluation"]["initial_reward"] == curve[0]["eval_reward_mean"]
    assert shell.repro(project, "comlrl", "repro") == []


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
