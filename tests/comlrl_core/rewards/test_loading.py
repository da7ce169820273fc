"""Rewards by name: where they are found, what is bound, how their version changes."""

import functools
import importlib
import math
import sys
from pathlib import Path

import pytest

from comlrl_core.errors import ConfigError
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.rewards.loading import identify_reward, load_reward, source_file

SOURCE = "def score(first, second, *, bonus=0.0):\n    return [bonus + len(text) for text in second]\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    return tmp_path


def test_builtin_with_keyword_arguments_keeps_its_range() -> None:
    """Ratio 1 with low = 1.5: exp(-0.5)."""
    loaded = load_reward("builtin:length_ratio", {"low": 1.5})
    oracle = Oracle(loaded.func, 2, name=loaded.name, version=loaded.version)
    assert oracle.score([["ab"], ["cd"]], [{}], ["p"])[0].raw == pytest.approx(math.exp(-0.5))
    assert oracle.reward_range == (0.0, 1.0)
    assert oracle.label == f"length_ratio@{loaded.version}"


def test_a_file_in_the_project(project: Path) -> None:
    loaded = load_reward("my_rewards.py:score", {"bonus": 10.0}, project)
    assert loaded.func(["a"], ["bcd"]) == [13.0]
    assert loaded.name == "my_rewards.py:score"


def test_a_module_in_the_project_and_an_import_of_a_neighbour(project: Path) -> None:
    (project / "comlrl_test_neighbour.py").write_text("VALUE = 7\n")
    (project / "comlrl_test_module.py").write_text(
        "from comlrl_test_neighbour import VALUE\ndef score(a, b):\n    return [VALUE] * len(a)\n"
    )
    assert load_reward("comlrl_test_module:score", root=project).func(["a"], ["b"]) == [7]
    assert load_reward("comlrl_test_module.py:score", root=project).func(["a"], ["b"]) == [7]


def test_the_version_follows_source_and_arguments(project: Path) -> None:
    first = load_reward("my_rewards.py:score", root=project).version
    assert load_reward("my_rewards.py:score", root=project).version == first
    assert load_reward("my_rewards.py:score", {"bonus": 1.0}, project).version != first
    (project / "my_rewards.py").write_text(SOURCE.replace("second]", "first]"))
    changed = load_reward("my_rewards.py:score", root=project)
    assert changed.version != first
    assert changed.func(["abcd"], ["b"]) == [4.0]  # the new source, not what was imported before


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ("builtin:beauty", {}, "no built-in reward 'beauty'; allowed: builtin:<name> \\(length_ratio\\)"),
        ("my_rewards.py", {}, "names no function"),
        ("my_rewards.py:", {}, "names no function"),
        ("absent.py:score", {}, "no file .*absent.py"),
        ("my_rewards.py:sore", {}, "'sore' in my_rewards.py does not exist"),
        ("comlrl_no_such_module:score", {}, "importing comlrl_no_such_module raised ModuleNotFoundError"),
        ("my_rewards.py:score", {"bonsu": 1}, "does not take the keyword arguments"),
        ("my_rewards.py:score", {"batch_items": []}, "passed by the training"),
        ("my_rewards.py:score", {"bonus": math.nan}, "must be plain values"),
    ],
)
def test_what_cannot_be_loaded_is_named(project: Path, spec: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(spec, kwargs, project)


def test_a_file_that_does_not_import_says_why(project: Path) -> None:
    (project / "broken.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=r"importing .*broken.py raised SyntaxError"):
        load_reward("broken.py:score", root=project)


def test_source_file_knows_the_users_own_files(project: Path) -> None:
    assert source_file("my_rewards.py:score", project) == project / "my_rewards.py"
    assert source_file("my_rewards:score", project) == project / "my_rewards.py"
    assert source_file("builtin:length_ratio", project) is None
    assert source_file("math:sqrt", project) is None


def test_functions_given_as_objects_have_an_identity_too() -> None:
    def one(a, b):
        return [1.0]

    def two(a, b):
        return [2.0]

    assert identify_reward(one)[1] != identify_reward(two)[1]
    assert identify_reward(one) == identify_reward(one)
    assert identify_reward(max)[1] == "unversioned"


def test_one_function_has_one_name_and_version_through_every_door(project: Path) -> None:
    """An iteration file names its oracle: it must not matter whether a name or the function was given."""
    loaded = load_reward("builtin:length_ratio")
    by_module = load_reward("comlrl_core.rewards.length_ratio:length_ratio")
    assert identify_reward(length_ratio) == (loaded.name, loaded.version) == (by_module.name, by_module.version)
    assert loaded.name == "length_ratio"

    (project / "comlrl_test_doors.py").write_text(SOURCE)
    in_file = load_reward("comlrl_test_doors.py:score", root=project)
    as_module = load_reward("comlrl_test_doors:score", root=project)
    function = importlib.import_module("comlrl_test_doors").score
    assert in_file.name == "comlrl_test_doors.py:score"
    for door in (as_module[1:], identify_reward(function), identify_reward(in_file.func)):
        assert door == (in_file.name, in_file.version)


def test_bound_arguments_belong_to_the_version() -> None:
    loaded = load_reward("builtin:length_ratio", {"low": 1.5})
    assert identify_reward(functools.partial(length_ratio, low=1.5)) == (loaded.name, loaded.version)
    assert identify_reward(loaded.func) == (loaded.name, loaded.version)
    assert identify_reward(functools.partial(length_ratio, low=1.0))[1] != loaded.version
    assert identify_reward(length_ratio)[1] != loaded.version
    assert identify_reward(functools.partial(length_ratio, low=object()))[1] == "unversioned"


def test_a_helper_in_the_same_file_belongs_to_the_version(project: Path) -> None:
    helper = "def weight():\n    return {}\n\ndef score(a, b):\n    return [weight()] * len(a)\n"
    versions = []
    for value in (1, 2):
        (project / "comlrl_test_helped.py").write_text(helper.format(value))
        versions.append(identify_reward(load_reward("comlrl_test_helped.py:score", root=project).func)[1])
    assert versions[0] != versions[1]


def test_what_no_module_holds_is_known_by_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that runs holds the settings of the run too: more epochs there are no other reward."""

    class Judge:
        def __call__(self, a, b):
            return [0.0] * len(a)

    assert identify_reward(Judge())[0].endswith("Judge")
    assert identify_reward(Judge()) == identify_reward(Judge())
    assert identify_reward(lambda a, b: [0.0])[0].endswith("<lambda>")

    def score(a, b):
        return [0.0] * len(a)

    monkeypatch.setattr(score, "__module__", "__main__")
    monkeypatch.setattr(score, "__qualname__", "score")
    monkeypatch.setattr(sys.modules["__main__"], "score", score, raising=False)
    before = identify_reward(score)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    assert identify_reward(score) == before and before[0] == "__main__:score"
