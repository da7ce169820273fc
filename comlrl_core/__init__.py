"""Train teams of language models that answer together, from preferences and rewards."""

__version__ = "0.1.0"
