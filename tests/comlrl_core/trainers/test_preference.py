"""The published names are where published code looks for them."""

import inspect

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.trainers import preference

PUBLISHED_ARGUMENTS = {
    "agent_model", "agents", "num_agents", "tokenizer", "reward_func", "reward_processor", "formatters", "args",
    "train_dataset", "eval_dataset", "model_config", "external_transition", "eval_logger", "eval_aggregator",
    "wandb_config", "centralized_comparator_adapter",
}  # fmt: skip


def test_trainers_and_configs() -> None:
    assert preference.MADPOConfig is MADPOConfig and preference.MADPOIterConfig is MADPOIterConfig
    for trainer in (preference.MADPOTrainer, preference.MADPOIterTrainer):
        assert set(inspect.signature(trainer).parameters) >= PUBLISHED_ARGUMENTS
        train = inspect.signature(trainer.train).parameters
        assert {name: parameter.default for name, parameter in train.items() if name != "self"} == {
            "resume_from_checkpoint": None,
            "checkpoint_dir": None,
            "checkpoint_interval": 1,
            "checkpoint_total_limit": None,
        }
        assert inspect.signature(trainer.evaluate).parameters["num_eval_samples"].default is None
