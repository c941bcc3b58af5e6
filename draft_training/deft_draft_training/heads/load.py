"""Loads what the head commands work on: the target by its flags, and fitted or exported heads."""

import argparse
import json
from pathlib import Path

import torch

from deft_draft_training.config import build_config
from deft_draft_training.errors import ConfigError, DataError
from deft_draft_training.heads.fit import HeadFitConfig, build_head
from deft_draft_training.heads.target import FeatureTarget
from deft_draft_training.run_directory import STATE_FILE
from deft_policies.decoding.drafts.eagle import EagleHead, load_head
from deft_policies.decoding.drafts.medusa import MedusaHeads, is_medusa, load_medusa
from deft_policies.errors import PolicyError
from deft_policies.openvla.load import load_policy
from deft_policies.openvla.options import add_flags, read_flags


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that name the target, the same as the server's."""
    add_flags(parser.add_argument_group("target", "as for `deft serve --policy openvla`"))


def load_target(given: argparse.Namespace) -> FeatureTarget:
    """Load the target that the flags name."""
    try:
        return FeatureTarget(load_policy(read_flags(given)))
    except PolicyError as error:
        raise ConfigError(str(error)) from error


def load_fitted(run: Path, target: FeatureTarget) -> EagleHead | MedusaHeads:
    """The head of a run directory: its average where one was kept, else its last weights."""
    try:
        stored = json.loads((run / "config.json").read_text())
        state = torch.load(run / STATE_FILE, map_location="cpu", weights_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{run} is not a run of `deft train fit`: {error}") from error
    if stored.pop("target", None) != target.fingerprint():
        raise DataError(f"{run} was fitted to another checkpoint than the one given")
    head = build_head(build_config(HeadFitConfig, stored), target)
    head.load_state_dict(state["module"])
    average = {name: one for name, one in state["extra"].items() if name != "num_steps"}
    head.load_state_dict(average, strict=False)
    return head.requires_grad_(False).eval()


def load_any_head(directory: Path, target: FeatureTarget) -> EagleHead | MedusaHeads:
    """A head from a run directory or from an exported one, as the target's decoder runs it."""
    if (directory / STATE_FILE).exists():
        like = target.weight
        return load_fitted(directory, target).to(like.device, like.dtype)
    try:
        if is_medusa(directory):
            return load_medusa(directory, target.width, target.weight)
        return load_head(directory, target.width, target.weight)
    except PolicyError as error:
        raise DataError(str(error)) from error
