"""`MADPOTrainer`, `MADPOIterTrainer`, `MARLHFTrainer`, `MARLHFIterTrainer` with their configs, as published."""

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.algorithms.marlhf_config import MARLHFConfig, MARLHFIterConfig
from comlrl_core.trainers.iterative import MADPOIterTrainer
from comlrl_core.trainers.marlhf import MARLHFIterTrainer, MARLHFTrainer
from comlrl_core.trainers.offline import MADPOTrainer

__all__ = [
    "MADPOConfig",
    "MADPOIterConfig",
    "MADPOIterTrainer",
    "MADPOTrainer",
    "MARLHFConfig",
    "MARLHFIterConfig",
    "MARLHFIterTrainer",
    "MARLHFTrainer",
]
