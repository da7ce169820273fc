"""Peak memory of a team of low-rank adapters on one base of 135 M parameters: N = 1 against N = 4, one update each.

    python benchmarks/adapters.py

Every size runs in a process of its own; the bar is 1.25 times the memory of one agent.
"""

import resource
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from comlrl_core.algorithms import madpo
from comlrl_core.config.lora import LoraSettings
from comlrl_core.engine.build import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.team.adapters import adapter_models
from comlrl_core.team.tiny import tiny_tokenizer

BAR = 1.25
LENGTH = 32


def base() -> LlamaForCausalLM:
    """Random weights in the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def update(agents: int) -> float:
    """Train `agents` adapters with one MADPO update; peak memory of this process in MiB."""
    torch.set_num_threads(1)
    models = adapter_models(agents, LoraSettings(), lambda: (base(), tiny_tokenizer()), list(range(agents)))
    engines = build_engines(models, OptimizerSettings(1e-4))
    ids = tuple(range(3, 3 + LENGTH // 2))
    pair = madpo.PairTokens(prompts=(ids,) * agents, winners=(ids,) * agents, losers=(ids[::-1],) * agents)
    settings = madpo.MADPOUpdateSettings(beta=0.1, train_batch_size=1)
    history = madpo.update(models, engines, [0] * agents, [pair], settings, reference=None, order=lambda _: [0])
    assert not history[0]["skipped"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    if len(sys.argv) > 1:
        print(update(int(sys.argv[1])))
        return
    peaks = {}
    for agents in (1, 4):
        done = subprocess.run([sys.executable, __file__, str(agents)], check=True, capture_output=True, text=True)
        peaks[agents] = float(done.stdout.split()[-1])
        print(f"N = {agents}: peak {peaks[agents]:,.0f} MiB", flush=True)
    ratio = peaks[4] / peaks[1]
    print(f"ratio {ratio:.2f} (bar {BAR})")
    sys.exit(ratio > BAR)


if __name__ == "__main__":
    main()
