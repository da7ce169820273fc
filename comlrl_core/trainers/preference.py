"""`MADPOTrainer` and `MADPOIterTrainer` with their configs, as published."""

from comlrl_core.algorithms.madpo_config import MADPOConfig, MADPOIterConfig
from comlrl_core.trainers.iterative import MADPOIterTrainer
from comlrl_core.trainers.offline import MADPOTrainer

__all__ = ["MADPOConfig", "MADPOIterConfig", "MADPOIterTrainer", "MADPOTrainer"]
