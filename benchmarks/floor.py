"""Collection, rollouts and updates against bare Transformers calls that process the same tokens, in one process.

    OMP_NUM_THREADS=1 python benchmarks/floor.py [--repeats 3] [--model 0.1M|12M] [--part collection] [--part ...]

- collection (MADPO) and rollout (MAGRPO): 64 tasks x 2 agents x 8 answers x 32 tokens, against `model.generate` on the
  same prompts, all rows of an agent in one call. Ours decode, score and credit the answers as well.
- update (MADPO): 256 pairs of 2 agents; reinforce (MAGRPO): 64 nodes of 8 answers of 2 agents; against forward,
  log-softmax and backward of the same padded batches, 32 rows each; actor-critic (MAAC): 256 turns of 2 agents with one
  answer each, and the central critic's histories, against the same and a backbone without its head. Ours step the
  optimizer as well.
- memory: the peak of one update step on top of what lay there before, of a model whose logits outweigh all else, in
  multiples of one fp32 tensor `[B, L, vocab]` (the logits of the batch); the log-softmax would be another one.

Prints the best of the repeats, taken in turn, and their ratio (ours / bare), in seconds of this process's CPU time:
with one thread those of an idle machine, whatever else is running. Memory is the highest of the process so far.
"""

import argparse
import copy
import gc
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comlrl_core.algorithms import actor_critic
from comlrl_core.algorithms.actor_critic import ActorCriticSettings
from comlrl_core.algorithms.madpo import MADPOUpdateSettings, PairTokens, update
from comlrl_core.algorithms.reinforce import train_minibatch
from comlrl_core.critics.critic import CriticModel, SeparateCritic
from comlrl_core.critics.critics import Critics
from comlrl_core.engine.local import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.environments.length_ratio import make_tasks
from comlrl_core.preference.collection import collect
from comlrl_core.rewards.contract import Oracle
from comlrl_core.rewards.length_ratio import length_ratio
from comlrl_core.rollout.buffer import NodeSample
from comlrl_core.rollout.episodes import EpisodeSample, Lesson, TemporalDifference
from comlrl_core.rollout.samples import Credit, node_samples
from comlrl_core.rollout.tree import TreeShape, grow
from comlrl_core.team.agent import Agent
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scalar import ScalarHead, padded
from comlrl_core.team.team import Team
from comlrl_core.team.tiny import load_tiny

TASKS, CANDIDATES, NEW_TOKENS, PAIRS, BATCH = 64, 8, 32, 256, 16
NODES, NODES_PER_STEP = 64, 4  # as many rows a step as BATCH pairs have
LONG = 20.0  # seconds
SIZES = {
    "12M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6,
            "intermediate_size": 1152, "vocab_size": 2000},
}  # fmt: skip
WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "vocab_size": 32768}  # fmt: skip

Pair = tuple[Callable[[], object], Callable[[], object]]


def make_team(size: str, shape: dict[str, int] | None = None) -> Team:
    """Two agents; nothing ends a sequence, so that both sides of a comparison process the same tokens."""
    agents = []
    for index in range(2):
        model, tokenizer = load_tiny(index)
        if shape is not None:
            torch.manual_seed(index)
            model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).eval()
        agents.append(Agent(index, model, tokenizer, size, (), tokenizer.pad_token_id, None))
    return Team(agents, [lambda row: row["prompt"]] * 2)


def collection(team: Team) -> Pair:
    """(ours, bare) collection of the same tasks."""
    tasks, _ = make_tasks(TASKS, 1)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)

    def ours() -> object:
        return collect(team, None, tasks, num_candidates=CANDIDATES, sampling=sampling, seed=0, iteration=1)

    return ours, lambda: generate(team)


def rollout(team: Team) -> Pair:
    """(ours, bare) rollouts of the same tasks: trees of one turn, scored and credited."""
    tasks, _ = make_tasks(TASKS, 1)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
    oracle = Oracle(length_ratio, team.num_agents)

    def ours() -> object:
        levels = grow(team, oracle, tasks, TreeShape(CANDIDATES), sampling=sampling, stream=(0, 1, "rollout"))
        return node_samples(team, levels, Credit(), temperature=1.0, max_new_tokens=NEW_TOKENS)

    return ours, lambda: generate(team)


def generate(team: Team) -> None:
    """Transformers alone: as many answers of the same length to the same prompts."""
    tasks, _ = make_tasks(TASKS, 1)
    for agent in team.agents:
        prompts = [agent.encode_prompt(task["prompt"]) for task in tasks for _ in range(CANDIDATES)]
        ids, mask = left_padded(prompts, agent.pad_id)
        with torch.inference_mode():
            agent.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=agent.pad_id, eos_token_id=None,
            )  # fmt: skip


def left_padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, L]`."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def drawn_ids(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    """`low` to `high - 1` token ids."""
    return tuple(rng.randrange(3, 300) for _ in range(rng.randrange(low, high)))


def update_pair(team: Team, count: int = PAIRS) -> Pair:
    """(ours, bare) update on the same pairs."""
    rng = random.Random(0)

    def pair() -> PairTokens:
        prompts, *answers = ((drawn_ids(rng, *of), drawn_ids(rng, *of)) for of in ((12, 24), (16, 33), (16, 33)))
        return PairTokens(prompts, *answers)

    pairs = [pair() for _ in range(count)]
    settings = MADPOUpdateSettings(train_batch_size=BATCH)
    engines = build_engines(team.models, OptimizerSettings(learning_rate=1e-4))

    def ours() -> object:
        order = range(count)
        return update(
            team.models, engines, team.pad_ids, pairs, settings, reference=None, order=lambda epoch: list(order)
        )

    def bare() -> None:
        for start in range(0, count, BATCH):
            chunk = pairs[start : start + BATCH]
            for index, model in enumerate(team.models):
                rows = [list(p.prompts[index] + p.winners[index]) for p in chunk]
                rows += [list(p.prompts[index] + p.losers[index]) for p in chunk]
                forward_backward(model, rows, team.pad_ids[index])

    return ours, bare


def reinforce_pair(team: Team, count: int = NODES) -> Pair:
    """(ours, bare) policy-gradient update on the same nodes; no advantage is 0, so every answer is trained on."""
    rng = random.Random(0)

    def node() -> NodeSample:
        prompts = (drawn_ids(rng, 12, 24), drawn_ids(rng, 12, 24))
        completions = tuple(tuple(drawn_ids(rng, 16, 33) for _ in range(CANDIDATES)) for _ in prompts)
        advantages = tuple(rng.choice((-1, 1)) * rng.uniform(0.1, 1.0) for _ in range(CANDIDATES))
        return NodeSample(1, 0, prompts, completions, (advantages, advantages), (False, False))

    nodes = [node() for _ in range(count)]
    batches = [nodes[start : start + NODES_PER_STEP] for start in range(0, count, NODES_PER_STEP)]
    engines = build_engines(team.models, OptimizerSettings(learning_rate=1e-4))

    def ours() -> None:
        for batch in batches:
            train_minibatch(team.models, engines, team.pad_ids, batch, 1.0)

    def bare() -> None:
        for batch in batches:
            for index, model in enumerate(team.models):
                rows = [list(n.prompts[index] + answer) for n in batch for answer in n.completions[index]]
                forward_backward(model, rows, team.pad_ids[index])

    return ours, bare


def actor_critic_pair(team: Team, count: int = PAIRS) -> Pair:
    """(ours, bare) update of two agents and a central critic on the same turns of episodes."""
    rng = random.Random(0)

    def turn() -> EpisodeSample:
        prompts = (drawn_ids(rng, 12, 24), drawn_ids(rng, 12, 24))
        completions = ((drawn_ids(rng, 16, 33),), (drawn_ids(rng, 16, 33),))
        advantages = ((rng.choice((-1, 1)) * rng.uniform(0.1, 1.0),),) * 2
        lesson = Lesson((prompts[0] + prompts[1],), (0.0,), ((rng.random(),),))
        return EpisodeSample(1, 0, prompts, completions, advantages, (False, False), (lesson,))

    turns = [turn() for _ in range(count)]
    batches = [turns[start : start + 2 * BATCH] for start in range(0, count, 2 * BATCH)]
    optimizer = OptimizerSettings(learning_rate=1e-4)
    engines = build_engines(team.models, optimizer)
    base = copy.deepcopy(team.models[0].base_model)
    model = CriticModel(base, team.agents[0].tokenizer, ScalarHead(base, None, 0))
    critics = Critics((SeparateCritic(model, build_engines([model], optimizer)[0]),), True, 2)
    settings = ActorCriticSettings(Sampling(NEW_TOKENS), 0, TemporalDifference())

    def ours() -> None:
        for batch in batches:
            actor_critic.train_minibatch(team, engines, critics, batch, settings)

    def bare() -> None:
        for batch in batches:
            for index, actor in enumerate(team.models):
                rows = [list(one.prompts[index] + one.completions[index][0]) for one in batch]
                forward_backward(actor, rows, team.pad_ids[index])
            ids, mask = padded([one.lessons[0].inputs[0] for one in batch], team.pad_ids[0], torch.device("cpu"))
            base(input_ids=ids, attention_mask=mask.long()).last_hidden_state[:, -1].sum().backward()
            base.zero_grad(set_to_none=True)

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


def best_of(runs: Pair, repeats: int) -> tuple[float, float]:
    """CPU seconds of the fastest of `repeats` runs of each kind, taken in turn.

    One run of each before does not count, unless it is so long that a cold start is nothing beside it.
    """
    rounds = [seconds_of(runs)]
    if min(rounds[0]) < LONG:
        rounds = [seconds_of(runs)]
    while len(rounds) < repeats:
        rounds.append(seconds_of(runs))
    ours, bare = (min(column) for column in zip(*rounds, strict=True))
    return ours, bare


def seconds_of(runs: Pair) -> list[float]:
    """CPU seconds of one run of each."""
    taken = []
    for run in runs:
        begin = time.process_time()
        run()
        taken.append(time.process_time() - begin)
    return taken


def peak_megabytes(run: Callable[[], object]) -> float:
    """The highest resident memory during `run` above that before it (Linux), after a run that makes what stays."""
    run()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(name: str) -> float:
    """A line of `/proc/self/status` in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / 1e6


def memory() -> None:
    """Print the peaks of single update steps."""
    torch.set_num_threads(1)
    for what, make, count in (("update", update_pair, BATCH), ("reinforce", reinforce_pair, NODES_PER_STEP)):
        team = make_team("wide", WIDE)
        # Longest prompt and longest answer of the draw, 32 rows.
        unit = 2 * BATCH * (23 + 32) * WIDE["vocab_size"] * 4 / 1e6
        ours, bare = (peak_megabytes(run) for run in make(team, count))
        print(
            f"peak of one {what} step, [B, L, vocab] in fp32 being {unit:.0f} MB: ours {ours:.0f} MB "
            f"({ours / unit:.1f} of it), bare {bare:.0f} MB ({bare / unit:.1f})",
            flush=True,
        )


PARTS: dict[str, Callable[[Team, int], Pair]] = {
    "collection": lambda team, steps: collection(team),
    "rollout": lambda team, steps: rollout(team),
    "update": lambda team, steps: update_pair(team, steps * BATCH),
    "reinforce": lambda team, steps: reinforce_pair(team, steps * NODES_PER_STEP),
    "actor-critic": lambda team, steps: actor_critic_pair(team, steps * BATCH),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=["0.1M", *SIZES], action="append")
    parser.add_argument("--part", choices=[*PARTS, "memory"], action="append")
    parser.add_argument("--steps", type=int, default=PAIRS // BATCH, help="how many steps an update has")
    options = parser.parse_args()
    parts = options.part or [*PARTS, "memory"]
    for size in options.model or ["0.1M", *SIZES]:
        for what in [part for part in PARTS if part in parts]:
            team = make_team(size, SIZES.get(size))
            parameters = sum(p.numel() for p in team.models[0].parameters()) / 1e6
            our_seconds, bare_seconds = best_of(PARTS[what](team, options.steps), options.repeats)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{parameters:5.2f} M {what:12}  ours {our_seconds:7.2f} s  bare {bare_seconds:7.2f} s  "
                f"ratio {our_seconds / bare_seconds:.2f}  peak memory {peak:.0f} MB",
                flush=True,
            )
    if "memory" in parts:
        memory()


if __name__ == "__main__":
    main()
