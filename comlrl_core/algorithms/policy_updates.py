"""One optimizer step of policies on weighted completions: gradients, steps, and what is reported of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comlrl_core.algorithms.shared import NONFINITE_LIMIT, Metrics
from comlrl_core.engine.processes import even_share, total
from comlrl_core.engine.protocol import Engine, StepResult, agents_by_engine
from comlrl_core.errors import TrainingError
from comlrl_core.rl.logprobs import sequence_logprobs
from comlrl_core.rl.policy_gradient import reinforce_loss
from comlrl_core.rollout.buffer import NodeSample
from comlrl_core.team.scoring import score_completions, scoring_mode


@dataclass
class PolicyGradients:
    """What `policy_gradients` did, per agent.

    Attributes:
        losses: 0 where nothing moved.
        trained: whether some completion moved the agent.
        tokens, logprobs: how many tokens were scored, and the sum of their log-probabilities.
    """

    losses: list[float]
    trained: list[bool]
    tokens: list[int]
    logprobs: list[float]

    @property
    def finite(self) -> bool:
        """False: the gradients so far are not to be used."""
        return all(map(math.isfinite, self.losses))


def policy_gradients(
    models: Sequence[nn.Module],
    engines: Sequence[Engine],
    pad_ids: Sequence[int],
    samples: Sequence[NodeSample],
    temperature: float,
    micro_batch_size: int | None = None,
) -> PolicyGradients:
    """Add the gradient of every agent's policy loss to what its engine has accumulated.

    Arguments as for `reinforce.train_minibatch`. The first loss that is not finite ends it.
    """
    count = len(models)
    done = PolicyGradients([0.0] * count, [False] * count, [0] * count, [0.0] * count)
    with scoring_mode(*models):
        for engine, agents in agents_by_engine(engines):
            for agent in agents:
                rows = _rows(samples, agent)
                size = micro_batch_size or max(1, len(rows))
                for start in range(0, len(rows), size):
                    chunk = rows[start : start + size]
                    # What the other processes do not take; fillers count for nothing.
                    own = [(*row[:2], row[2] * mine, mine) for row, mine in even_share(chunk)]
                    prompts, completions, weights, counted = zip(*own, strict=True)
                    token_logprobs, mask = score_completions(
                        engine.model, prompts, completions, pad_id=pad_ids[agent], temperature=temperature
                    )
                    logprobs = sequence_logprobs(token_logprobs, mask)
                    loss = reinforce_loss(logprobs, torch.tensor(weights, dtype=torch.float64).to(logprobs)).sum()
                    done.losses[agent] += total(loss.item())
                    done.trained[agent] = True
                    done.tokens[agent] += sum(len(completion) for _, completion, _ in chunk)
                    done.logprobs[agent] += total((logprobs.detach() * torch.tensor(counted).to(logprobs)).sum().item())
                    if not done.finite:
                        return done
                    engine.backward(loss)
    return done


def step_engines(engines: Sequence[Engine], moved: Sequence[bool], finite: bool) -> tuple[list[StepResult], str]:
    """Step every engine for which something was accumulated (`moved`); nothing at all after a loss that is not finite.

    Returns:
        one result per engine, and what was not finite: "loss", "gradient" or "".
    """
    results: list[StepResult] = []
    nonfinite = "" if finite else "loss"
    for engine, trained in zip(engines, moved, strict=True):
        if not finite or not trained:
            engine.zero_grad()
            results.append(StepResult(0.0 if finite else math.nan, 0.0, skipped=True))
        else:
            results.append(engine.step())
            nonfinite = "gradient" if results[-1].skipped else nonfinite
    return results, nonfinite


def policy_metrics(
    gradients: PolicyGradients,
    samples: Sequence[NodeSample],
    groups: Sequence[tuple[Engine, list[int]]],
    results: Sequence[StepResult],
) -> Metrics:
    """What is reported of the policies' part of an optimizer step; `results` belong to `groups`."""
    given = [a for sample in samples for of_agent in sample.advantages for a in of_agent]
    counted = torch.tensor([a for a in given if a is not None], dtype=torch.float64)
    metrics: Metrics = {"loss": sum(gradients.losses) / len(gradients.losses)}
    metrics |= {f"agent_{agent}/loss": loss for agent, loss in enumerate(gradients.losses)}
    for (_, agents), result in zip(groups, results, strict=True):
        metrics |= {f"agent_{agent}/grad_norm": result.grad_norm for agent in agents}
    if tokens := sum(gradients.tokens):
        metrics["entropy"] = -sum(gradients.logprobs) / tokens
    return metrics | {
        "grad_norm": math.sqrt(sum(result.grad_norm**2 for result in results)),
        "learning_rate": max(result.learning_rate for result in results),
        "advantage_std": counted.std(correction=0).item() if len(counted) else 0.0,
        "turn": samples[0].turn,
        "nodes": len(samples),
        "completions": len(counted),
        "dropped_completions": len(given) - len(counted),
        "skipped": int(any(result.skipped for result in results)),
    }


def _rows(samples: Sequence[NodeSample], agent: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """(prompt, completion, weight) of the completions that move an agent, by length, which saves pads.

    A weight is the advantage over the number of completions of its node that count, and over the nodes.
    """
    rows = []
    for sample in samples:
        scale = 1.0 / (max(1, sample.counted(agent)) * len(samples))
        for completion, advantage in zip(sample.completions[agent], sample.advantages[agent], strict=True):
            if advantage and completion:
                rows.append((sample.prompts[agent], completion, advantage * scale))
    return sorted(rows, key=lambda row: len(row[0]) + len(row[1]))


def refuse_nonfinite(what: str, history: Sequence[Metrics], on_nonfinite: str) -> None:
    """End the run at a loss or gradient that is not finite, where it may not be skipped or comes three times in a row.

    Raises:
        TrainingError: naming epoch, step and turn.
    """
    in_a_row = next((n for n, m in enumerate(reversed(history)) if not m["nonfinite"]), len(history))
    last = history[-1]
    text = f"the {what} of epoch {last['epoch']}, optimizer step {last['step']} (turn {last['turn']}) is not finite"
    if in_a_row >= NONFINITE_LIMIT:
        raise TrainingError(
            f"{text}, nor were the {in_a_row - 1} before it: the policies diverge; lower the learning rate"
        )
    if on_nonfinite == "fail":
        raise TrainingError(f"{text}; on_nonfinite_loss: skip leaves such minibatches out and counts them")
