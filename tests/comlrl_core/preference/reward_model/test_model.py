"""Scores: where they are read, and that they depend on the text alone."""

import pytest
import torch

from comlrl_core.errors import ConfigError
from comlrl_core.preference.reward_model import JointText, open_reward_model
from comlrl_core.rl.masks import length_mask

TEXTS = [
    JointText(("the red bird\n", "b\n"), ("sings.", "a song")),
    JointText(("a\n", "c\n"), ("", "x")),
    JointText(("one\n", "two\n"), ("every old river follows the road.", "no")),
]


def test_score_depends_on_batch_or_padding_side(any_model) -> None:
    """Alone, together, in small batches and padded on either side: the same to 1e-5."""
    encoded = [ids for ids in any_model.encoder.encode(TEXTS) if ids is not None]
    alone = [any_model.score_ids([ids])[0] for ids in encoded]
    assert max(alone) - min(alone) > 1e-2
    assert any_model.score_ids(encoded) == pytest.approx(alone, abs=1e-5)
    assert any_model.score_ids(encoded, tokens_per_batch=60) == pytest.approx(alone, abs=1e-5)
    assert any_model.score(list(reversed(TEXTS))) == pytest.approx(alone[::-1], abs=1e-5)
    for side in ("right", "left"):
        with torch.no_grad():
            assert any_model.eval()(*any_model.batch(encoded, side)).tolist() == pytest.approx(alone, abs=1e-5)


def test_what_fills_the_batch_does_not_count(tiny) -> None:
    sequence = tiny.encoder.encode(TEXTS)[0]
    assert sequence is not None
    input_ids = torch.tensor([[*sequence, 7, 1, 0]])
    with torch.no_grad():
        padded = tiny(input_ids, length_mask(torch.tensor([len(sequence)]), input_ids.shape[1]))
    assert padded.item() == pytest.approx(tiny.score_ids([sequence])[0], abs=1e-6)


def test_score_is_the_head_at_the_last_real_token(tiny) -> None:
    sequence = tiny.encoder.encode(TEXTS)[0]
    assert sequence is not None
    with torch.no_grad():
        hidden = tiny.backbone(torch.tensor([sequence])).last_hidden_state[0, -1]
        expected = (hidden @ tiny.head.weight[0]).item()
        assert tiny.score_ids([sequence]) == pytest.approx([expected], abs=1e-6)
        tiny.shift.fill_(0.5)
        assert tiny.score_ids([sequence]) == pytest.approx([expected - 0.5], abs=1e-6)


def test_head_stays_in_fp32() -> None:
    model = open_reward_model("builtin:tiny", 2, model_config={"dtype": "bfloat16"})
    assert model.backbone.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert model(*model.batch([(5, 6, 7)])).dtype == torch.float32


def test_responses_that_do_not_fit_have_no_score() -> None:
    model = open_reward_model("builtin:tiny", 2, max_length=30)
    scores = model.score([JointText(("a", "b"), ("c", "d")), JointText(("a", "b"), ("X" * 40, "d"))])
    assert scores[0] is not None and scores[1] is None


def test_seeds() -> None:
    first = open_reward_model("builtin:tiny", 2, seed=1, head_seed=2)
    assert open_reward_model("builtin:tiny", 2, seed=1, head_seed=2).fingerprint() == first.fingerprint()
    other = open_reward_model("builtin:tiny", 2, seed=1, head_seed=3)
    assert torch.equal(other.backbone.norm.weight, first.backbone.norm.weight)
    assert not torch.equal(other.head.weight, first.head.weight)


def test_no_language_model_head(tiny) -> None:
    assert type(tiny.backbone).__name__ == "Qwen2Model"
    assert [name for name, _ in tiny.named_parameters() if "lm_head" in name] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 2000}, "reward_max_length 2000 is above"),
        ({"max_length": 3}, "reward_max_length 3 is too short"),
        ({"num_agents": 0}, "at least one agent"),
        ({"source": "no/such/folder/here"}, "there is no model folder"),
        ({"source": "builtin:huge"}, "there is no model 'builtin:huge'"),
    ],
)
def test_refuses_by_name(arguments: dict, message: str) -> None:
    given = {"source": "builtin:tiny", "num_agents": 2, **arguments}
    with pytest.raises(ConfigError, match=message):
        open_reward_model(given.pop("source"), given.pop("num_agents"), **given)
