"""From candidates to training pairs: scoring, pairing, iteration files and replay."""
