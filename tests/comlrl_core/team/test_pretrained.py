"""The pre-trained tiny model, with a recipe of two steps."""

import logging
from pathlib import Path

import pytest
import torch

from comlrl_core.team import pretrained
from comlrl_core.team.loading import load_model_and_tokenizer


@pytest.fixture(autouse=True)
def _short_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "STEPS", 2)
    monkeypatch.setattr(pretrained, "CORPUS_SENTENCES", 100)
    monkeypatch.setattr(pretrained, "BATCH_SIZE", 2)


def weights() -> dict[str, torch.Tensor]:
    return load_model_and_tokenizer("builtin:tiny-pretrained")[0].state_dict()


def test_made_once_and_read_again_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = weights()
    (kept,) = (tmp_path / "comlrl").iterdir()
    monkeypatch.setattr(pretrained, "_pretrain", lambda *_: pytest.fail("it is in the cache"))
    second = weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert kept.name.startswith("tiny-pretrained-")


def test_made_again_it_is_the_same_whatever_the_random_state(tmp_path: Path) -> None:
    first = weights()
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])  # torn: not used
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    second = weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_another_recipe_is_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights()
    monkeypatch.setattr(pretrained, "STEPS", 1)
    weights()
    assert len(list((tmp_path / "comlrl").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_must(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert weights()
    assert "is not kept there" in caplog.text


@pytest.mark.slow
def test_the_real_recipe_learns_the_grammar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """From ln 320 = 5.8 to below 1.3 per token."""
    monkeypatch.undo()
    model, tokenizer = pretrained.load_tiny(0)
    with caplog.at_level(logging.INFO):
        pretrained._pretrain(model, tokenizer)
    assert float(caplog.text.split("loss ")[1].split()[0]) < 1.3
