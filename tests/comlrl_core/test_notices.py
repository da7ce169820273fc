"""Notices are said once per process."""

import logging

import pytest

from comlrl_core import notices


@pytest.fixture(autouse=True)
def _fresh():
    notices.forget()
    yield
    notices.forget()


def test_a_notice_is_said_once_per_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert notices.say_once("a", "first")
        assert not notices.say_once("a", "again")
        assert notices.say_once("b", "other")
    assert caplog.messages == ["first", "other"]


def test_a_message_may_hold_percent_signs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notices.say_once("percent", "100%s sure")
    assert caplog.messages == ["100%s sure"]


def test_forgetting_lets_it_be_said_again() -> None:
    assert notices.say_once("a", "first")
    notices.forget()
    assert notices.say_once("a", "first")
