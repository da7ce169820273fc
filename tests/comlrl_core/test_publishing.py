"""Publishing policies: agents and manifest at once."""

from pathlib import Path

import pytest

from comlrl_core import publishing
from comlrl_core.publishing import publish_policy
from comlrl_core.store import MANIFEST, Manifest, initial_manifest
from comlrl_core.team.checkpoint import digest_folder, load_team_folder
from comlrl_core.team.team import load_team


@pytest.fixture(scope="module")
def team():
    return load_team(agent_model="builtin:tiny", num_agents=2, seed=1)


def test_what_is_published_loads_and_names_its_weights(tmp_path: Path, team) -> None:
    target = tmp_path / "models" / "iteration_0000"
    published = publish_policy(target, team, initial_manifest("inputs"))
    assert published.policy == team.fingerprint() and published.inputs == "inputs"
    assert Manifest.read(target / MANIFEST) == published
    assert load_team_folder(target).fingerprint() == published.policy
    publish_policy(tmp_path / "again", team, initial_manifest("inputs"))
    assert digest_folder(tmp_path / "again") == digest_folder(target)


def test_a_failure_publishes_nothing(tmp_path: Path, team, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(publishing, "save_agents", fails)
    with pytest.raises(OSError):
        publish_policy(tmp_path / "iteration_0001", team, initial_manifest("inputs"))
    assert list(tmp_path.iterdir()) == []
