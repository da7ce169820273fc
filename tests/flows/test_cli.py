import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.errors import ComlrlError
from flows import cli
from flows.project import Project

COMMANDS = ("init", "run", "stage", "repro", "iterations", "evaluate", "export", "prune", "serve", "doctor", "settings")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def comlrl(small_project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in the project: exit code, stdout, stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(small_project.work_root)
        monkeypatch.setattr(sys, "argv", ["comlrl", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return command


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(comlrl: Command, name: str) -> None:
    code, out, _ = comlrl(name, "--help")
    assert code == 0
    assert len(out) > 200


def test_the_command_alone_lists_all(comlrl: Command) -> None:
    out = "".join(map(str, comlrl()[1:]))
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "training.temperature=-1"], ["training.temperature", "-1"]),
        (["--set", "training.top_p=7"], ["training.top_p", "7"]),
        (["--set", "training.dpo_beta=.nan"], ["training.dpo_beta"]),
        (["--set", "training.dpo_beta=.inf"], ["training.dpo_beta"]),
        (["--set", "training.preference_replay_mode=newest"], ["training.preference_replay_mode", "lambda_decay"]),
        (["--set", "training.dpo_betta=0.1"], ["training.dpo_betta", "did you mean 'dpo_beta'"]),
        (["--set", "trainign.dpo_beta=0.1"], ["trainign", "did you mean 'training'"]),
        (["--set", "algorithm=ppo"], ["algorithm", "madpo_iter"]),
        (["--set", "num_iterations=0"], ["num_iterations"]),
        (["--set", "training.num_agents=3"], ["team.templates", "3 agents"]),
        (["--set", "training.dpo_beta"], ["--set", "section.key=value"]),
        (["--set", "training.dpo_beta=[1"], ["--set training.dpo_beta", "YAML"]),
        (["--set", "training.seed.x=1"], ["seed", "not a section"]),
        (["--set", "reward.function=missing.py:f"], ["reward.function", "missing.py"]),
        (["--set", "reward.function=my_rewards.py:nobody"], ["reward.function", "nobody"]),
        (["--set", "reward.function=builtin:nothing"], ["reward.function", "nothing", "length_ratio"]),
        (["--set", "reward.kwargs={lwo: 1}"], ["reward.function", "lwo"]),
        (["--set", "reward.processor=my_rewards.py:nobody"], ["reward.processor", "nobody"]),
        (["--set", "training.num_agents=1", "--set", "team.templates=x"], ["length_ratio", "1 list"]),
        (["--params", "other.yaml"], ["other.yaml"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
@pytest.mark.parametrize("door", [[], ["--plain"]])
def test_a_mistake_is_named_and_nothing_is_written(
    comlrl: Command, small_project: Project, arguments: list[str], named: list[str], door: list[str]
) -> None:
    before = contents(small_project.work_root)
    code, out, err = comlrl("run", *door, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and "Traceback" not in err
    assert all(name in err for name in named), err
    assert contents(small_project.work_root) == before


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("temperature: 1.0", "temperature: -1.0", "training.temperature"),
        ("dpo_beta: 0.3", "dpo_betta: 0.3", "training.dpo_betta"),
        ("num_iterations: 2", "num_iterations: 3", "comlrl iterations 3"),
        ("training:", "training: [", "line"),
        ("seed: 1", "seed: one", "training.seed"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(
    comlrl: Command, small_project: Project, before: str, after: str, named: str
) -> None:
    text = small_project.params.read_text()
    assert before in text
    small_project.params.write_text(text.replace(before, after, 1))
    contents_before = contents(small_project.work_root)
    for arguments in (["run"], ["stage", "prepare"], ["repro"]):
        code, _, err = comlrl(*arguments)
        assert code == 2, arguments
        assert str(small_project.params) in err and named in err
        assert "Traceback" not in err
    left = contents(small_project.work_root)
    left.pop(".comlrl/run.lock", None)  # held while `repro` looked
    assert left == contents_before


def test_outside_of_a_project(comlrl: Command, monkeypatch: pytest.MonkeyPatch, small_project: Project) -> None:
    small_project.params.unlink()
    code, _, err = comlrl("run")
    assert code == 2 and "comlrl init" in err


def test_the_number_of_iterations(comlrl: Command, small_project: Project) -> None:
    comments = small_project.params.read_text().count("#")
    assert comlrl("iterations", "3")[1].strip().endswith("now 3 iterations")
    assert comlrl("iterations", "3")[1].strip().endswith("already 3 iterations")
    assert small_project.params.read_text().count("#") == comments
    assert comlrl("iterations", "0")[0] == 2
    assert comlrl("iterations", "many")[0] == 2


def test_evaluating_what_is_not_there(comlrl: Command) -> None:
    code, _, err = comlrl("evaluate")
    assert code == 2 and "comlrl run" in err


def test_a_run_and_its_evaluation(comlrl: Command, small_project: Project) -> None:
    code, out, _ = comlrl("run", "--plain")
    assert code == 0
    assert out.count("reward") >= 3 and "comlrl iterations 4" in out
    code, out, _ = comlrl("evaluate", "--iteration", "1")
    assert code == 0 and "eval/win_rate_initial" in out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ComlrlError("the disk is full"), 2, "error: the disk is full"),
        (KeyboardInterrupt(), 130, "interrupted; finished steps are kept"),
        (RuntimeError("a bug"), 1, "Traceback"),
    ],
)
def test_exit_codes(
    comlrl: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def raising(*_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "load", raising)
    ended, _, err = comlrl("run")
    assert ended == code and said in err


def test_importing_the_command_line_is_quick() -> None:
    """`comlrl --help` and every refusal wait for no PyTorch, Prefect, MLflow or DVC."""
    import subprocess

    code = (
        "import sys; import flows.cli; "
        "print([n for n in ('torch', 'transformers', 'prefect', 'mlflow', 'dvc') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
