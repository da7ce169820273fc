"""Your own rewards. Name one in params.yaml:   reward: {function: my_rewards.py:both_polite}

A reward function takes one list of texts per agent (same length, one entry per joint answer) and returns one number per
joint answer. It may also ask for `batch_items` (the tasks' rows) and `prompts` by name.
"""


def both_polite(first: list[str], second: list[str], word: str = "please") -> list[float]:
    """Half a point for each of the two answers that contains `word`."""
    return [0.5 * (word in a.lower()) + 0.5 * (word in b.lower()) for a, b in zip(first, second, strict=True)]
