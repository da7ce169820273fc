"""The published interface: trainers and their configs, as a plain Python loop over the learning stages."""
