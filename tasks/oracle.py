"""The reward function that a job's settings name; without PyTorch, so that it is checked before anything is loaded."""

import math

from comlrl_core.errors import ConfigError
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.loading import load_reward
from tasks.job import Job


def oracle(job: Job) -> Oracle:
    """The reward function of the settings, checked against the number of agents."""
    reward = job.config.reward
    loaded = load_reward(reward.function, reward.kwargs, job.source_root, "reward.function")
    processor = (
        load_reward(reward.processor, None, job.source_root, "reward.processor").func if reward.processor else None
    )
    try:
        made = Oracle(
            loaded.func,
            job.config.training.num_agents,
            processor=processor,
            on_bad_reward=job.config.training.on_bad_reward,
            name=loaded.name,
            version=loaded.version,
        )
    except ConfigError as error:
        field = "reward.processor" if str(error).startswith("reward_processor") else "reward.function"
        raise ConfigError(f"{field}: {str(error).removeprefix('reward_processor: ')}") from error
    if getattr(job.config.training, "log_reward_distribution", False) and not _is_range(made.reward_range):
        raise ConfigError(
            f"training.log_reward_distribution needs {made.name}.reward_range, a pair (lowest, highest), "
            f"not {made.reward_range!r}"
        )
    return made


def _is_range(value: object) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in value)
    return numbers and value[0] < value[1]
