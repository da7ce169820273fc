"""Ten updates of every algorithm on small models: the same program for every engine and number of processes.

Run by torchrun it trains with DeepSpeed at the stages that its arguments name, and the first process writes the weights
to a file: `work.py FOLDER STAGE ...`. What lies in `FOLDER/local` is resumed, and states to resume are left there.
"""

import logging
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comlrl_core.algorithms import actor_critic, madpo
from comlrl_core.algorithms.actor_critic import ActorCriticSettings
from comlrl_core.algorithms.reinforce import train_minibatch
from comlrl_core.config.engine import EngineSettings
from comlrl_core.critics.critic import CriticModel, SeparateCritic, SharedCritic
from comlrl_core.critics.critics import Critics
from comlrl_core.engine import processes
from comlrl_core.engine.build import build_engine, build_engines
from comlrl_core.engine.protocol import Engine, OptimizerSettings
from comlrl_core.engine.weights import gathered
from comlrl_core.preference.records import PairRecord
from comlrl_core.preference.reward_model import FitSettings, JointRewardModel, fit
from comlrl_core.randomness import generator
from comlrl_core.rollout.buffer import NodeSample
from comlrl_core.rollout.episodes import EpisodeSample, Lesson, TemporalDifference
from comlrl_core.team.agent import make_agent
from comlrl_core.team.generation import Sampling
from comlrl_core.team.scalar import ScalarHead
from comlrl_core.team.team import Team
from comlrl_core.team.tiny import load_tiny

SETTINGS = OptimizerSettings(1e-3, weight_decay=0.01, lr_schedule="linear", gradient_clip=1.0)
UPDATES = 10
VOCABULARY = 320
WEIGHTS_FILE, OUT_FILE = "weights.safetensors", "out.safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Weights = dict[str, Tensor]


def sharded_engine(stage: int, **changes: Any) -> EngineSettings:
    """DeepSpeed on as many processes as there are; at stage 3 small weights are sharded too."""
    options = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    count = processes.world_size()
    values = {"kind": "deepspeed", "zero_stage": stage, "nproc": count, "zero_options": options}
    return EngineSettings.model_validate(values | changes)


def small_model(seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of 9k parameters, some with sizes that two processes cannot share evenly."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY + 1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


def ids(*stream: int | str) -> tuple[int, ...]:
    """Between one and nine tokens."""
    numbers = generator("engine tests", *stream)
    return tuple(int(n) for n in numbers.integers(3, VOCABULARY, size=int(numbers.integers(1, 10))))


def pair(number: int, agents: int = 2) -> madpo.PairTokens:
    sides = ("prompt", "winner", "loser")
    prompts, winners, losers = (tuple(ids(side, number, agent) for agent in range(agents)) for side in sides)
    return madpo.PairTokens(prompts=prompts, winners=winners, losers=losers)


def node(number: int, agents: int = 2, completions: int = 3) -> NodeSample:
    advantages = generator("advantages", number).normal(size=(agents, completions))
    return NodeSample(
        turn=1,
        version=0,
        prompts=tuple(ids("prompt", number, agent) for agent in range(agents)),
        completions=tuple(tuple(ids(number, a, k) for k in range(completions)) for a in range(agents)),
        advantages=tuple(tuple(map(float, row)) for row in advantages),
        zero_std=(False,) * agents,
    )


def record(number: int) -> PairRecord:
    words = generator("words", number)
    texts = ["".join(chr(97 + int(n)) for n in words.integers(0, 26, size=int(words.integers(2, 9)))) for _ in range(6)]
    return PairRecord(
        task_id=str(number),
        prompts=(texts[0], texts[1]),
        winner_completions=(texts[2], texts[3]),
        loser_completions=(texts[4], texts[5]),
        winner_reward=1.0,
        loser_reward=0.0,
        candidate_reward_mean=0.5,
    )


def weights_of(**models: nn.Module) -> Weights:
    found = {}
    for name, model in models.items():
        with gathered(model):
            found |= {f"{name}/{key}": p.detach().clone().float() for key, p in model.named_parameters()}
    return found


def train_madpo(engine: EngineSettings, dtype: torch.dtype = torch.float32) -> tuple[Weights, list[float]]:
    """Five pairs per update in micro-batches of three: shares of two and one, and of one and one."""
    models = [small_model(agent, dtype) for agent in range(2)]
    engines = build_engines(models, SETTINGS, engine)
    pairs = [pair(number % 5) for number in range(5 * UPDATES)]
    reference = madpo.reference_margins(models, pairs, [0, 0], 7)
    settings = madpo.MADPOUpdateSettings(beta=0.3, train_batch_size=5, micro_batch_size=3)
    history = madpo.update(
        models, engines, [0, 0], pairs, settings, reference=reference, order=lambda _: range(len(pairs))
    )
    assert [metrics["pairs"] for metrics in history] == [5] * UPDATES
    return weights_of(a=models[0], b=models[1]), [metrics["loss"] for metrics in history]


def train_magrpo(engine: EngineSettings, dtype: torch.dtype = torch.float32) -> tuple[Weights, list[float]]:
    """Both agents share one model, hence one engine: two passes before one step."""
    model = small_model(2, dtype)
    engines = build_engines([model, model], SETTINGS, engine)
    engines[0].begin(UPDATES)
    losses = []
    for update in range(UPDATES):
        metrics, nonfinite = train_minibatch(
            [model, model], engines, [0, 0], [node(2 * update), node(2 * update + 1)], 1.0, micro_batch_size=4
        )
        assert not nonfinite
        losses.append(metrics["loss"])
    return weights_of(shared=model), losses


def reward_model(seed: int) -> JointRewardModel:
    tokenizer = load_tiny(0)[1]
    backbone = small_model(seed).base_model
    assert isinstance(backbone, PreTrainedModel)
    return JointRewardModel(backbone, tokenizer, 2, seed=seed)


def train_reward_model(engine: EngineSettings) -> tuple[Weights, list[float]]:
    model = reward_model(3)
    result = fit(
        model,
        lambda trained: build_engine(trained, SETTINGS, engine),
        [record(number) for number in range(3 * UPDATES)],
        FitSettings(train_batch_size=3, eval_fraction=0.0),
        order=lambda _, count: range(count),
    )
    found = weights_of(reward=model)
    return found | {"reward/shift": model.shift.clone()}, [metrics["loss"] for metrics in result.history]


def critic_model(seed: int, head_seed: int) -> CriticModel:
    backbone = small_model(seed).base_model
    assert isinstance(backbone, PreTrainedModel)
    return CriticModel(backbone, load_tiny(0)[1], ScalarHead(backbone, 6, head_seed))


def train_four(engine: EngineSettings) -> tuple[Weights, list[float]]:
    """Two agents, a reward model and a critic, in turn; each has an engine of its own in one process group."""
    agents = [small_model(seed) for seed in (4, 5)]
    judges: list[JointRewardModel | CriticModel] = [reward_model(6), critic_model(7, 1)]
    models: list[nn.Module] = [*agents, *judges]
    engines: list[Engine] = [build_engine(model, SETTINGS, engine) for model in models]
    for one in engines:
        one.begin(UPDATES)
    losses = []
    for update in range(UPDATES):
        one_agent = [engines[update % 2]]
        metrics, _ = train_minibatch(
            [models[update % 2]], one_agent, [0], [node(update, agents=1), node(99 - update, agents=1)], 1.0
        )
        losses.append(metrics["loss"])
        for which, trained in ((2, judges[0]), (3, judges[1])):
            sides = processes.even_share([ids("text", update, side) for side in range(3)])
            scores = engines[which].model(*trained.batch([text for text, _ in sides]))
            mine = torch.tensor([float(counts) for _, counts in sides])
            engines[which].backward(((scores - which) ** 2 * mine).sum() / 3)
            engines[which].step()
    return weights_of(a=agents[0], b=agents[1], judge=judges[0], critic=judges[1]), losses


def episode(number: int) -> EpisodeSample:
    """A turn with one answer of each agent, and what it teaches a central critic: one or two targets of one history."""
    one = node(number, completions=1)
    targets = tuple(map(float, generator("targets", number).normal(size=1 + number % 2)))
    lesson = Lesson((ids("joint history", number),), (0.0,), (targets,))
    return EpisodeSample(**{field.name: getattr(one, field.name) for field in fields(one)}, lessons=(lesson,))


def train_maac(engine: EngineSettings) -> tuple[Weights, list[float]]:
    """Two agents and a central critic, three turns per update: a share of two and one of one, and a filler."""
    models = [small_model(seed) for seed in (11, 12)]
    tokenizer = load_tiny(0)[1]
    agents = [make_agent(index, model, tokenizer, "") for index, model in enumerate(models)]
    team = Team(agents, [str, str])
    critic = critic_model(13, 0)
    engines = build_engines(models, SETTINGS, engine)
    critics = Critics((SeparateCritic(critic, build_engine(critic, SETTINGS, engine)),), True, 2)
    for one in (*engines, *critics.engines):
        one.begin(UPDATES)
    settings = ActorCriticSettings(Sampling(9), 0, TemporalDifference(), micro_batch_size=2)
    losses = []
    for update in range(UPDATES):
        samples = [episode(3 * update + number) for number in range(3)]
        metrics, nonfinite = actor_critic.train_minibatch(team, engines, critics, samples, settings)
        assert not nonfinite
        losses.append(metrics["loss"] + metrics["value_loss"])
    return weights_of(a=models[0], b=models[1], critic=critic), losses


def train_iac(engine: EngineSettings) -> tuple[Weights, list[float]]:
    """A value head on each actor's backbone: an actor's engine takes the gradients of two losses before one step."""
    models = [small_model(seed) for seed in (14, 15)]
    tokenizer = load_tiny(0)[1]
    agents = [make_agent(index, model, tokenizer, "") for index, model in enumerate(models)]
    engines = build_engines(models, SETTINGS, engine)
    heads = [ScalarHead(agent.model, 8, agent.index) for agent in agents]
    critics = Critics(
        tuple(
            SharedCritic(agent, head, build_engine(head, SETTINGS, engine), own)
            for agent, head, own in zip(agents, heads, engines, strict=True)
        ),
        False,
        2,
    )
    for one in (*engines, *critics.engines):
        one.begin(UPDATES)
    settings = ActorCriticSettings(Sampling(9), 0, TemporalDifference(), micro_batch_size=2, value_clip_range=0.2)
    losses = []
    for update in range(UPDATES):
        samples = []
        for number in range(3 * update, 3 * update + 3):
            inputs = [(ids("own history", number, agent),) for agent in range(2)]
            old = [tuple(critic.values(own)) for critic, own in zip(critics.critics, inputs, strict=True)]
            targets = generator("targets", number).normal(size=2)
            lessons = tuple(Lesson(inputs[a], old[a], ((float(targets[a]),),)) for a in range(2))
            samples.append(replace(episode(number), lessons=lessons))
        metrics, nonfinite = actor_critic.train_minibatch(Team(agents, [str, str]), engines, critics, samples, settings)
        assert not nonfinite
        losses.append(metrics["loss"] + metrics["value_loss"])
    return weights_of(a=models[0], b=models[1], head_a=heads[0], head_b=heads[1]), losses


def sample(engine: EngineSettings) -> list[int]:
    """Answers that end at many lengths, to three tasks and to one, which leaves a process without any; all in a row."""
    models = [small_model(seed) for seed in (16, 17)]
    for model in models:
        assert model.generation_config is not None
        model.generation_config.eos_token_id = list(range(0, VOCABULARY, 10))
    build_engines(models, SETTINGS, engine)
    tokenizer = load_tiny(0)[1]
    team = Team([make_agent(index, model, tokenizer, "") for index, model in enumerate(models)], [str, str])
    found: list[int] = []
    for prompts in ([("a", "bb"), ("ccc", "d"), ("e", "f")], [("g", "h")]):
        answers = team.generate(prompts, 2, Sampling(30), lambda t, a, k: 100 * t + 10 * a + k)
        found += [id_ for task in answers for joint in task for one in joint for id_ in (*one.token_ids, -1)]
    return found


def update_once(engine: Engine, number: int) -> None:
    train_minibatch([engine.model], [engine], [0], [node(number, agents=1)], 1.0)


def leave_state(engine: EngineSettings, folder: Path, dtype: torch.dtype) -> Weights:
    """Three updates, weights and state to `folder`; the weights after one update more."""
    model = small_model(8, dtype)
    trained = build_engine(model, SETTINGS, engine)
    trained.begin(UPDATES)
    for number in range(3):
        update_once(trained, number)
    weights = weights_of(model=model)
    if processes.is_first():
        folder.mkdir(parents=True)
        save_file(weights, folder / WEIGHTS_FILE)
    processes.wait_for_all()
    trained.save_state(folder)
    update_once(trained, 3)
    return weights_of(model=model)


def resume(engine: EngineSettings, folder: Path, dtype: torch.dtype) -> Weights:
    """The weights after the update that follows a state in `folder`."""
    model = small_model(9, dtype)
    saved = load_file(folder / WEIGHTS_FILE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[f"model/{name}"])
    resumed = build_engine(model, SETTINGS, engine)
    resumed.load_state(folder)
    update_once(resumed, 3)
    return weights_of(model=model)


def skipping(engine: EngineSettings) -> bool:
    """Forgotten gradients and steps without a finite gradient leave weights and moments as they are."""
    model = small_model(10)
    trained = build_engine(model, SETTINGS, engine)
    trained.begin(UPDATES)
    update_once(trained, 0)
    before = weights_of(model=model)
    ids_of = torch.tensor([[5, 6, 7]])
    trained.backward(trained.model(input_ids=ids_of).logits.sum())
    trained.zero_grad()
    trained.backward(trained.model(input_ids=ids_of).logits.sum() * float("nan"))
    assert trained.step().skipped
    after = weights_of(model=model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    update_once(trained, 1)
    plain = small_model(10)
    undisturbed = build_engine(plain, SETTINGS, engine)
    undisturbed.begin(UPDATES)
    update_once(undisturbed, 0)
    update_once(undisturbed, 1)
    expected = weights_of(model=plain)
    return all(torch.allclose(value, expected[name], atol=1e-7) for name, value in weights_of(model=model).items())


TRAININGS = {
    "madpo": train_madpo,
    "magrpo": train_magrpo,
    "reward_model": train_reward_model,
    "maac": train_maac,
    "iac": train_iac,
    "four": train_four,
}


def main() -> None:
    """Every training at every stage that is named; weights `stage/training/model/parameter`, losses beside them."""
    folder = Path(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    processes.join()
    out: Weights = {}
    for stage in map(int, sys.argv[2:]):
        for name, train in TRAININGS.items():
            weights, losses = train(sharded_engine(stage))
            out |= {f"{stage}/{name}/{key}": value.contiguous() for key, value in weights.items()}
            out[f"{stage}/{name}/losses"] = torch.tensor(losses)
        _, losses = train_madpo(sharded_engine(stage), torch.bfloat16)
        out[f"{stage}/bf16/losses"] = torch.tensor(losses)
        for kind, dtype in DTYPES.items():
            next_ones = {
                "left": leave_state(sharded_engine(stage), folder / f"stage_{stage}_{kind}", dtype),
                "resumed": resume(sharded_engine(stage), folder / f"local_{kind}", dtype),
                "changed_stage": resume(sharded_engine((stage - 1) % 4), folder / f"stage_{stage}_{kind}", dtype),
            }
            for what, weights in next_ones.items():
                out |= {f"{stage}/{what}_{kind}/{key}": value.contiguous() for key, value in weights.items()}
        same = resume(sharded_engine(stage), folder / f"stage_{stage}_fp32", torch.float32)
        out |= {f"{stage}/same_stage_fp32/{key}": value.contiguous() for key, value in same.items()}
        if stage in (0, 3):  # weights whole or spread
            out[f"{stage}/sampled"] = torch.tensor(sample(sharded_engine(stage)))
        if stage in (2, 3):
            offloaded = {"offload_optimizer": "cpu"} | ({"offload_parameters": "cpu"} if stage == 3 else {})
            weights, _ = train_madpo(sharded_engine(stage, **offloaded))
            out |= {f"{stage}/offloaded/{key}": value.contiguous() for key, value in weights.items()}
        out[f"{stage}/skipping"] = torch.tensor(skipping(sharded_engine(stage)))
    if processes.is_first():
        save_file(out, folder / OUT_FILE)


if __name__ == "__main__":
    main()
