"""The built-in model: what it is, and that it is the same everywhere."""

import hashlib
import subprocess
import sys

import pytest
import torch

from comlrl_core.environments.grammar import sentences
from comlrl_core.team.tiny import load_tiny

# Everything that must not differ between two processes: tokenizer, weights, samples.
SCRIPT = """
import hashlib, torch
torch.set_num_threads(1)
from comlrl_core.randomness import stream_key
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import load_team
team = load_team(agent_model="builtin:tiny", seed=7)
prompts = [("the old bird.", "a fox"), ("our river", "his quiet stone.")]
drawn = team.generate(prompts, 3, Sampling(12), lambda *parts: stream_key(*parts))
tokenizer = team.agents[0].tokenizer.backend_tokenizer.to_str()
print(hashlib.sha256(repr((team.fingerprint(), drawn, tokenizer)).encode()).hexdigest())
"""


def weights(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def test_it_is_the_documented_model(tiny):
    """Embedding 320 x 64; per layer q, o 64 x 64, k, v 64 x 32 (q, k, v biased), three 64 x 192, two norms; a
    last norm.

    20,480 + 2 (4,160 + 2 x 2,080 + 4,096 + 36,864 + 128) + 64 = 119,360, the head being tied to the
    embedding.
    """
    model, tokenizer = tiny
    assert sum(parameter.numel() for parameter in model.parameters()) == 119_360
    assert model.config.model_type == "qwen2"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(tokenizer) == 320
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_global_state_alone():
    state = torch.random.get_rng_state()
    assert weights(load_tiny(3)[0]) == weights(load_tiny(3)[0])
    assert weights(load_tiny(3)[0]) != weights(load_tiny(4)[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert load_tiny(3)[1].backend_tokenizer.to_str() == load_tiny(4)[1].backend_tokenizer.to_str()


def test_sentences_of_the_grammar_take_fewer_tokens_than_characters(tiny):
    _, tokenizer = tiny
    texts = sentences(50, seed=9)
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in texts)
    assert sum(len(tokenizer(text)["input_ids"]) for text in texts) < 0.75 * sum(map(len, texts))


@pytest.mark.slow
def test_two_processes_build_and_sample_the_same_bytes():
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.strip()) == 64
