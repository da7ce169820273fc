"""Histories as ids: order of turns and agents, the BOS, and what goes where they are too long."""

from comlrl_core.critics.encoding import History, HistoryEncoder
from comlrl_core.team.tiny import tiny_tokenizer

END = (1,)


def encoder(max_length: int | None = None, prefix: tuple[int, ...] = ()) -> HistoryEncoder:
    return HistoryEncoder(tiny_tokenizer(), prefix, END, max_length)


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_turn_after_turn_and_agent_after_agent() -> None:
    first = History(("ab", "cd"), ("x",))  # the second prompt is not answered yet
    second = History(("ef", "gh"), ("y", "z"))
    (found,) = encoder(prefix=(7,)).encode([[first, second]])
    parts = [ids("ab"), ids("x"), END, ids("cd"), END, ids("ef"), ids("y"), END, ids("gh"), ids("z"), END]
    assert found == (7, *(token for part in parts for token in part))


def test_a_prompt_that_begins_with_the_prefix_has_it_once() -> None:
    (found,) = encoder(prefix=ids("a")).encode([[History(("ab",), ())]])
    assert found == (*ids("ab"), *END) and ids("ab")[:1] == ids("a")


def test_what_is_too_long_loses_the_oldest_tokens_of_its_prompts() -> None:
    history = History(("0123456789",), ("xyz",))
    (whole,) = encoder().encode([[history]])
    (cut,) = encoder(max_length=len(whole) - 4).encode([[history]])
    assert cut == whole[4:]
    both = encoder(max_length=10).encode([[History(("01234567",), ("x",)), History(("ab",), ("y",))]])[0]
    assert len(both) == 10 and both[-4:] == (*ids("ab"), *ids("y"), *END)  # the longer prompt was cut, not the short


def test_responses_that_do_not_fit_keep_their_end() -> None:
    (found,) = encoder(max_length=8).encode([[History(("prompt",), ("0123456789",))]])
    assert found == (*ids("3456789"), *END)
