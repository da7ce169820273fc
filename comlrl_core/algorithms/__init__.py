"""One file per algorithm: its settings beside its update."""
