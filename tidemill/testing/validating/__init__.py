"""A trainer without a model: real sources, loader, loop and checkpoints, and ids instead of weights.

Its ranks are real processes, that can be killed; `ids` tells afterwards how often each row was trained.
"""
