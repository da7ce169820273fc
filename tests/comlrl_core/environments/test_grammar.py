"""The bundled grammar."""

from itertools import pairwise

import pytest

from comlrl_core.environments.grammar import MAX_SENTENCES, sentences


def test_sentences_are_distinct_plain_and_of_bounded_length():
    made = sentences(5000, seed=0)
    assert len(set(made)) == 5000
    assert all(text.isascii() and text.endswith(".") and 15 <= len(text) <= 90 for text in made)


def test_the_seed_decides_and_a_longer_list_begins_with_the_shorter():
    assert sentences(40, seed=1) == sentences(60, seed=1)[:40]
    assert sentences(40, seed=1) != sentences(40, seed=2)
    assert sentences(0, seed=1) == []


def test_articles_agree_with_what_follows():
    words = " ".join(sentences(3000, seed=4)).replace(".", "").split()
    pairs = list(pairwise(words))
    assert not [pair for pair in pairs if pair[0] == "a" and pair[1][0] in "aeiou"]
    assert not [pair for pair in pairs if pair[0] == "an" and pair[1][0] not in "aeiou"]


@pytest.mark.parametrize("n", [-1, MAX_SENTENCES + 1])
def test_a_number_that_cannot_be_made_is_refused(n):
    with pytest.raises(ValueError, match="number of sentences"):
        sentences(n, seed=0)
