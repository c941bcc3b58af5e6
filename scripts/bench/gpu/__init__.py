"""The questions of `python -m scripts.bench gpu`, and how they are asked."""
