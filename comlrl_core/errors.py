"""The errors that a user can cause and repair.

Each message names the file, field or setting at fault and what is allowed there. The command line prints the message
alone and ends with exit code 2; anything that is not a `ComlrlError` is a defect and keeps its traceback.
"""


class ComlrlError(Exception):
    """Base of every error that says what the user can do about it."""


class ConfigError(ComlrlError, ValueError):
    """A setting is unknown, out of bounds or contradicts another one."""


class DataError(ComlrlError, ValueError):
    """A file or record is missing, torn, foreign or holds a wrong value."""


class RewardError(ComlrlError, RuntimeError):
    """A reward function raised, or returned something that is not one number per joint response."""


class TransitionError(ComlrlError, RuntimeError):
    """A transition between turns raised, or returned something that is not one prompt per agent."""


class TrainingError(ComlrlError, RuntimeError):
    """An update could not be computed (a non-finite loss, for instance)."""
