"""Collection and update against bare Transformers calls that process the same tokens, in one process.

    OMP_NUM_THREADS=1 python benchmarks/floor.py [--repeats 3] [--model 0.1M|12M]

Collection: 64 tasks x 2 agents x 8 candidates x 32 tokens, against `model.generate` on the same prompts, all rows of an
agent in one call. Update: 256 pairs of 2 agents, against forward, log-softmax and backward of the same padded batches.
Prints the best of the repeats and their ratio (ours / bare); the growth of memory is that of the process so far.
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comlrl_core.algorithms.madpo import MADPOUpdateSettings, PairTokens, update
from comlrl_core.engine.local import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.environments.length_ratio import make_tasks
from comlrl_core.preference.collection import collect
from comlrl_core.team.agent import Agent
from comlrl_core.team.generation import Sampling
from comlrl_core.team.team import Team
from comlrl_core.team.tiny import load_tiny

TASKS, CANDIDATES, NEW_TOKENS, PAIRS, BATCH = 64, 8, 32, 256, 16
SIZES = {
    "12M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6,
            "intermediate_size": 1152, "vocab_size": 2000},
}  # fmt: skip


def make_team(size: str) -> Team:
    """Two agents; nothing ends a sequence, so that both sides of a comparison process the same tokens."""
    agents = []
    for index in range(2):
        model, tokenizer = load_tiny(index)
        if size in SIZES:
            torch.manual_seed(index)
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES[size], tie_word_embeddings=True)).eval()
        agents.append(Agent(index, model, tokenizer, size, (), tokenizer.pad_token_id, None))
    return Team(agents, [lambda row: row["prompt"]] * 2)


def collection(team: Team) -> tuple[Callable[[], object], Callable[[], object]]:
    """(ours, bare) collection of the same tasks."""
    tasks, _ = make_tasks(TASKS, 1)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)

    def ours() -> object:
        return collect(team, None, tasks, num_candidates=CANDIDATES, sampling=sampling, seed=0, iteration=1)

    def bare() -> object:
        for agent in team.agents:
            prompts = [agent.encode_prompt(task["prompt"]) for task in tasks for _ in range(CANDIDATES)]
            ids, mask = left_padded(prompts, agent.pad_id)
            with torch.inference_mode():
                agent.model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=agent.pad_id, eos_token_id=None,
                )  # fmt: skip
        return None

    return ours, bare


def left_padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, L]`."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def update_pair(team: Team) -> tuple[Callable[[], object], Callable[[], object]]:
    """(ours, bare) update on the same pairs."""
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())

    def pair() -> PairTokens:
        prompts = (ids(12, 24), ids(12, 24))
        return PairTokens(prompts, (ids(16, 33), ids(16, 33)), (ids(16, 33), ids(16, 33)))

    pairs = [pair() for _ in range(PAIRS)]
    settings = MADPOUpdateSettings(train_batch_size=BATCH)
    engines = build_engines(team.models, OptimizerSettings(learning_rate=1e-4))

    def ours() -> object:
        order = range(PAIRS)
        return update(
            team.models, engines, team.pad_ids, pairs, settings, reference=None, order=lambda epoch: list(order)
        )

    def bare() -> object:
        for start in range(0, PAIRS, BATCH):
            chunk = pairs[start : start + BATCH]
            for index, model in enumerate(team.models):
                rows = [list(p.prompts[index] + p.winners[index]) for p in chunk]
                rows += [list(p.prompts[index] + p.losers[index]) for p in chunk]
                forward_backward(model, rows, team.pad_ids[index])
        return None

    return ours, bare


def forward_backward(model: PreTrainedModel, rows: list[list[int]], pad: int) -> None:
    """Log-probabilities of all tokens by a full log-softmax, and a backward pass."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    chosen = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    (chosen * mask[:, 1:]).sum().backward()
    model.zero_grad(set_to_none=True)


def best_of(runs: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    runs()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        runs()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=["0.1M", *SIZES], action="append")
    options = parser.parse_args()
    for size in options.model or ["0.1M", *SIZES]:
        team = make_team(size)
        parameters = sum(p.numel() for p in team.models[0].parameters()) / 1e6
        for what, make in (("collection", collection), ("update", update_pair)):
            ours, bare = make(team)
            bare_seconds, our_seconds = best_of(bare, options.repeats), best_of(ours, options.repeats)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{parameters:5.2f} M {what:10}  ours {our_seconds:7.2f} s  bare {bare_seconds:7.2f} s  "
                f"ratio {our_seconds / bare_seconds:.2f}  peak memory {peak:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
