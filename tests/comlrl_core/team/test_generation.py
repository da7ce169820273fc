"""Sampling: the same tokens in any batch, the model's own distribution, an end at every EOS."""

import random

import pytest
import torch

from comlrl_core.errors import ConfigError, DataError, TrainingError
from comlrl_core.randomness import stream_key
from comlrl_core.team import generation
from comlrl_core.team.generation import Generation, Sampling, choose_tokens, generate
from comlrl_core.team.scoring import score_completions

LENGTHS = (3, 11, 6, 1, 11, 8, 2)
# A tenth of the vocabulary ends a sequence here, so that completions of random models stop at all lengths.
MANY_EOS = tuple(range(1, 320, 10))


def prompts(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, 320) for _ in range(length)] for length in lengths]


def stream_keys(num_prompts, num_samples):
    return [[stream_key(p, k) for k in range(num_samples)] for p in range(num_prompts)]


def sample(model, prompt_ids=None, num_samples=3, max_new_tokens=20, eos_ids=MANY_EOS, **options):
    prompt_ids = prompts() if prompt_ids is None else prompt_ids
    sampling = options.pop("sampling", Sampling(max_new_tokens))
    keys = options.pop("keys", stream_keys(len(prompt_ids), num_samples))
    return generate(
        model,
        prompt_ids,
        num_samples=num_samples,
        sampling=sampling,
        keys=keys,
        eos_ids=eos_ids,
        pad_id=0,
        **options,
    )


def alone(model, **options):
    """Every sample in a call of its own, with its own key."""
    all_prompts = prompts()
    return [
        [sample(model, [ids], 1, keys=[[stream_key(p, k)]], **options)[0][0] for k in range(3)]
        for p, ids in enumerate(all_prompts)
    ]


@pytest.mark.parametrize("tokens_per_batch", [None, 1, 70, 200])
def test_a_sample_alone_equals_the_sample_in_a_batch(any_model, tokens_per_batch):
    """Pitfall 7 on the sampling side: without positions, models with absolute ones sample otherwise under
    padding."""
    batched = sample(any_model, tokens_per_batch=tokens_per_batch)
    assert batched == alone(any_model)
    lengths = {len(one.token_ids) for row in batched for one in row}
    assert len(lengths) > 4, "the samples must end at different steps for this test to mean anything"


@pytest.mark.parametrize("share", [0.01, 0.5, 2.0])
def test_rows_that_leave_do_not_disturb_those_that_stay(any_model, monkeypatch, share):
    expected = sample(any_model)
    monkeypatch.setattr(generation, "COMPACT_SHARE", share)
    assert sample(any_model) == expected


def test_a_sample_depends_on_its_key_and_prompt_not_on_the_order_of_the_batch(any_model):
    forward = sample(any_model)
    backward = sample(any_model, prompts()[::-1], keys=stream_keys(len(LENGTHS), 3)[::-1])
    assert backward == forward[::-1]


@pytest.mark.parametrize("eos_ids", [(1,), MANY_EOS])
def test_greedy_equals_generate_of_transformers_under_left_padding(any_model, eos_ids):
    prompt_ids = prompts()
    width = max(LENGTHS)
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompt_ids])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    theirs = any_model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=list(eos_ids),
        pad_token_id=0,
    )
    ours = sample(any_model, num_samples=1, eos_ids=eos_ids, sampling=Sampling(20, temperature=0.0))
    for row, (one,) in zip(theirs[:, width:].tolist(), ours, strict=True):
        assert list(one.token_ids) == row[: len(one.token_ids)]
        assert one.finished == (one.token_ids[-1] in eos_ids)
        assert one.finished or len(one.token_ids) == 20


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1, temperature=1.0), 321),
        (Sampling(1, temperature=1.7), 321),
        (Sampling(1, temperature=2.5, top_k=7), 7),
        (Sampling(1, temperature=2.5, top_p=0.6), None),
    ],
)
def test_first_tokens_follow_the_softmax_of_the_logits_at_the_temperature(chat, sampling, allowed):
    """Pearson's chi-square of 6,000 first tokens against softmax(logits / T), truncated and renormalised by
    hand.

    Classes that expect fewer than five tokens are one class. A statistic of df + 5 sqrt(2 df) lies five
    standard deviations above its mean: a right sampler exceeds it about once in a million seeds.
    """
    (model, _), ids, n = chat, prompts((5,))[0], 6000
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / sampling.temperature
    expected = logits.softmax(-1)
    order = expected.argsort(descending=True)
    if sampling.top_k is not None:
        expected[order[sampling.top_k :]] = 0.0
    if sampling.top_p < 1.0:
        allowed = int((expected[order].cumsum(-1) < sampling.top_p).sum()) + 1
        assert 1 < allowed < 200
        expected[order[allowed:]] = 0.0
    expected = expected / expected.sum() * n
    drawn = sample(model, [ids], n, sampling=sampling, eos_ids=())[0]
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in drawn]), minlength=321).double()
    assert counts[expected == 0].sum() == 0
    assert int((counts > 0).sum()) <= allowed
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


def chi_square(counts, expected):
    """Pearson's statistic, and what it stays below if the counts are of that distribution."""
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().reshape(1)])
    wanted = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert freedom > 2
    return float(((observed - wanted) ** 2 / wanted).sum()), freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampling_at_one_temperature_and_scoring_at_another(chat, temperature):
    """Pitfall 9: first tokens have the probabilities that they are scored with for the policy's loss, and no others."""
    (model, _), ids, n = chat, prompts((5,))[0], 6000
    drawn = sample(model, [ids], n, sampling=Sampling(1, temperature=temperature), eos_ids=())[0]
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in drawn]), minlength=321).double()

    def scored(at):
        with torch.inference_mode():
            every, _ = score_completions(
                model, [ids] * 321, [[token] for token in range(321)], pad_id=0, temperature=at
            )
        return every[:, 0].double().exp() * n

    statistic, limit = chi_square(counts, scored(temperature))
    assert statistic < limit
    other, limit = chi_square(counts, scored(temperature * 1.5))
    assert other > 2 * limit


def choose(probabilities, uniform, **options):
    logits = torch.tensor([probabilities], dtype=torch.float64).log().expand(len(uniform), -1)
    return choose_tokens(logits, torch.tensor(uniform, dtype=torch.float64), Sampling(1, **options)).tolist()


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    """Cumulative: 0.5, 0.75, 1. Zero-probability tokens are never drawn, not even by 0 or by the last number
    below 1."""
    assert choose([0.5, 0.25, 0.25], [0.0, 0.49, 0.51, 0.74, 0.76, 0.999]) == [0, 0, 1, 1, 2, 2]
    below_one = 1.0 - 2.0**-53
    assert choose([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.49, 0.51, below_one]) == [1, 1, 3, 3]


def test_truncation_keeps_the_most_likely_and_renormalises():
    """top_k=2 of (.2, .5, .3) leaves (.5, .3): cumulative .625, 1. top_p=.5 is reached by the first token
    alone, .51 needs two, and temperature comes first: at T = 0.5 the squares (.04, .25, .09) / .38 give the
    first .658.
    """
    thirds = [0.2, 0.5, 0.3]
    assert choose(thirds, [0.0, 0.62, 0.63, 0.999], top_k=2) == [1, 1, 2, 2]
    assert choose(thirds, [0.0, 0.999], top_k=1) == [1, 1]
    assert choose(thirds, [0.0, 0.19, 0.21, 0.999], top_k=99) == [0, 0, 1, 2]
    assert choose(thirds, [0.0, 0.62, 0.63, 0.999], top_p=0.51) == [1, 1, 2, 2]
    assert choose(thirds, [0.0, 0.999], top_p=0.49) == [1, 1]
    assert choose(thirds, [0.0, 0.999], top_p=0.65, temperature=0.5) == [1, 1]
    assert choose(thirds, [0.0, 0.72, 0.74], top_p=0.67, temperature=0.5) == [1, 1, 2]


def test_a_large_vocabulary_is_sampled_in_parts_with_the_same_result(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=generator)
    uniform = torch.rand(9, dtype=torch.float64, generator=generator)
    whole = choose_tokens(logits, uniform, Sampling(1))
    monkeypatch.setattr(generation, "CPU_ELEMENTS", 120)
    assert torch.equal(choose_tokens(logits, uniform, Sampling(1)), whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_with_nan_stop_the_sampling(tiny, temperature):
    model, _ = tiny
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(TrainingError, match="not finite"):
        sample(model, sampling=Sampling(4, temperature=temperature))


def test_pad_equal_to_eos_keeps_the_eos_in_the_record(any_model):
    """Pitfall 1: the ids end with the first EOS, and none is lost because it looks like padding."""
    ended = [one for row in sample(any_model, eos_ids=(0, *MANY_EOS)) for one in row if one.finished]
    assert ended
    for one in ended:
        assert one.token_ids[-1] in (0, *MANY_EOS)
        assert not set(one.token_ids[:-1]) & {0, *MANY_EOS}


def test_every_one_of_several_eos_ids_ends_a_sequence(any_model):
    """Pitfall 5: only the first declared EOS ended a sequence, all else counted as cut off."""
    last = {one.token_ids[-1] for row in sample(any_model, num_samples=20) for one in row if one.finished}
    assert len(last) > 3
    assert last <= set(MANY_EOS)


def test_eos_and_pad_inside_a_prompt_belong_to_the_prompt(any_model):
    """Pitfall 6: a chat prompt contains EOS after every turn; the completion starts after the prompt all the
    same."""
    prompt_ids = [[5, 0, 1, 7, 1], [0, 9, 11, 0, 13, 1, 1, 0]]
    together = sample(any_model, prompt_ids)
    for p, ids in enumerate(prompt_ids):
        assert sample(any_model, [ids], keys=[stream_keys(2, 3)[p]])[0] == together[p]
    plain = sample(any_model, [[5, 2, 2, 7, 2], prompt_ids[1]])
    assert plain[0] != together[0], "the ids of the prompt are read, not masked"


def test_dropout_is_off_and_the_mode_of_every_module_is_left_as_it_was(absolute):
    """Pitfall 10: with dropout on, two calls of the same streams would differ."""
    model, _ = absolute
    expected = sample(model)
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    assert sample(model) == expected
    assert sample(model) == expected
    assert [module.training for module in model.modules()] == modes


def test_neither_the_global_random_state_nor_the_gradients_are_touched(tiny):
    model, _ = tiny
    state = torch.random.get_rng_state()
    sample(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss
    loss.backward()  # nothing of the sampling mode stays in the model


def test_prompts_are_read_once_and_finished_rows_leave(any_model, monkeypatch):
    """7 prompts with 3 samples: one forward over the 7 prompts, then steps of 21 rows and less, one column
    each."""
    shapes = []
    any_model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    sample(any_model)
    rows = [shape[0] for shape in shapes[1:]]
    assert shapes[0] == (7, max(LENGTHS))
    assert all(shape[1] == 1 for shape in shapes[1:])
    assert rows[0] <= 21
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 21
    assert len(set(rows)) <= 12, "rows leave in groups: from 21 to 1 by quarters is at most 12 sizes"


def test_no_forward_is_spent_on_a_token_that_nobody_reads(any_model):
    calls = []
    any_model.register_forward_pre_hook(lambda _, args: calls.append(1))
    sample(any_model, eos_ids=(), max_new_tokens=5)
    assert len(calls) == 5


def test_progress_counts_every_sample_once(any_model):
    told = []
    sample(any_model, on_progress=told.append, tokens_per_batch=100)
    assert sum(told) == 21
    assert all(n > 0 for n in told)


def test_different_keys_give_different_samples_and_equal_keys_equal_ones(tiny):
    model, _ = tiny
    first, second, third = sample(model, [[7, 8]], 3, keys=[[1, 2, 1]])[0]
    assert first == third
    assert first != second


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 7.0}, "top_p"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_impossible_sampling_settings_are_refused_by_name(options, named):
    """Pitfall 35: temperature -1 or top_p 7 failed an hour later or never."""
    with pytest.raises(ConfigError, match=named):
        Sampling(**{"max_new_tokens": 4, **options})


def test_bad_calls_are_refused(tiny):
    model, _ = tiny
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        sample(model, [[3], []])
    with pytest.raises(ConfigError, match="tokens_per_batch"):
        sample(model, tokens_per_batch=0)
    with pytest.raises(ConfigError, match="number of samples"):
        sample(model, num_samples=0)
    with pytest.raises(ValueError, match="keys must be"):
        sample(model, [[3]], 2, keys=[[1]])
    assert sample(model, []) == []


def test_a_finished_completion_of_one_token_is_its_eos(tiny):
    model, _ = tiny
    drawn = sample(model, eos_ids=tuple(range(320)))
    assert all(len(one.token_ids) == 1 and one.finished for row in drawn for one in row)
    assert isinstance(drawn[0][0], Generation)
