"""One pass over the tasks in turns of collecting and updating: what all algorithms share that learn from rollouts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_core.algorithms.policy_updates import refuse_nonfinite
from comlrl_core.algorithms.shared import Learned, Metrics
from comlrl_core.progress import progress
from comlrl_core.randomness import generator
from comlrl_core.rollout.buffer import RolloutBuffer, Sample, minibatches
from comlrl_core.rollout.samples import Collected

Tasks = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Hooks:
    """What a caller wants to be told; steps are environment steps (joint responses scored so far).

    Attributes:
        on_batch: before some tasks are rolled out: the indices of these within the epoch, steps.
        on_rollout: the metrics of a collection, steps.
        on_step: the metrics of an optimizer step, steps.
        on_epoch: number of epochs done, all that was learned so far.
    """

    on_batch: Callable[[range, int], None] | None = None
    on_rollout: Callable[[Metrics, int], None] | None = None
    on_step: Callable[[Metrics, int], None] | None = None
    on_epoch: Callable[[int, Learned], None] | None = None


@dataclass(frozen=True)
class LoopSettings:
    """How an epoch goes, whatever is learned in it.

    Attributes:
        buffer_size: nodes that wait for an update; `batch_size`: nodes per optimizer step.
        nodes_per_task: of a rollout that is stopped nowhere.
        collection_batch_size: tasks rolled out together; None = as many as fill the buffer once.
        whole_episodes: an update comes between episodes alone, never between the turns of one.
        on_nonfinite: "fail" or "skip".
    """

    seed: int
    buffer_size: int
    batch_size: int
    nodes_per_task: int
    collection_batch_size: int | None
    whole_episodes: bool
    on_nonfinite: str

    def steps_per_epoch(self, turns_of_a_task: Sequence[int], num_tasks: int) -> int:
        """Optimizer steps of an epoch in which every rollout grows to its full size.

        `turns_of_a_task`: the turn of each of its nodes, in the order in which they reach the buffer.
        """
        waiting: list[int] = []
        steps = 0
        for _ in range(num_tasks):
            for position, turn in enumerate(turns_of_a_task):
                waiting.append(turn)
                last = position == len(turns_of_a_task) - 1
                if len(waiting) >= self.buffer_size and (last or not self.whole_episodes):
                    steps += len(minibatches(waiting, self.batch_size))
                    waiting = []
        return steps + len(minibatches(waiting, self.batch_size))


def rollout_epoch(
    tasks: Tasks,
    settings: LoopSettings,
    collect: Callable[[Tasks, int], Collected[Sample]],
    train: Callable[[list[Sample]], tuple[Metrics, str]],
    *,
    epoch: int,
    iteration: int,
    learned: Learned | None = None,
    hooks: Hooks | None = None,
    prepare: Callable[[list[Sample]], list[Sample]] | None = None,
) -> Learned:
    """One pass over the tasks, in an order of its own.

    Args:
        collect: rolls out some tasks with the current policies; told how many optimizer steps these have made.
        train: one optimizer step on a minibatch; returns its metrics and what was not finite ("" if all was).
        learned: what the epochs before left: its history is continued and its steps are counted on.
        prepare: sees all samples of a full buffer before they are cut into minibatches.

    Returns:
        history and environment steps. The metrics of an optimizer step: those of `train`, `epoch`, `iteration`, `step`
        (from 0 over the run), `environment_steps`, `sample_age` (optimizer steps between sampling and training, mean
        over the nodes).
    """
    hooks = hooks or Hooks()
    history = list(learned.history) if learned else []
    steps = learned.environment_steps if learned else 0
    buffer: RolloutBuffer[Sample] = RolloutBuffer(settings.buffer_size, settings.batch_size)
    order = generator(settings.seed, iteration, "rollout", "order", epoch).permutation(len(tasks)).tolist()

    def update() -> None:
        for batch in buffer.drain(prepare):
            age = sum(len(history) - sample.version for sample in batch) / len(batch)
            metrics, nonfinite = train(batch)
            metrics |= {"epoch": epoch, "iteration": iteration, "step": len(history)}
            metrics |= {"environment_steps": steps, "sample_age": age}
            history.append(metrics)
            if hooks.on_step is not None:
                hooks.on_step(metrics, steps)
            if nonfinite:
                refuse_nonfinite(nonfinite, history, settings.on_nonfinite)

    with progress(f"epoch {epoch + 1}: rollouts and updates", len(tasks), "task") as bar:
        position = 0
        while position < len(tasks):
            count = settings.collection_batch_size or math.ceil(buffer.room / settings.nodes_per_task)
            indices = range(position, min(position + count, len(tasks)))
            if hooks.on_batch is not None:
                hooks.on_batch(indices, steps)
            collected = collect([tasks[order[index]] for index in indices], len(history))
            steps += collected.joint_responses
            if hooks.on_rollout is not None:
                hooks.on_rollout(collected.metrics, steps)
            for number, sample in enumerate(collected.samples):
                buffer.add(sample)
                following = collected.samples[number + 1 : number + 2]
                ends = not settings.whole_episodes or all(other.turn == 1 for other in following)
                if buffer.room <= 0 and ends:
                    update()
            position = indices.stop
            bar.update(len(indices))
        update()  # what is left
    return Learned(history, steps)
