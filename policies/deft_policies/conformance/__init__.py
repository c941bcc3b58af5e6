"""Deft compared with a model's own code, on the same frames: `deft doctor --against`."""
