"""The Python trainers as a user's script: `several.py FOLDER [NPROC]`, with NPROC under torchrun."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from comlrl_core.engine import processes
from comlrl_core.trainers.preference import MADPOIterConfig, MADPOIterTrainer, MARLHFIterConfig, MARLHFIterTrainer
from comlrl_core.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

TASKS = [{"prompt": f"sentence {number}."} for number in range(3)]
# An epsilon above the size of rounding: what agrees stays together.
COMMON = {
    "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": None, "num_threads": 1, "agent_learning_rate": 1e-3,
    "adam_epsilon": 1e-6, "eval_interval": 1, "eval_num_samples": 2, "logging_steps": 1,
}  # fmt: skip
PAIRS = {"num_iterations": 2, "preference_num_candidates": 3, "min_reward_gap": 0.0, "optimizer_state": "carry"}
KINDS: dict[str, tuple[type, type, int, dict[str, Any]]] = {
    "madpo": (MADPOIterTrainer, MADPOIterConfig, 2, {**PAIRS, "reference": "initial"}),
    "marlhf": (MARLHFIterTrainer, MARLHFIterConfig, 3, {**PAIRS, "num_generations": 2}),
    "magrpo": (MAGRPOTrainer, MAGRPOConfig, 1, {"num_generations": 2, "num_turns": 1, "num_train_epochs": 2}),
}


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for name, (trainer_class, config_class, stage, settings) in KINDS.items():
        asked: list[str] = []
        reported: list[int] = []

        def reward(first: list[str], second: list[str], asked: list[str] = asked) -> list[float]:
            asked += second
            return [float(len(b) - len(a)) for a, b in zip(first, second, strict=True)]

        engine = {"kind": "deepspeed", "nproc": count, "zero_stage": stage} if count else {}
        trainer = trainer_class(
            agent_model="builtin:tiny",
            reward_func=reward,
            train_dataset=TASKS,
            eval_dataset=TASKS,
            args=config_class(**COMMON, **settings, engine=engine),
            metrics_callback=lambda _, step, reported=reported: reported.append(step),
        )
        trainer.train(checkpoint_dir=folder / name)
        trainer.save_model(folder / name / "final")
        (folder / f"{name}_rank_{processes.rank()}.txt").write_text(f"{len(asked)} {len(reported)}")
    processes.leave()


if __name__ == "__main__":
    os.environ["COMLRL_PROGRESS"] = "0"
    torch.set_num_threads(1)
    main()
