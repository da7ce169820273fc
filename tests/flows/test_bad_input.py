"""Every bad setting and every bad file ends in exit code 2, a message that names it, and an untouched project.

Settings are refused before a model is loaded, files before training. The command line is called in this process; a few
cases run as processes of their own, and say how long they took beyond the start of `comlrl --help`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli, pipeline
from flows.package_lock import write_lock
from flows.pipeline import set_iterations
from flows.project import Project
from tasks import update

Command = Callable[..., tuple[int, str, str]]
Change = Callable[[Path], object]
NAMED_SECONDS = 3.0  # said, not asserted: how long a refusal may take beyond the start


@pytest.fixture
def comlrl(small_project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in the project: exit code, stdout, stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(small_project.work_root)
        monkeypatch.setattr(sys, "argv", ["comlrl", *arguments])
        monkeypatch.setattr(cli, "env_defaults", lambda _: None)  # it warns where Prefect is imported already
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return command


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that lets something through fails here, and does not wait for a server."""

    def started(*_: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("flows.prefect_api.embedded", started)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, every folder; times of change do not count."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(comlrl: Command, project: Project, arguments: list[str], named: list[str]) -> None:
    before = tree(project.work_root)
    code, out, err = comlrl(*arguments)
    assert code == 2, err
    assert out == "" and err.startswith("error: ") and "Traceback" not in err, err
    assert all(name in err for name in named), err
    assert tree(project.work_root) == before


# ---- settings --------------------------------------------------------------------------------------------------------

REWARDS = """
def one(first):
    return [0.0] * len(first)

def two(first, second):
    return [0.0] * len(first)

def three(first, second, third):
    return [0.0] * len(first)

async def later(first, second):
    return [0.0] * len(first)

def clip(reward, low, high):
    return min(max(reward, low), high)

def prompt(row):
    return row["prompt"]

def number(row):
    return 7

def greedy(row):
    return row["nothing"]

def chat(row):
    return [{"role": "user", "content": row["prompt"]}]

def wide(first, second):
    return [0.0] * len(first)

wide.reward_range = (1.0, 0.0)
CONSTANT = 3
"""

T = "training."
SETTINGS: list[tuple[list[str], list[str]]] = [
    # unknown names, wrong kinds
    (["trainign.dpo_beta=0.1"], ["trainign", "did you mean 'training'"]),
    ([T + "dpo_betta=0.1"], [T + "dpo_betta", "did you mean 'dpo_beta'"]),
    ([T + "seed=one"], [T + "seed", "'one'"]),
    ([T + "seed=1.5"], [T + "seed", "1.5"]),
    ([T + "seed=-1"], [T + "seed", "-1"]),
    ([T + "max_new_tokens=[8]"], [T + "max_new_tokens", "[8]"]),
    ([T + "num_train_epochs=true"], [T + "num_train_epochs", "true"]),
    (["team=tiny"], ["team", "'tiny'"]),
    (["training=7"], ["training", "mapping"]),
    (["tracking.enabled=perhaps"], ["tracking.enabled", "'perhaps'"]),
    (["algorithm=ppo"], ["algorithm", "madpo_iter"]),
    # out of bounds
    ([T + "temperature=-1"], [T + "temperature", "-1"]),
    ([T + "temperature=0"], [T + "temperature", "0"]),
    ([T + "top_p=7"], [T + "top_p", "7"]),
    ([T + "top_k=0"], [T + "top_k", "0"]),
    ([T + "dpo_beta=.nan"], [T + "dpo_beta", "finite"]),
    ([T + "dpo_beta=.inf"], [T + "dpo_beta", "finite"]),
    ([T + "dpo_beta=0"], [T + "dpo_beta", "greater than 0"]),
    ([T + "label_smoothing=0.5"], [T + "label_smoothing", "0.5"]),
    ([T + "agent_learning_rate=-1e-3"], [T + "agent_learning_rate"]),
    ([T + "adam_beta2=1.0"], [T + "adam_beta2", "less than 1"]),
    ([T + "preference_num_candidates=1"], [T + "preference_num_candidates", "2"]),
    ([T + "num_threads=0"], [T + "num_threads"]),
    ([T + "num_agents=0"], [T + "num_agents"]),
    ([T + "preference_replay_lambda=1.5"], [T + "preference_replay_lambda"]),
    (["evaluation.samples_per_task=0"], ["evaluation.samples_per_task"]),
    (["evaluation.confidence=0.4"], ["evaluation.confidence", "0.5"]),
    (["tasks.num_train=0"], ["tasks.num_train"]),
    (["num_iterations=0"], ["num_iterations"]),
    (["num_iterations=10000"], ["num_iterations", "9999"]),
    (["tracking.experiment=''"], ["tracking.experiment"]),
    # not one of the choices
    ([T + "preference_replay_mode=newest"], [T + "preference_replay_mode", "lambda_decay"]),
    ([T + "pair_selection=best"], [T + "pair_selection", "reward_gap"]),
    ([T + "comparator_policy=api"], ["comparator_policy", "current_copy"]),
    ([T + "comparator_policy=mirror"], [T + "comparator_policy", "current_copy"]),
    ([T + "loss_type=sigmoi"], [T + "loss_type", "hinge"]),
    ([T + "on_bad_reward=ignore"], [T + "on_bad_reward", "drop"]),
    (["team.on_long_prompt=cut"], ["team.on_long_prompt", "truncate_left"]),
    # contradictions
    ([T + "preference_replay_mode=nearest_k"], ["preference_replay_k"]),
    ([T + "preference_replay_mode=lambda_decay"], ["preference_replay_lambda"]),
    ([T + "preference_replay_k=3"], ["preference_replay_k", "current"]),
    ([T + "comparator_history_k=2"], ["comparator_history_k", "history"]),
    ([T + "comparator_policy=model"], ["comparator_model_name", "comparator_agents"]),
    ([T + "comparator_model_name=builtin:tiny"], ["comparator_model_name", "model"]),
    ([T + "pair_selection=all"], ["preference_pairs_per_sample", "null"]),
    ([T + "rollout_buffer_size=1"], ["train_batch_size", "rollout_buffer_size"]),
    ([T + "lr_warmup_steps=3"], ["lr_warmup_steps", "constant_with_warmup"]),
    ([T + "loss_type=ipo", T + "label_smoothing=0.1"], ["label_smoothing", "sigmoid"]),
    ([T + "num_agents=3"], ["team.templates", "3 agents"]),
    ([T + "parallel_training=mp"], ["agent_devices"]),
    ([T + "agent_devices=[cpu, cpu, cpu]"], ["agent_devices", "3 devices"]),
    (["evaluation.greedy=true"], ["samples_per_task", "1"]),
    (["team.agents=[builtin:tiny, builtin:tiny]"], ["agent_model", "agents"]),
    (["team.formatter=my_rewards.py:prompt"], ["formatter", "templates"]),
    (["algorithm=madpo"], ["num_iterations", "1"]),
    ([T + "comparator_api_key=sk-123"], ["comparator_api_key"]),
    # what is written wrongly
    ([T + "dpo_beta"], ["--set", "section.key=value"]),
    ([T + "dpo_beta=[1"], ["--set training.dpo_beta", "YAML"]),
    ([T + "seed=" + "9" * 5000], ["--set training.seed", "YAML"]),
    ([T + "seed=2024-13-45"], ["--set training.seed", "YAML"]),
    ([T + "dpo_beta=" + "[" * 4000], ["--set training.dpo_beta", "YAML"]),
    ([T + "seed.x=1"], ["seed", "not a section"]),
    # devices
    ([T + "agent_devices=cuda:7"], ["params.yaml", T + "agent_devices", "cuda:7", "allowed: cpu"]),
    ([T + "agent_devices=[cpu, gpu]"], [T + "agent_devices", "'gpu'", "cuda:0"]),
    ([T + "comparator_devices=meta"], [T + "comparator_devices", "meta"]),
    ([T + "reference_devices=cuda:-1"], [T + "reference_devices", "cuda:-1"]),
    # models
    (["team.agent_model=builtin:small"], ["team.agent_model", "builtin:small", "builtin:tiny"]),
    (["team.agent_model=./nowhere"], ["params.yaml", "team.agent_model", "./nowhere", "folder"]),
    (["team.agent_model='a model'"], ["team.agent_model", "'a model'", "hub"]),
    (["team.agent_model=null", "team.agents=[builtin:tiny, a/b/c]"], ["team.agents", "a/b/c"]),
    (
        [T + "comparator_policy=model", T + "comparator_model_name=builtin:big"],
        ["comparator_model_name", "builtin:tiny"],
    ),
    ([T + "comparator_policy=model", T + "comparator_agents=[builtin:tiny, ./x]"], ["comparator_agents", "./x"]),
    (["team.model_options={dtype: float31}"], ["team.model_options", "float31", "bfloat16"]),
    (["team.model_options={revision: main}"], ["team.model_options", "revision", "dtype"]),
    (["team.model_options={attn_implementation: fast}"], ["team.model_options", "'fast'", "sdpa"]),
    (["team.model_options={special_tokens: 7}"], ["team.model_options", "special_tokens"]),
    (["team.model_options={model_kwargs: 7}"], ["team.model_options", "model_kwargs"]),
    (["team.system_prompts=Be brief"], ["team.system_prompts", "chat template", "builtin:tiny"]),
    ([T + "max_new_tokens=1024"], [T + "max_new_tokens", "1024", "builtin:tiny"]),
    # tasks
    (["tasks.train=builtin:riddles"], ["tasks.train", "builtin:riddles", "builtin:length_ratio"]),
    (["tasks.train=missing.jsonl"], ["tasks.train", "missing.jsonl"]),
    (["tasks.train=missing.txt"], ["tasks.train", "missing.txt", ".jsonl"]),
    (["tasks.eval=./none"], ["tasks.eval", "./none", ".jsonl"]),
    (["tasks.train='two words'"], ["tasks.train", "two words", "data set"]),
    (["tasks.train=my_rewards.py"], ["tasks.train", "my_rewards.py", ".jsonl"]),
    (["tasks.train=builtin:writing_prompts", "tasks.num_train=99"], ["writing_prompts", "num_train", "99"]),
    (["team.templates='{question}'"], ["tasks.train", "'question'", "team.templates", "prompt"]),
    # rewards and formatters
    (["reward.function=missing.py:f"], ["params.yaml", "reward.function", "missing.py"]),
    (["reward.function=my_rewards.py"], ["reward.function", "my_rewards.py:function"]),
    (["reward.function=my_rewards.py:nobody"], ["reward.function", "nobody"]),
    (["reward.function=my_rewards.py:CONSTANT"], ["reward.function", "CONSTANT", "not callable"]),
    (["reward.function=my_rewards.py:one"], ["reward.function", "one", "2 list"]),
    (["reward.function=my_rewards.py:three"], ["three", "2 list"]),
    (["reward.function=my_rewards.py:later"], ["later", "asynchronous"]),
    (["reward.function=no.such.module:f"], ["reward.function", "no.such.module"]),
    (["reward.function=builtin:nothing"], ["reward.function", "nothing", "length_ratio"]),
    (["reward.kwargs={lwo: 1}"], ["reward.function", "lwo"]),
    (["reward.function=my_rewards.py:two", "reward.kwargs={prompts: 1}"], ["reward.function", "prompts"]),
    (["reward.processor=my_rewards.py:nobody"], ["reward.processor", "nobody"]),
    (["reward.processor=my_rewards.py:clip"], ["reward.processor", "clip", "one reward"]),
    ([T + "log_reward_distribution=true", "reward.function=my_rewards.py:wide"], ["reward_range", "lowest"]),
    (["team.templates=null", "team.formatter=my_rewards.py:nobody"], ["team.formatter", "nobody"]),
    (["team.templates=null", "team.formatter=my_rewards.py:number"], ["team.formatter", "int", "string"]),
    (["team.templates=null", "team.formatter=my_rewards.py:greedy"], ["team.formatter", "KeyError", "nothing"]),
    (["team.templates=null", "team.formatter=my_rewards.py:chat"], ["team.formatter", "chat template"]),
]


def test_there_are_as_many_bad_settings_as_promised() -> None:
    assert len(SETTINGS) >= 60


@pytest.mark.parametrize(("overrides", "named"), SETTINGS, ids=lambda value: ",".join(value)[:60])
def test_a_bad_setting_is_refused(
    comlrl: Command, small_project: Project, overrides: list[str], named: list[str]
) -> None:
    (small_project.work_root / "my_rewards.py").write_text(REWARDS)
    refused(comlrl, small_project, ["run", *(part for one in overrides for part in ("--set", one))], named)


REWARD_SETTINGS: list[tuple[str, list[str], list[str]]] = [
    ("magrpo", [T + "num_generations=1"], [T + "num_generations", "2"]),
    ("magrpo", [T + "num_turns=2"], ["tasks.transition", "num_turns"]),
    ("magrpo", ["tasks.transition=my_tasks.py:next", T + "num_turns=2"], ["tasks.transition", "my_tasks.py"]),
    ("magrpo", [T + "reference_kl_enabled=true", T + "reference_devices=cuda:7"], [T + "reference_devices", "cuda:7"]),
    ("magrpo", [T + "reference_kl_coef=.nan"], [T + "reference_kl_coef", "finite"]),
    ("magrpo", [T + "joint_mode=crossed"], [T + "joint_mode", "aligned"]),
    ("magrpo", [T + "on_bad_reward=ignore"], [T + "on_bad_reward", "drop"]),
    ("marlhf", [T + "num_generations=1"], ["num_generations must be 2 or more"]),
    ("marlhf", [T + "rl_algorithm=ppo"], [T + "rl_algorithm", "magrpo"]),
    ("marlhf", [T + "reward_model_name=builtin:huge"], [T + "reward_model_name", "builtin:huge", "builtin:tiny"]),
    ("marlhf", [T + "reward_model_name=./none"], [T + "reward_model_name", "./none"]),
    ("marlhf", [T + "reward_model_name=builtin:tiny", T + "reward_max_length=5000"], ["reward_max_length", "5000"]),
    ("marlhf", [T + "reward_model_init=best"], [T + "reward_model_init", "previous"]),
    ("marlhf", [T + "reward_eval_fraction=1.5"], [T + "reward_eval_fraction"]),
]


@pytest.mark.parametrize(("kind", "overrides", "named"), REWARD_SETTINGS, ids=lambda value: str(value)[:60])
def test_a_bad_setting_of_rewards_is_refused(
    comlrl: Command, small_project: Project, kind: str, overrides: list[str], named: list[str]
) -> None:
    settings = small_project.work_root / f"params.{kind}.yaml"
    shutil.copy(Path(__file__).parents[2] / settings.name, settings)
    options = [part for one in overrides for part in ("--set", one)]
    refused(comlrl, small_project, ["run", "--params", str(settings), *options], named)


@pytest.mark.parametrize("door", [["run", "--plain"], ["stage", "prepare"], ["repro"]])
@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            "agent_model: builtin:tiny",
            "agent_model: builtin:small",
            ["params.yaml", "team.agent_model", "builtin:tiny"],
        ),
        ("train: builtin:length_ratio", "train: none.csv", ["params.yaml", "tasks.train", "none.csv"]),
        (
            "num_agents: 2",
            "num_agents: 2\n  agent_devices: cuda:7",
            ["params.yaml", "training.agent_devices", "cuda:7"],
        ),
        ("function: builtin:length_ratio", "function: my_rewards.py:none", ["params.yaml", "reward.function", "none"]),
    ],
)
def test_every_door_refuses(
    comlrl: Command, small_project: Project, door: list[str], before: str, after: str, named: list[str]
) -> None:
    text = small_project.params.read_text()
    assert before in text
    small_project.params.write_text(text.replace(before, after, 1))
    refused(comlrl, small_project, door, named)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_a_hub_name_must_be_in_the_cache(
    comlrl: Command, small_project: Project, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    named = ["team.agent_model", "nobody/nothing", variable, "cache"]
    refused(comlrl, small_project, ["run", "--set", "team.agent_model=nobody/nothing"], named)


# ---- the settings file -----------------------------------------------------------------------------------------------


def text(value: str) -> Change:
    return lambda path: path.write_text(value)


def raw(value: bytes) -> Change:
    return lambda path: path.write_bytes(value)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def added(value: str) -> Change:
    return lambda path: path.write_text(path.read_text() + value)


def replaced(before: str, after: str) -> Change:
    def change(path: Path) -> None:
        content = path.read_text()
        assert before in content
        path.write_text(content.replace(before, after, 1))

    return change


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


PARAMS: list[tuple[Change, list[str]]] = [
    (replaced("training:", "training: ["), ["line", "YAML"]),
    (replaced("  num_agents:", "\tnum_agents:"), ["line", "YAML"]),
    (added("\nalgorithm: madpo\n"), ["line", "algorithm", "YAML"]),
    (raw("algorithm: madpo # \u00fc".encode("latin-1")), ["UTF-8", "byte"]),
    (raw(b"\xff\xfe" + "algorithm: madpo".encode("utf-16-le")), ["UTF-8"]),
    (raw(b"a: \x00\x01"), ["YAML"]),
    (text(""), ["mapping"]),
    (text("# nothing but a comment\n"), ["mapping"]),
    (text("- algorithm: madpo\n"), ["mapping", "list"]),
    (text("just words\n"), ["mapping", "str"]),
    (text("algorithm: !!python/object:os.system x\n"), ["line", "YAML"]),
    (added("\n1: 2\n"), ["1"]),
    (folder, ["folder"]),
    (replaced("num_iterations: 2", "num_iterations: 3"), ["comlrl iterations 3"]),
]


@pytest.mark.parametrize(("change", "named"), PARAMS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_bad_settings_file_is_refused(
    comlrl: Command, small_project: Project, change: Change, named: list[str]
) -> None:
    change(small_project.params)
    for door in (["run"], ["stage", "prepare"], ["repro"]):
        refused(comlrl, small_project, door, ["params.yaml", *named])


# ---- task files ------------------------------------------------------------------------------------------------------

ROWS = '{"prompt": "a", "task_id": "1"}\n{"prompt": "b", "task_id": "2"}\n'
TASKS: list[tuple[str, Change, list[str]]] = [
    ("t.jsonl", raw(b'{"prompt": "a"}\n{"prompt": '), ["t.jsonl", "line 2", "JSON"]),
    ("t.jsonl", text('{"prompt": "a"}\n["b"]\n'), ["t.jsonl", "line 2", "object"]),
    ("t.jsonl", text('{"prompt": "a"}\n{"question": "b"}\n'), ["t.jsonl", "line 2", "'prompt'", "question"]),
    ("t.jsonl", text('{"task_id": "1", "prompt": "a"}\n\n{"task_id": "1", "prompt": "b"}\n'), ["line 3", "'1'"]),
    ("t.jsonl", text('{"task_id": ["x"], "prompt": "a"}\n'), ["line 1", "task_id"]),
    ("t.jsonl", text(""), ["t.jsonl", "no tasks"]),
    ("t.jsonl", raw('{"prompt": "\u00fc"}\n'.encode("latin-1")), ["t.jsonl", "line 1", "UTF-8"]),
    ("t.jsonl", text('{"prompt": "a", "x": NaN}\n'), ["t.jsonl", "line 1", "NaN"]),
    ("t.jsonl", text('{"prompt": "a", "prompt": "b"}\n'), ["t.jsonl", "line 1", "more than once"]),
    ("t.jsonl", folder, ["t.jsonl", "no such task file"]),
    ("t", folder, ["t", "without data files"]),
    ("t.csv", text("prompt,x\na,1\nb,2,3\n"), ["t.csv", "line 3", "3 values", "2 columns"]),
    ("t.csv", text("prompt,prompt\na,b\n"), ["t.csv", "line 1", "distinct"]),
    ("t.csv", raw("prompt\n\u00fc\n".encode("latin-1")), ["t.csv", "UTF-8"]),
    ("t.csv", text("question\nb\n"), ["t.csv", "line 2", "'prompt'"]),
    ("t.parquet", text("PAR1"), ["t.parquet", "Parquet"]),
    ("t.txt", text("a\nb\n"), ["t.txt", ".jsonl"]),
    ("t.json", text(ROWS), ["t.json", ".jsonl"]),
]


@pytest.mark.parametrize(("name", "change", "named"), TASKS)
def test_a_bad_task_file_is_refused(
    comlrl: Command, small_project: Project, name: str, change: Change, named: list[str]
) -> None:
    change(small_project.work_root / name)
    refused(comlrl, small_project, ["run", "--set", f"tasks.train={name}"], ["tasks.", *named])
    refused(comlrl, small_project, ["run", "--plain", "--set", f"tasks.eval={name}"], named)


def test_held_out_tasks_are_others(comlrl: Command, small_project: Project) -> None:
    (small_project.work_root / "t.jsonl").write_text(ROWS)
    arguments = ["run", "--set", "tasks.train=t.jsonl", "--set", "tasks.eval=t.jsonl"]
    refused(comlrl, small_project, arguments, ["tasks.eval", "tasks.train", "share 2 tasks"])


# ---- the user's Python -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (removed, ["my_rewards.py", "no file"]),
        (text("def f(first, second:\n"), ["my_rewards.py", "line 1", "SyntaxError"]),
        (text("x = 1\nimport nothing_like_it\n"), ["my_rewards.py", "line 2", "nothing_like_it"]),
        (text("import sys\n\nsys.exit(0)\n"), ["my_rewards.py", "line 3", "SystemExit"]),
        (raw(b"x = '\xff'\n"), ["my_rewards.py", "SyntaxError"]),
        (text("def g(first, second):\n    return [0.0]\n"), ["my_rewards.py", "'f'", "does not exist"]),
        (text("f = 3\n"), ["my_rewards.py", "'f'", "not callable"]),
        (text("def f(first):\n    return [0.0]\n"), ["my_rewards.py:f", "2 list"]),
        (folder, ["my_rewards.py", "no file"]),
    ],
)
def test_a_bad_reward_file_is_refused(
    comlrl: Command, small_project: Project, change: Change, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    change(small_project.work_root / "my_rewards.py")
    refused(comlrl, small_project, ["run", "--set", "reward.function=my_rewards.py:f"], ["reward.function", *named])


# ---- what an earlier run left ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted_tree() -> dict[str, Path]:
    """Where the first test that needs it leaves a run that was interrupted in the update of iteration 2."""
    return {}


@pytest.fixture
def interrupted(
    small_project: Project,
    comlrl: Command,
    interrupted_tree: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """A project with iteration 1 published and iteration 2 unfinished; it draws from both iteration files."""
    replaced("preference_replay_mode: current", "preference_replay_mode: all_history")(small_project.params)
    if not interrupted_tree:
        learn = update.learn

        def killed(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] == 2:
                raise KeyboardInterrupt
            return learn(*args, **kwargs)

        with monkeypatch.context() as broken:
            broken.setattr(update, "learn", killed)
            assert comlrl("run", "--plain")[0] == cli.INTERRUPTED
        interrupted_tree["root"] = tmp_path_factory.mktemp("interrupted") / "project"
        shutil.copytree(small_project.work_root, interrupted_tree["root"])
    shutil.copytree(interrupted_tree["root"], small_project.work_root, dirs_exist_ok=True)
    return small_project


def first_record(**changes: Any) -> Change:
    def change(path: Path) -> None:
        value = json.loads(path.read_text())
        value["pairs"][0] |= changes
        path.write_text(json.dumps(value))

    return change


PAIRS, MODEL, STATE = "replay/iteration_0001.json", "models/iteration_0001", "state/iteration_0001"
WEIGHTS = f"{MODEL}/agent_1/model.safetensors"
SCRATCH = ".comlrl/work/iteration_0002-*"
LEFTOVERS: list[tuple[str, Change, list[str]]] = [
    (PAIRS, truncated, [PAIRS, "line", "JSON"]),
    (PAIRS, text('{"name": "something else"}'), [PAIRS, "'iteration' is missing"]),
    (PAIRS, text("[1, 2]"), [PAIRS, "object"]),
    (PAIRS, raw(b""), [PAIRS, "JSON"]),
    (PAIRS, raw(b"\xff\xfe\x00"), [PAIRS, "UTF-8"]),
    (PAIRS, folder, [PAIRS]),
    (PAIRS, first_record(winner_reward="high"), [PAIRS, "record 0", "winner_reward", "number"]),
    (PAIRS, first_record(winner_completions=["alone"]), [PAIRS, "record 0", "winner_completions"]),
    (PAIRS, first_record(winner_reward=float("nan")), [PAIRS, "NaN"]),
    (PAIRS, replaced('"num_pairs": ', '"num_pairs": 9'), [PAIRS, "num_pairs"]),
    (PAIRS, replaced('"iteration": 1', '"iteration": 7'), [PAIRS, "'iteration'", "name"]),
    (PAIRS, first_record(task_id="another"), [PAIRS, "changed since iteration 1"]),
    ("replay/iteration_0001.meta.json", truncated, ["iteration_0001.meta.json", "line"]),
    ("replay/iteration_0001.meta.json", text("{}"), ["iteration_0001.meta.json", "pairs_sha256"]),
    (f"{MODEL}/manifest.json", truncated, [f"{MODEL}/manifest.json", "line"]),
    (f"{MODEL}/manifest.json", text("{}"), [f"{MODEL}/manifest.json", "iteration"]),
    (f"{MODEL}/manifest.json", replaced('"iteration": 1', '"iteration": "1"'), ["manifest.json", "iteration must be"]),
    (f"{MODEL}/manifest.json", folder, [f"{MODEL}/manifest.json"]),
    (f"{MODEL}/team.json", text("[]"), [f"{MODEL}/team.json", "num_agents"]),
    (f"{MODEL}/agent_1", removed, [f"{MODEL}/agent_1", "config.json"]),
    (f"{MODEL}/agent_1/config.json", truncated, [f"{MODEL}/agent_1/config.json", "line"]),
    (WEIGHTS, removed, [f"{MODEL}/agent_1", "model.safetensors"]),
    (WEIGHTS, raw(b""), [WEIGHTS, "0 bytes"]),
    (WEIGHTS, truncated, [WEIGHTS, "its header says"]),
    (WEIGHTS, raw(b"\x10" + b"\0" * 40), [WEIGHTS, "header"]),
    (f"{STATE}/progress.json", truncated, [f"{STATE}/progress.json", "line"]),
    (f"{STATE}/progress.json", text("[]"), [f"{STATE}/progress.json", "environment_steps"]),
    (f"{STATE}/engine_0/engine.safetensors", truncated, [f"{STATE}/engine_0/engine.safetensors", "header"]),
    (f"{STATE}/engine_0/engine.safetensors", removed, [f"{STATE}/engine_0/engine.safetensors"]),
    ("data/tasks/train.jsonl", truncated, ["data/tasks/train.jsonl", "line"]),
    ("data/tasks/eval.jsonl", text('{"prompt": "x"}\n'), ["data/tasks/eval.jsonl", "line 1", "task_id"]),
    (f"{SCRATCH}/candidates_0000.jsonl", truncated, ["candidates_0000.jsonl", "line 3"]),
    (f"{SCRATCH}/candidates_0000.jsonl", text('{"task_id": "x"}\n'), ["candidates_0000.jsonl", "line 1", "'row'"]),
    (f"{SCRATCH}/scored_0000.jsonl", raw(b"\xff"), ["scored_0000.jsonl", "line 1", "UTF-8"]),
    (f"{SCRATCH}/scored_0000.jsonl", folder, ["scored_0000.jsonl"]),
    (f"{SCRATCH}/entry.json", text('{"x": 1}'), ["entry.json", "'iteration'"]),
    (f"{SCRATCH}/drawn.jsonl", text("{}\n"), ["drawn.jsonl", "line 1", "prompts"]),
]


def test_there_are_as_many_bad_files_as_promised() -> None:
    assert len(PARAMS) + len(TASKS) + len(LEFTOVERS) >= 25


@pytest.mark.parametrize(
    ("pattern", "change", "named"), LEFTOVERS, ids=[f"{n}-{entry[0]}" for n, entry in enumerate(LEFTOVERS)]
)
def test_a_damaged_file_of_an_earlier_run_is_refused(
    comlrl: Command, interrupted: Project, pattern: str, change: Change, named: list[str]
) -> None:
    (path,) = interrupted.work_root.glob(pattern)
    change(path)
    refused(comlrl, interrupted, ["run", "--plain"], named)
    refused(comlrl, interrupted, ["run"], named)


@pytest.mark.parametrize("pattern", [PAIRS, f"{SCRATCH}/scored_0000.jsonl", f"{SCRATCH}/drawn.jsonl"])
def test_without_the_damaged_file_the_run_goes_on(comlrl: Command, interrupted: Project, pattern: str) -> None:
    """The advice of the message: what is missing is made again, with the same bytes."""
    (path,) = interrupted.work_root.glob(pattern)
    before = path.read_bytes()
    path.unlink()
    assert comlrl("run", "--plain")[0] == 0
    assert (interrupted.models / "iteration_0002" / "manifest.json").is_file()
    if path.exists():
        assert path.read_bytes() == before


def test_a_damaged_file_that_other_settings_have_overtaken_stops_nothing(comlrl: Command, interrupted: Project) -> None:
    """An interrupted run with new settings has replaced an iteration file, and not yet the policies beside it."""
    first_record(task_id="another")(interrupted.work_root / PAIRS)
    replaced("dpo_beta: 0.3", "dpo_beta: 0.2")(interrupted.params)
    assert comlrl("run", "--plain")[0] == 0


# ---- a project that DVC keeps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("comlrl.lock", text("something else\n"), ["comlrl.lock", "line 1"]),
        ("comlrl.lock", text('{"packages": []}\n'), ["comlrl.lock", "digest"]),
        ("comlrl.lock", raw(b"\xff\xff"), ["comlrl.lock", "UTF-8"]),
        ("comlrl.lock", folder, ["comlrl.lock"]),
        ("dvc.yaml", text("stages: [\n"), ["dvc.yaml", "YAML"]),
        ("dvc.yaml", text("a list\n"), ["dvc.yaml", "mapping"]),
        ("dvc.yaml", text("stages: {}\n"), ["dvc.yaml", "no stage prepare"]),
        ("dvc.lock", text("schema: '2.0\n"), ["dvc.lock", "YAML"]),
        ("dvc.lock", raw(b"\xff"), ["dvc.lock", "utf-8"]),
    ],
)
def test_a_bad_pipeline_file_is_refused(
    comlrl: Command, small_project: Project, name: str, change: Change, named: list[str]
) -> None:
    pipeline.init(small_project.work_root)
    write_lock(small_project.work_root)
    change(small_project.work_root / name)
    refused(comlrl, small_project, ["run", "--plain"], named)


# ---- as processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_refusal_takes_seconds(small_project: Project, comlrl: Command) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def process(*arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=small_project.work_root, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return time.perf_counter() - start, done

    set_iterations(small_project.params, 2)
    (small_project.work_root / "t.jsonl").write_text('{"prompt": "a"}\n' * 3 + '{"prompt": ')
    start, helped = process("--help")
    assert helped.returncode == 0
    before = tree(small_project.work_root)
    for override in (
        "training.temperature=-1",
        "reward.function=my_rewards.py:nobody",
        "tasks.train=t.jsonl",
        "team.agent_model=builtin:small",
        "training.agent_devices=cuda:7",
    ):
        seconds, done = process("run", "--set", override, "--set", "tasks.num_train=null")
        print(f"{override}: {seconds - start:.2f} s beyond the start ({start:.2f} s); bar {NAMED_SECONDS:.0f} s")
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
        assert tree(small_project.work_root) == before
