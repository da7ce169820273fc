"""Pure tensor functions: masks, log-probabilities, losses. This package imports torch and nothing else."""
