"""The bundled task sets: enough, distinct, disjoint, repeatable."""

from collections import Counter

import pytest

from comlrl_core.environments import length_ratio, writing_prompts
from comlrl_core.errors import ConfigError


@pytest.mark.parametrize("module", [length_ratio, writing_prompts])
def test_train_and_evaluation_share_nothing_and_repeat(module) -> None:
    train, held_out = module.make_tasks(num_train=12, num_eval=6, seed=3)
    assert (len(train), len(held_out)) == (12, 6)
    for field in ("task_id", "prompt"):
        assert len({row[field] for row in train + held_out}) == 18
    assert module.make_tasks(num_train=12, num_eval=6, seed=3) == (train, held_out)
    assert module.make_tasks(num_train=12, num_eval=6, seed=4)[0] != train


@pytest.mark.parametrize("module", [length_ratio, writing_prompts])
def test_more_training_tasks_leave_the_others_as_they_are(module) -> None:
    train, held_out = module.make_tasks(num_train=5, num_eval=4, seed=0)
    more, same = module.make_tasks(num_train=9, num_eval=4, seed=0)
    assert same == held_out and more[:5] == train


@pytest.mark.parametrize("module", [length_ratio, writing_prompts])
def test_none_of_a_kind_and_impossible_numbers(module) -> None:
    assert module.make_tasks(num_train=2, num_eval=0, seed=0)[1] == []
    assert module.make_tasks(num_train=0, num_eval=0, seed=0) == ([], [])
    with pytest.raises(ConfigError, match="num_train"):
        module.make_tasks(num_train=-1, num_eval=0, seed=0)


def test_length_ratio_prompts_are_short_sentences() -> None:
    train, held_out = length_ratio.make_tasks(num_train=100, num_eval=50, seed=0)
    assert all(20 <= len(row["prompt"]) <= 50 and row["prompt"].endswith(".") for row in train + held_out)


def test_writing_prompts_are_24_of_three_kinds() -> None:
    rows = writing_prompts.writing_prompts()
    assert Counter(row["kind"] for row in rows) == {"story": 8, "summary": 8, "expansion": 8}
    assert len({row["prompt"] for row in rows}) == 24
    with pytest.raises(ConfigError, match="has 24 tasks"):
        writing_prompts.make_tasks(num_train=20, num_eval=5, seed=0)
