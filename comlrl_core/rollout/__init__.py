"""Rollouts: trees of joint responses over one or more turns, and the buffer between them and the updates."""
