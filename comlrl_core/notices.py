"""Things a user should hear once per process, not once per batch."""

import logging

logger = logging.getLogger(__name__)
_said: set[str] = set()


def say_once(key: str, message: str) -> bool:
    """Log `message` as a warning the first time `key` is seen; returns whether it was said now."""
    if key in _said:
        return False
    _said.add(key)
    logger.warning(message)
    return True


def forget() -> None:
    """Let every notice be said again (a new run in the same process, a test)."""
    _said.clear()
