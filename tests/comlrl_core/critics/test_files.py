"""Critics on disk: the same values and bytes again, and what is damaged is named."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from comlrl_core.critics.critic import View
from comlrl_core.critics.encoding import History
from comlrl_core.critics.files import open_critic_model, save_critics
from comlrl_core.critics.layout import HEAD_FILE, SETTINGS_FILE, check_critics, critic_folder
from comlrl_core.errors import DataError
from comlrl_core.team.checkpoint import digest_folder

KINDS = [(True, True), (False, True), (False, False)]


def values(team, critics) -> list[list[float]]:
    found = []
    for index, critic in enumerate(critics.critics):
        entry = [
            View(History(("a history.",), ()), tuple(team.encode("a history.", 0, 4))) for _ in critics.sees(index)
        ]
        found.append(critic.values(critic.encode([entry])))
    return found


@pytest.mark.parametrize(("central", "separate"), KINDS)
def test_saved_and_loaded(team, make_critics, tmp_path: Path, central: bool, separate: bool) -> None:
    critics = make_critics(central, separate, hidden_dim=6)
    with torch.no_grad():
        for critic in critics.critics:
            for parameter in critic.modules[0].parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder = save_critics(critics, tmp_path / "critic")
    again = make_critics(central, separate, folder=folder, hidden_dim=6)
    assert values(team, again) == values(team, critics)
    assert digest_folder(save_critics(again, tmp_path / "again")) == digest_folder(folder)
    check_critics(folder)
    if separate:
        place = critic_folder(folder, central, 0)
        assert not hasattr(AutoModel.from_pretrained(place), "lm_head")
        assert open_critic_model(str(place)).head.hidden_dim == 6


def damage_head(place: Path) -> str:
    (place / HEAD_FILE).write_bytes(b"torn")
    return HEAD_FILE


def damage_settings(place: Path) -> str:
    (place / SETTINGS_FILE).write_text(json.dumps({"format": 1, "hidden_dim": "six", "max_length": None}))
    return "hidden_dim"


def damage_backbone(place: Path) -> str:
    (place / "model.safetensors").write_bytes(b"")
    return "model.safetensors"


@pytest.mark.parametrize("damage", [damage_head, damage_settings, damage_backbone])
def test_damaged_critics_are_refused_by_name(make_critics, tmp_path: Path, damage) -> None:
    folder = save_critics(make_critics(central=True), tmp_path / "critic")
    name = damage(folder)
    with pytest.raises(DataError, match=name):
        check_critics(folder)
    with pytest.raises(DataError, match=name):
        make_critics(central=True, folder=folder)


def test_a_head_of_another_shape_is_refused(make_critics, tmp_path: Path) -> None:
    folder = save_critics(make_critics(central=False, separate=False, hidden_dim=6), tmp_path / "critic")
    with pytest.raises(DataError, match="do not fit"):
        make_critics(central=False, separate=False, folder=folder, hidden_dim=7)
