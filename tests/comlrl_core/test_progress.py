"""The progress bar: late, and silent on request."""

import pytest

from comlrl_core import progress as module


def test_a_bar_appears_once_the_work_takes_long(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMLRL_PROGRESS", "1")
    with module.progress("short work", 2, "step") as bar:
        bar.update(2)
    assert "short work" not in capsys.readouterr().err
    monkeypatch.setattr(module, "SHOW_AFTER_SECONDS", 0.0)
    with module.progress("long work", 2, "step") as bar:
        bar.update(2)
    assert "long work" in capsys.readouterr().err


def test_a_variable_switches_bars_off(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMLRL_PROGRESS", "0")
    monkeypatch.setattr(module, "SHOW_AFTER_SECONDS", 0.0)
    with module.progress("long work", None, "step") as bar:
        bar.update(2)
    assert capsys.readouterr().err == ""
