"""What the preference trainers share: both sides' scored answers, and when to report and evaluate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from comlrl_core.algorithms.madpo import Metrics
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.shared import sampling, training_metrics
from comlrl_core.comparators.base import Comparator
from comlrl_core.evaluation import EvaluatedSample, evaluate
from comlrl_core.preference.candidates import TaskCandidates
from comlrl_core.preference.collection import collect
from comlrl_core.preference.scoring import score_candidates
from comlrl_core.rewards.contract import Oracle
from comlrl_core.team.formatters import FormatterSpec
from comlrl_core.trainers.arguments import (
    RewardProcessor,
    Source,
    check_reward_range,
    refuse_adapter,
    say_one_turn,
)
from comlrl_core.trainers.team_trainer import MetricsCallback, TeamTrainer, frozen

__all__ = ["PreferenceTrainer", "frozen"]


class PreferenceTrainer(TeamTrainer):
    """Base of the preference trainers; see `MADPOTrainer` and `MADPOIterTrainer`."""

    config_class: type[MADPOConfig] = MADPOConfig
    args: MADPOConfig

    def __init__(
        self,
        *,
        agent_model: Source | None = None,
        agents: Sequence[Source] | None = None,
        num_agents: int | None = None,
        tokenizer: str | PreTrainedTokenizerBase | Sequence[str | PreTrainedTokenizerBase] | None = None,
        reward_func: Any = None,
        reward_processor: RewardProcessor | None = None,
        formatters: FormatterSpec | Sequence[FormatterSpec] = None,
        args: MADPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | None = None,
        model_config: Mapping[str, Any] | None = None,
        external_transition: Callable[..., Any] | None = None,
        eval_logger: Callable[..., Any] | None = None,
        eval_aggregator: Callable[..., Any] | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        metrics_callback: MetricsCallback | None = None,
        centralized_comparator_adapter: Any = None,
        on_long_prompt: str = "fail",
    ) -> None:
        refuse_adapter(centralized_comparator_adapter)
        super().__init__(
            agent_model=agent_model,
            agents=agents,
            num_agents=num_agents,
            tokenizer=tokenizer,
            reward_func=reward_func,
            reward_processor=reward_processor,
            formatters=formatters,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model_config=model_config,
            external_transition=external_transition,
            eval_logger=eval_logger,
            eval_aggregator=eval_aggregator,
            wandb_config=wandb_config,
            metrics_callback=metrics_callback,
            on_long_prompt=on_long_prompt,
        )

    def check_transition(self, external_transition: Callable[..., Any] | None) -> None:
        say_one_turn(external_transition)

    def check_oracle(self) -> None:
        check_reward_range(self.args, self.oracle)

    def evaluated_turns(self, tasks: Sequence[Mapping[str, Any]]) -> list[list[EvaluatedSample]]:
        samples = evaluate(
            self.team,
            self.oracle,
            tasks,
            samples_per_task=1,
            sampling=sampling(self.args),
            seed=self.args.seed,
            batch_size=self.args.eval_batch_size,
            tokens_per_batch=self.args.tokens_per_batch,
        )
        return [samples]

    def collect_scored(self, iteration: int, comparator: Comparator | None) -> list[TaskCandidates]:
        """Both sides' scored answers to all training tasks."""
        tasks, args = self.required_tasks(), self.args
        size = args.collection_batch_size or len(tasks)
        scored: list[TaskCandidates] = []
        for start in range(0, len(tasks), size):
            candidates = collect(
                self.team,
                comparator,
                tasks[start : start + size],
                num_candidates=args.preference_num_candidates,
                comparator_num_candidates=getattr(args, "comparator_num_candidates", None),
                sampling=sampling(args),
                seed=args.seed,
                iteration=iteration,
                tokens_per_batch=args.tokens_per_batch,
            )
            scored += score_candidates(candidates, self.labeller()).candidates
        return scored

    def labeller(self) -> Oracle:
        """Who decides which side of a pair wins."""
        return self.oracle

    def keeps_initial(self) -> bool:
        """Whether the run needs its initial policies again."""
        return self.args.reference == "initial"

    def on_step(self, metrics: Metrics, environment_steps: int) -> None:
        """Report an optimizer step, and evaluate where `eval_interval` says so."""
        self.environment_steps = environment_steps
        per_epoch = max(1, self._updates_per_epoch)
        if self.args.eval_interval and (metrics["step"] % per_epoch) % self.args.eval_interval == 0:
            self.report(self.evaluate(), environment_steps)
        every = self.args.logging_steps
        if environment_steps // every > (environment_steps - self._steps_of(metrics)) // every:
            self.report(training_metrics(metrics), environment_steps)

    _updates_per_epoch = 1

    def _steps_of(self, metrics: Metrics) -> int:
        return int(metrics["pairs"]) * self.args.environment_steps_per_pair
