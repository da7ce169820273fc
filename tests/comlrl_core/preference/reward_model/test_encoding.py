"""How joint texts become ids. Every letter is a token of its own in the texts used here."""

import pytest

from comlrl_core.errors import DataError
from comlrl_core.preference.reward_model.encoding import JointText, task_of
from comlrl_core.team.tiny import tiny_tokenizer

END = 1


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_every_agent_in_turn_with_an_end_mark_after_each_response(encoder) -> None:
    found = encoder().encode([JointText(("ab", "c"), ("XY", "Z"))])
    assert found == [(*ids("ab"), *ids("XY"), END, *ids("c"), *ids("Z"), END)]


def test_an_empty_response_is_a_response(encoder) -> None:
    assert encoder().encode([JointText(("ab", "c"), ("", "Z"))]) == [(*ids("ab"), END, *ids("c"), *ids("Z"), END)]


def test_truncation_cuts_the_last_agents_answer(encoder) -> None:
    """Prompts of 6 and 3 tokens, responses of 2 and 2, two end marks: 15. With 10, the prompts keep 4: two each."""
    text = JointText(("QWXZKJ", "QXZ"), ("XY", "ZK"))
    assert [len(ids(part)) for part in (*text.prompts, *text.responses)] == [6, 3, 2, 2]
    cut = encoder(10).encode([text])[0]
    assert cut == (*ids("KJ"), *ids("XY"), END, *ids("XZ"), *ids("ZK"), END)
    # With 13 they keep 7: the shorter one whole, 4 of the longer.
    assert encoder(13).encode([text])[0] == (*ids("XZKJ"), *ids("XY"), END, *ids("QXZ"), *ids("ZK"), END)
    # With 6 there is room for the responses alone, with 5 not even for these.
    assert encoder(6).encode([text])[0] == (*ids("XY"), END, *ids("ZK"), END)
    assert encoder(5).encode([text])[0] is None


def test_both_sides_equal_and_the_loss_sits_at_ln_2(encoder, pair) -> None:
    """Sides that a tokenizer cannot tell apart, and responses that do not fit, are dropped and counted."""
    kept = pair("t", ("X", "Z"), ("Z", "X"))
    long = pair("t", ("X" * 40, "Z"), ("Z", "X"))
    found = encoder(40).encode_pairs([kept, long])
    assert [p.task for p in found.pairs] == ["t"]
    assert found.dropped == {"too_long": 1, "equal_sides": 0}

    lossy = encoder(40)
    object.__setattr__(lossy, "tokenizer", _Lowercase())
    found = lossy.encode_pairs([pair("t", ("AB", "c"), ("ab", "c")), kept])
    assert found.dropped == {"too_long": 0, "equal_sides": 1}
    assert len(found.pairs) == 1


class _Lowercase:
    """A tokenizer that does not know capitals."""

    def __call__(self, texts, **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(ids(text.lower())) for text in texts]}


def test_one_bos_whether_a_template_wrote_it_or_not(encoder) -> None:
    bos = ids("B")
    with_mark = encoder(prefix_ids=bos)
    plain = with_mark.encode([JointText(("ab", "c"), ("X", "Z"))])[0]
    assert plain == (*bos, *ids("ab"), *ids("X"), END, *ids("c"), *ids("Z"), END)
    assert with_mark.encode([JointText(("Bab", "c"), ("X", "Z"))])[0] == plain


def test_cutting_keeps_the_bos(encoder) -> None:
    bos = ids("B")
    cut = encoder(7, prefix_ids=bos).encode([JointText(("QW", "XZ"), ("X", "Z"))])[0]
    assert cut == (*bos, *ids("W"), *ids("X"), END, *ids("Z"), *ids("Z"), END)


def test_another_number_of_agents_is_refused(encoder) -> None:
    with pytest.raises(DataError, match="those of 2 agents"):
        encoder().encode([JointText(("a",), ("b",))])


def test_a_record_without_a_task_id_is_known_by_its_prompts(pair) -> None:
    from dataclasses import replace

    record = pair("t", ("X", "Z"), ("Z", "X"))
    assert task_of(record) == "t"
    assert task_of(replace(record, task_id=None)) == "[0] t\n\0[1] t\n"
