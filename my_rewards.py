"""Your own rewards. Name one in params.yaml:   reward: {function: my_rewards.py:many_vowels}

A reward function takes one list of texts per agent (same length, one entry per joint answer) and returns one number per
joint answer. It may also ask for `batch_items` (the tasks' rows) and `prompts` by name.
"""


def many_vowels(first: list[str], second: list[str], enough: float = 0.3) -> list[float]:
    """How close the share of vowels in both answers comes to `enough`; 1 from there on."""

    def share(text: str) -> float:
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    return [min(1.0, share(a + b) / enough) for a, b in zip(first, second, strict=True)]
