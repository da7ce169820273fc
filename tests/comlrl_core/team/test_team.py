"""The team: who its agents are, what they are asked, what they answer."""

import threading

import pytest
import torch

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.randomness import stream_key
from comlrl_core.team import team as team_module
from comlrl_core.team.agent import make_agent
from comlrl_core.team.formatters import resolve_formatters
from comlrl_core.team.generation import Generation, Sampling
from comlrl_core.team.team import Team, load_team

ROWS = [{"prompt": "a bird."}, {"prompt": "our old river"}, {"prompt": "x"}]


def key(task, agent, candidate):
    return stream_key("test", task, agent, candidate)


def answer(team, rows=ROWS, candidates=2, **options):
    return team.generate([team.prompts(row) for row in rows], candidates, Sampling(8), key, **options)


@pytest.fixture
def mixed(absolute, chat):
    """Two architectures, two tokenizers: GPT-2-like without BOS, Llama-like with BOS and a chat template."""
    agents = [make_agent(0, *absolute, "absolute"), make_agent(1, *chat, "chat")]
    return Team(agents, resolve_formatters(["{prompt}", lambda row: [{"role": "user", "content": row["prompt"]}]], 2))


def test_a_name_gives_every_agent_weights_of_its_own():
    team = load_team(agent_model="builtin:tiny", num_agents=3, seed=1)
    assert team.num_agents == len(team.unique_models) == 3
    assert team.pad_ids == [0, 0, 0]
    first, second, _ = (model.lm_head.weight for model in team.models)
    assert not torch.equal(first, second)
    with torch.no_grad():
        first.zero_()
    assert second.abs().sum() > 0


def test_the_seed_of_the_run_decides_the_initial_weights():
    assert (
        load_team(agent_model="builtin:tiny", seed=1).fingerprint()
        == load_team(agents=["builtin:tiny"] * 2, seed=1).fingerprint()
    )
    assert (
        load_team(agent_model="builtin:tiny", seed=1).fingerprint()
        != load_team(agent_model="builtin:tiny", seed=2).fingerprint()
    )


def test_counts_left_at_their_defaults_never_disagree():
    assert load_team(agent_model="builtin:tiny").num_agents == 2
    assert load_team(agents=["builtin:tiny"] * 3).num_agents == 3
    assert load_team(agents=["builtin:tiny"], num_agents=1).num_agents == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"agents": ["builtin:tiny"] * 3, "num_agents": 2}, "lists 3 models, but num_agents is 2"),
        ({"agent_model": "builtin:tiny", "agents": ["builtin:tiny"]}, "not both"),
        ({}, "not neither"),
        ({"agents": []}, "one model per agent"),
        ({"agents": "builtin:tiny"}, "one model per agent"),
        ({"agent_model": "builtin:tiny", "num_agents": 0}, "at least 1"),
        ({"agent_model": "builtin:tiny", "formatters": [None] * 3}, "3 formatters for 2 agents"),
        ({"agent_model": "builtin:tiny", "tokenizer": ["builtin:tiny"]}, "1 tokenizers for 2 agents"),
        ({"agent_model": "builtin:tiny", "devices": ["cpu"] * 3}, "3 devices for 2 agents"),
        ({"agent_model": "builtin:tiny", "on_long_prompt": "cut"}, "fail, truncate_left"),
        ({"agents": ["builtin:tiny", "/no/such/folder"]}, "/no/such/folder"),
    ],
)
def test_what_contradicts_is_refused_by_name(arguments, said):
    with pytest.raises(ConfigError, match=said):
        load_team(**arguments)


def test_a_loaded_model_is_one_agent(tiny):
    model, tokenizer = tiny
    assert load_team(agent_model=model, tokenizer=tokenizer).num_agents == 1
    with pytest.raises(ConfigError, match="num_agents is 2"):
        load_team(agent_model=model, tokenizer=tokenizer, num_agents=2)


def test_a_shared_model_given_twice_stays_one_model(tiny):
    """Pitfall 19: the same object given twice must not turn into two sets of weights (and two optimizers)."""
    model, tokenizer = tiny
    team = load_team(agents=[model, model], tokenizer=tokenizer)
    assert team.models[0] is team.models[1] is model
    assert team.unique_models == [model]
    frozen = team.copy()
    assert frozen.models[0] is frozen.models[1] is not model
    assert frozen.fingerprint() == team.fingerprint()


def test_a_copy_is_frozen_and_stays_as_it_was():
    team = load_team(agent_model="builtin:tiny")
    twin = team.copy("cpu")
    before, answers = twin.fingerprint(), answer(twin)
    assert before == team.fingerprint()
    assert not any(parameter.requires_grad for model in twin.models for parameter in model.parameters())
    assert all(parameter.requires_grad for model in team.models for parameter in model.parameters())
    with torch.no_grad():
        team.models[0].lm_head.weight.add_(1.0)
    assert twin.fingerprint() == before != team.fingerprint()
    assert answer(twin) == answers != answer(team)


def test_one_generate_call_per_agent(mixed, monkeypatch):
    calls = []

    def counted(model, *args, **kwargs):
        calls.append(model)
        return real(model, *args, **kwargs)

    real = team_module.generate
    monkeypatch.setattr(team_module, "generate", counted)
    answer(mixed, candidates=4)
    assert calls == mixed.models


def test_two_tokenizers_in_one_team(mixed):
    prompts = mixed.prompts(ROWS[0])
    assert prompts == ("a bird.", "<bos>[user] a bird.<eos>[assistant] ")
    joint = answer(mixed, candidates=3)
    assert [len(row) for row in joint] == [3, 3, 3]
    assert all(len(response) == 2 for row in joint for response in row)
    assert mixed.pad_ids == [1, 0]
    for agent in range(2):
        member = mixed.agents[agent]
        texts = [mixed.decode(response[agent].token_ids, agent) for row in joint for response in row]
        assert len(set(texts)) > 1
        assert all("<eos>" not in text and "<bos>" not in text for text in texts)
        assert member.encode_prompt(prompts[agent]).count(320) == agent


def test_ids_are_kept_as_they_were_sampled(mixed):
    """Pitfall 4: a way through text changes the ids of a random completion; the record is the ids."""
    sampled = [response[0].token_ids for row in answer(mixed, candidates=8) for response in row]
    member = mixed.agents[0]
    through_text = [tuple(member.encode_completion(member.decode(ids), finished=False)) for ids in sampled]
    assert through_text != sampled, "the fixture must show the failure"
    assert all(isinstance(token, int) for ids in sampled for token in ids)


def test_answers_do_not_depend_on_the_other_tasks_or_the_batch(mixed):
    together = answer(mixed)
    assert answer(mixed, tokens_per_batch=20) == together
    only = [mixed.prompts(ROWS[1])]
    alone = mixed.generate(only, 2, Sampling(8), lambda _, agent, k: key(1, agent, k))
    assert alone == [together[1]]


def test_repeated_calls_give_identical_answers(mixed):
    assert answer(mixed) == answer(mixed)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sampled(mixed, monkeypatch):
    """Pitfall 11: 90 + 8 tokens in a context of 96. Every prompt is checked before the first agent
    samples."""
    calls = []
    monkeypatch.setattr(team_module, "generate", lambda *args, **kwargs: calls.append(1))
    rows = [{"prompt": "x"}, {"prompt": "#" * 90}]
    with pytest.raises(DataError, match=r"task 1, agent 0: the prompt has 90 tokens and max_new_tokens is 8.*96"):
        answer(mixed, rows)
    assert not calls


def test_a_prompt_cut_from_the_left_is_counted_and_keeps_its_bos(absolute, chat):
    cut = Team([make_agent(0, *absolute, "a")], resolve_formatters(None, 1), "truncate_left")
    ids = cut.encode("#" * 50 + "%" * 50, 0, 8)
    whole = cut.agents[0].encode_prompt("#" * 50 + "%" * 50)
    assert ids == whole[-88:]
    assert cut.truncated_prompts == 1
    cut.encode("#" * 88, 0, 8)
    assert cut.truncated_prompts == 1
    with_bos = Team([make_agent(0, *chat, "c")], resolve_formatters(None, 1), "truncate_left")
    ids = with_bos.encode("#" * 300, 0, 8)  # a context of 256
    assert len(ids) == 248
    assert ids[0] == 320
    assert ids.count(320) == 1


def test_no_room_for_a_single_prompt_token_is_refused_in_any_case(absolute):
    cut = Team([make_agent(0, *absolute, "a")], resolve_formatters(None, 1), "truncate_left")
    with pytest.raises(DataError, match="shorten"):
        cut.encode("#" * 5, 0, 96)


def test_an_empty_prompt_is_refused_by_task_and_agent():
    team = load_team(agent_model="builtin:tiny")
    with pytest.raises(DataError, match="task 1, agent 0: the prompt is empty"):
        answer(team, [{"prompt": "x"}, {"prompt": ""}])
    with pytest.raises(DataError, match="task 0 has 1 prompts for 2 agents"):
        team.generate([("x",)], 1, Sampling(2), key)


def test_a_prompt_at_the_very_end_of_the_context_generates(absolute):
    team = Team([make_agent(0, *absolute, "a")], resolve_formatters(None, 1))
    joint = team.generate([("#" * 88,)], 1, Sampling(8), key)
    assert 1 <= len(joint[0][0][0].token_ids) <= 8


def test_agents_on_different_devices_answer_at_the_same_time() -> None:
    """Agents 0 and 2 share a device and take turns; agent 1 starts before agent 0 is done."""
    devices = [torch.device("cpu"), torch.device("meta"), torch.device("cpu")]
    meeting = threading.Barrier(2, timeout=30)
    order: list[int] = []

    def work(agent: int) -> list[list[Generation]]:
        if agent < 2:
            meeting.wait()  # for ever, if the second device waited for the first
        order.append(agent)
        return [[Generation((agent,), True)]]

    found = team_module._for_each(work, devices)
    assert [samples[0][0].token_ids for samples in found] == [(0,), (1,), (2,)]
    assert order.index(0) < order.index(2)
