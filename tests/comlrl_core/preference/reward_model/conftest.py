"""Reward models of a size for tests, and pairs in which the longer second answer wins."""

from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from comlrl_core import notices
from comlrl_core.engine.local import LocalEngine
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import JointRewardModel, open_reward_model
from comlrl_core.preference.reward_model.encoding import JointEncoder
from comlrl_core.team.tiny import tiny_tokenizer

torch.set_num_threads(1)

WORDS = ("bird", "song", "road", "fox", "boat", "lamp", "stone", "winter")


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.fixture
def tiny() -> JointRewardModel:
    return open_reward_model("builtin:tiny", 2)


@pytest.fixture(params=["absolute", "rotary"])
def any_model(request: pytest.FixtureRequest) -> JointRewardModel:
    """GPT-2 with dropout and pad = eos, and Llama; wide weights, so that a difference would show."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    if request.param == "absolute":
        tokenizer.pad_token = tokenizer.eos_token
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=320, n_positions=96, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, eos_token_id=1
            )
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=320,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=96,
                initializer_range=0.3,
                bos_token_id=None,
                eos_token_id=1,
                pad_token_id=0,
            )
        )
    return open_reward_model(model.train(), 2, tokenizer=tokenizer)


@pytest.fixture
def encoder() -> Callable[..., JointEncoder]:
    """`encoder(max_length, num_agents=2, prefix_ids=())` over the tiny tokenizer, end mark 1."""

    def make(max_length: int | None = None, num_agents: int = 2, prefix_ids: tuple[int, ...] = ()) -> JointEncoder:
        return JointEncoder(tiny_tokenizer(), num_agents, prefix_ids, (1,), max_length)

    return make


def pair(task: str, winner: tuple[str, ...], loser: tuple[str, ...], prompts: tuple[str, ...] | None = None):
    """A record of one pair."""
    return PairRecord(
        prompts=prompts or tuple(f"[{agent}] {task}\n" for agent in range(len(winner))),
        winner_completions=winner,
        loser_completions=loser,
        winner_reward=1.0,
        loser_reward=0.0,
        candidate_reward_mean=0.5,
        task_id=task,
    )


@pytest.fixture(name="pair")
def pair_fixture() -> Callable[..., PairRecord]:
    return pair


@pytest.fixture
def records() -> list[PairRecord]:
    """48 pairs of 24 tasks: the winner's second answer is long, the loser's short."""
    return [
        pair(
            f"task {number % 24}",
            (WORDS[number % 8], f"the {WORDS[number % 7]} meets the old {WORDS[number % 5]}."),
            (WORDS[number % 8], WORDS[number % 3]),
        )
        for number in range(48)
    ]


@pytest.fixture
def make_engine() -> Callable[..., Callable[[JointRewardModel], LocalEngine]]:
    """`make_engine(lr)`: what `fit` takes."""
    return lambda learning_rate=3e-3: lambda model: LocalEngine(model, OptimizerSettings(learning_rate))
