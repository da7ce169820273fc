"""The agents of a team: loading, prompts, batched generation, checkpoints."""
