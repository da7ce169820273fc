"""A small English-like grammar: as many distinct sentences as a tiny model needs, without a download.

It trains the tokenizer of the built-in tiny model and supplies the prompts of the length-ratio tasks.
"""

import numpy as np

from comlrl_core.errors import ConfigError
from comlrl_core.randomness import generator

DETERMINERS = ("the", "a", "this", "that", "every", "one", "her", "his", "our", "some")
ADJECTIVES = (
    "red", "old", "small", "quiet", "bright", "slow", "green", "tall", "warm", "lost",
    "young", "heavy", "gentle", "narrow", "golden", "empty", "proud", "silver", "broken", "curious",
)  # fmt: skip
NOUNS = (
    "river", "bird", "child", "tower", "garden", "horse", "letter", "window", "sailor", "forest",
    "stone", "teacher", "lamp", "bridge", "baker", "cloud", "fox", "village", "clock", "painter",
    "road", "winter", "boat", "song",
)  # fmt: skip
VERBS = (
    "follows", "finds", "carries", "watches", "paints", "hides", "remembers", "builds", "answers", "leaves",
    "draws", "opens", "hears", "crosses", "meets", "keeps",
)  # fmt: skip
PREPOSITIONS = ("near", "under", "behind", "above", "beside", "without", "before", "after")
ADVERBS = ("slowly", "again", "today", "alone", "gladly", "at night", "in spring", "once more")

# There are some 10^13 sentences, 4 x 10^8 of them without an ending; a draw of this many repeats few.
MAX_SENTENCES = 1_000_000


def sentences(n: int, seed: int) -> list[str]:
    """`n` distinct sentences of about 15 to 70 ASCII characters, each ending with a full stop.

    The same seed gives the same sentences, and a longer list begins with the shorter one.
    Raises `ConfigError` when `n` is negative or more than `MAX_SENTENCES`.
    """
    if not 0 <= n <= MAX_SENTENCES:
        raise ConfigError(f"the number of sentences must lie between 0 and {MAX_SENTENCES:,}, not {n}")
    rng = generator("grammar", seed)
    seen: dict[str, None] = {}
    while len(seen) < n:
        seen.setdefault(_sentence(rng))
    return list(seen)


def _sentence(rng: np.random.Generator) -> str:
    words = [_noun_phrase(rng), _pick(rng, VERBS), _noun_phrase(rng)]
    ending = rng.integers(4)
    if ending == 1:
        words.append(_pick(rng, ADVERBS))
    elif ending >= 2:
        words += [_pick(rng, PREPOSITIONS), _noun_phrase(rng)]
    return " ".join(words) + "."


def _noun_phrase(rng: np.random.Generator) -> str:
    words = [_pick(rng, DETERMINERS), _pick(rng, NOUNS)]
    if rng.integers(2):
        words.insert(1, _pick(rng, ADJECTIVES))
    if words[0] == "a" and words[1][0] in "aeiou":
        words[0] = "an"
    return " ".join(words)


def _pick(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(rng.integers(len(words)))]
