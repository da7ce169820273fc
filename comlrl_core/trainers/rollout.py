"""What the trainers share that learn from the rewards of their own rollouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import UPDATES, Learned, Metrics, sampling
from comlrl_core.config.fields import RolloutTrainingFields
from comlrl_core.digests import digest_values
from comlrl_core.errors import ConfigError
from comlrl_core.evaluation import EvaluatedSample
from comlrl_core.files import read_jsonl
from comlrl_core.rewards.loading import identify_reward
from comlrl_core.rollout.evaluation import evaluate_turns
from comlrl_core.rollout.transition import Transition
from comlrl_core.team.checkpoint import save_team
from comlrl_core.team.team import Team
from comlrl_core.trainers.arguments import say_one_turn
from comlrl_core.trainers.checkpoints import (
    STATE,
    check_checkpointing,
    find_checkpoint,
    keep_newest,
)
from comlrl_core.trainers.team_trainer import TeamTrainer, frozen

POLICIES = "policies"  # beside the checkpoints: the initial policies, where a divergence from them is penalised


class RolloutTrainer(TeamTrainer):
    """Base of the trainers that answer every training task once per epoch and learn from the rewards."""

    config_class: type[RolloutTrainingFields]
    args: Any

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: int = 1,
        checkpoint_total_limit: int | None = None,
    ) -> None:
        """Train for `args.num_train_epochs` passes over the tasks; checkpoints come after every `checkpoint_interval`.

        Args:
            resume_from_checkpoint: a checkpoint folder, a folder of checkpoints (the newest is taken), or True for
                `checkpoint_dir`. The number of epochs may be larger than before; all else must be the same.
            checkpoint_dir: where checkpoints go; a resumed run goes on beside its checkpoint unless told otherwise.
            checkpoint_total_limit: keep only that many.
        """
        tasks = self.required_tasks()
        check_checkpointing(checkpoint_interval, checkpoint_total_limit)
        checkpoints = Path(checkpoint_dir) if checkpoint_dir is not None else None
        learned = Learned([], self.environment_steps)
        start_epoch = 0
        initial: Path | None = None
        if resume_from_checkpoint:
            checkpoint = find_checkpoint(resume_from_checkpoint, checkpoint_dir)
            self.restore(checkpoint, self.checked_manifest(checkpoint))
            start_epoch = self.manifest.iteration
            learned = Learned(read_jsonl(checkpoint / STATE / UPDATES), self.environment_steps)
            checkpoints = checkpoints or checkpoint.parent
            initial = checkpoint.parent / POLICIES
        reference = self._reference(initial, checkpoints)
        inputs = digest_values(self.identity())
        limit, interval = checkpoint_total_limit, checkpoint_interval

        def on_epoch(done: int, so_far: Learned) -> None:
            log.flush(so_far.environment_steps)
            self.environment_steps = so_far.environment_steps
            self.manifest = replace(
                self.manifest,
                iteration=done,
                inputs=inputs,
                environment_steps=so_far.environment_steps,
                policy=self.team.fingerprint(),
            )
            if checkpoints is not None and (done % interval == 0 or done == self.args.num_train_epochs):
                self.save_checkpoint(checkpoints / f"epoch_{done:04d}", so_far)
                keep_newest(checkpoints, limit)

        log = TrainingLog(self.args.logging_steps, learned.environment_steps, self.report)
        hooks = Hooks(on_batch=self._on_batch, on_rollout=log.rollout, on_step=log.update, on_epoch=on_epoch)
        self.learn(tasks, start_epoch, learned, reference, hooks)

    def learn(
        self,
        tasks: Sequence[Mapping[str, Any]],
        start_epoch: int,
        learned: Learned,
        reference: Team | None,
        hooks: Hooks,
    ) -> None:
        """Epochs `start_epoch` to `args.num_train_epochs`."""
        raise NotImplementedError

    def check_transition(self, external_transition: Callable[..., Any] | None) -> None:
        self.transition: Transition | None = None
        if self.args.num_turns == 1:
            say_one_turn(external_transition)
        elif external_transition is None:
            raise ConfigError(
                f"external_transition is required with num_turns {self.args.num_turns}: a function that gives every "
                "agent its next prompt (or set num_turns to 1)"
            )
        else:
            self.transition = Transition(external_transition, self.args.external_prompt_passthrough)

    def further_identity(self) -> dict[str, Any]:
        if self.transition is None:
            return {}
        return {"external_transition": "@".join(identify_reward(self.transition.func))}

    def evaluated_turns(self, tasks: Sequence[Mapping[str, Any]]) -> list[list[EvaluatedSample]]:
        return evaluate_turns(
            self.team,
            self.oracle,
            tasks,
            num_turns=self.args.num_turns,
            transition=self.transition,
            sampling=sampling(self.args),
            seed=self.args.seed,
            batch_size=self.args.eval_batch_size,
            tokens_per_batch=self.args.tokens_per_batch,
        )

    def _on_batch(self, indices: range, environment_steps: int) -> None:
        """Evaluate before the tasks whose place in the epoch `eval_interval` divides."""
        every = self.args.eval_interval
        if every and any(index % every == 0 for index in indices):
            self.report(self.evaluate(), environment_steps)

    def _reference(self, initial: Path | None, checkpoints: Path | None) -> Team | None:
        """The initial policies, frozen, where the settings ask for them: this team's, or those of a resumed run."""
        if not (self.args.reference_kl_enabled and self.args.reference_kl_coef):
            return None
        if initial is not None:
            reference = self.load_past(initial, self.args.reference_devices)
        else:
            reference = frozen(self.team.copy(self.args.reference_devices))
        if checkpoints is not None and checkpoints / POLICIES != initial:
            save_team(reference, checkpoints / POLICIES)
        return reference


class TrainingLog:
    """Means of the metrics since the last report: after every `every` environment steps, and at the end of an epoch.

    An epoch's last report makes a run and its continuation report what an unbroken run does.
    """

    def __init__(self, every: int, start: int, report: Callable[[dict[str, float], int], None]) -> None:
        self.every, self.reported, self.report = every, start // every, report
        self.rows: dict[str, list[float]] = {}

    def rollout(self, metrics: Metrics, environment_steps: int) -> None:
        """A collection."""
        per_epoch = ("turn_", "kl/", "agent_", "critic/")
        self._add({k if k.startswith(per_epoch) else f"rollout/{k}": v for k, v in metrics.items()})
        self._send(environment_steps)

    def update(self, metrics: Metrics, environment_steps: int) -> None:
        """An optimizer step."""
        self._add({f"train/{name}": value for name, value in metrics.items()})
        self._send(environment_steps)

    def _add(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self.rows.setdefault(name, []).append(float(value))

    def _send(self, environment_steps: int) -> None:
        if environment_steps // self.every > self.reported:
            self.flush(environment_steps)

    def flush(self, environment_steps: int) -> None:
        """Report what there is."""
        self.reported = environment_steps // self.every
        self.report({name: fmean(values) for name, values in self.rows.items()}, environment_steps)
        self.rows = {}
