"""The oracle: what a reward function may look like, how it is found, and the built-in ones."""
