"""Scoring candidates: who is asked about what, in which order, and what comes back."""

import pytest

from comlrl_core.errors import RewardError
from comlrl_core.preference.candidates import Completion, JointResponse, TaskCandidates
from comlrl_core.preference.scoring import reward_distribution, score_candidates
from comlrl_core.rewards.contract import Oracle


def joint(index: int, *texts: str, source: str = "current", reward: float | None = None) -> JointResponse:
    completions = tuple(Completion(text, (1,), True) for text in texts)
    return JointResponse(index, source, completions, reward, reward)


def task(task_id: str, own: list[str], other: list[str] | None = None) -> TaskCandidates:
    return TaskCandidates(
        task_id,
        {"prompt": "p", "target": len(task_id)},
        (f"{task_id} for 1", f"{task_id} for 2"),
        [joint(i, text, text) for i, text in enumerate(own)],
        None if other is None else [joint(i, text, text, source="model") for i, text in enumerate(other)],
    )


TASKS = [task("t0", ["a", "bb"], ["ccc"]), task("t1", ["dddd"], ["eeeee", "ffffff"])]


@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
def test_every_candidate_gets_its_own_reward_whatever_the_batches(batch_size: int | None) -> None:
    """The reward is the first text's length: 1 2 | 3 and 4 | 5 6; the processor halves it."""
    sizes: list[int] = []
    oracle = Oracle(lambda first, second: [len(text) for text in first], 2, processor=lambda r: r / 2)
    scored, counts = score_candidates(TASKS, oracle, batch_size, sizes.append)
    assert [[r.raw_reward for r in t.responses] for t in scored] == [[1, 2, 3], [4, 5, 6]]
    assert [[r.reward for r in t.responses] for t in scored] == [[0.5, 1, 1.5], [2, 2.5, 3]]
    assert counts == {"scored": 6, "dropped": 0}
    assert sum(sizes) == 6 and max(sizes) <= (batch_size or 6)
    assert TASKS[0].current[0].reward is None  # the given ones stay as they are


def test_the_function_sees_rows_and_prompts_per_joint_response() -> None:
    seen = []

    def judge(first, second, batch_items, prompts):
        seen.extend(zip(first, batch_items, prompts, strict=True))
        return [0.0] * len(first)

    shared = TaskCandidates("t", {"prompt": "q"}, ("same", "same"), [joint(0, "x", "y")])
    score_candidates([TASKS[0], shared], Oracle(judge, 2), batch_size=3)
    row = {"prompt": "p", "target": 2, "task_id": "t0"}
    per_agent = ["t0 for 1", "t0 for 2"]
    assert seen == [(text, row, per_agent) for text in ("a", "bb", "ccc")] + [
        ("x", {"prompt": "q", "task_id": "t"}, "same")
    ]


def test_a_bad_reward_is_dropped_alone_or_fails_naming_the_task() -> None:
    """Pitfall 13."""

    def judge(first, second):
        return [float("nan") if text == "dddd" else 1.0 for text in first]

    with pytest.raises(RewardError, match="for task t1"):
        score_candidates(TASKS, Oracle(judge, 2))
    scored, counts = score_candidates(TASKS, Oracle(judge, 2, on_bad_reward="drop"))
    assert counts == {"scored": 6, "dropped": 1}
    assert [[r.dropped for r in t.responses] for t in scored] == [[False] * 3, [True, False, False]]
    assert [r.reward for r in scored[1].responses] == [None, 1.0, 1.0]


def test_no_candidates_is_fine() -> None:
    assert score_candidates([], Oracle(lambda a, b: [], 2)) == ([], {"scored": 0, "dropped": 0})


def test_reward_distribution_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, variance (2.25 + 0.25) / 2, quartiles interpolated at 1.75, 2.5, 3.25."""
    found = reward_distribution([joint(i, "x", reward=r) for i, r in enumerate([3.0, 1.0, 4.0, 2.0])])
    assert found == {
        "count": 4,
        "mean": 2.5,
        "std": pytest.approx(1.25**0.5),
        "min": 1.0,
        "first_quartile": 1.75,
        "median": 2.5,
        "third_quartile": 3.25,
        "max": 4.0,
    }
    one = reward_distribution([joint(0, "x", reward=2.0)])
    assert one is not None and (one["std"], one["first_quartile"], one["max"]) == (0.0, 2.0, 2.0)
    assert reward_distribution([joint(0, "x")]) is None
