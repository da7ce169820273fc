"""`MAGRPOTrainer`, `MARLOOTrainer`, `MAReMaxTrainer`, `MAREINFORCETrainer` with their configs, as published."""

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl_core.algorithms.reinforce import reinforce, reinforce_settings
from comlrl_core.algorithms.reinforce_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
from comlrl_core.algorithms.rollout_loop import Hooks
from comlrl_core.algorithms.shared import Learned
from comlrl_core.team.team import Team
from comlrl_core.trainers.rollout import RolloutTrainer

__all__ = [
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]


class MAGRPOTrainer(RolloutTrainer):
    """Multi-agent GRPO; with one agent GRPO itself.

    Every epoch the team answers every training task, over `args.num_turns` turns, and every agent is updated with the
    advantages of its own answers in the shared return.

    Keyword arguments as published: `agent_model` or `agents`, `num_agents`, `tokenizer`, `reward_func`,
    `reward_processor`, `formatters`, `args` (a `MAGRPOConfig`), `train_dataset`, `eval_dataset`, `model_config`,
    `external_transition` (required with several turns), `eval_logger` with `eval_aggregator`. Ours:
    `metrics_callback(metrics, step)` and `on_long_prompt`.
    """

    config_class: type[MAGRPOConfig] = MAGRPOConfig
    args: MAGRPOConfig

    def learn(
        self,
        tasks: Sequence[Mapping[str, Any]],
        start_epoch: int,
        learned: Learned,
        reference: Team | None,
        hooks: Hooks,
    ) -> None:
        reinforce(
            self.team,
            self.engines,
            tasks,
            self.oracle,
            reinforce_settings(self.args),
            num_train_epochs=self.args.num_train_epochs,
            start_epoch=start_epoch,
            learned=learned,
            transition=self.transition,
            reference=reference,
            hooks=hooks,
        )

    def turn_discount(self) -> float:
        return self.args.tree_discount


class MARLOOTrainer(MAGRPOTrainer):
    """Multi-agent RLOO; with one agent RLOO itself. Arguments as for `MAGRPOTrainer`, with a `MARLOOConfig`."""

    config_class = MARLOOConfig


class MAReMaxTrainer(MAGRPOTrainer):
    """Multi-agent ReMax. Arguments as for `MAGRPOTrainer`, with a `MAReMaxConfig`."""

    config_class = MAReMaxConfig


class MAREINFORCETrainer(MAGRPOTrainer):
    """Multi-agent REINFORCE. Arguments as for `MAGRPOTrainer`, with a `MAREINFORCEConfig`."""

    config_class = MAREINFORCEConfig
