"""`deft train policy`: clone demonstrations into a small OpenVLA, as a checkpoint of its own."""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deft_draft_training.config import load_config
from deft_draft_training.errors import ConfigError, DataError
from deft_draft_training.policy.fit import PolicyFitConfig, PolicyTrainer
from deft_draft_training.policy.model import PolicyNet
from deft_draft_training.policy.prepare import (
    KeptTokens,
    Prepared,
    load_demonstrations,
    prepare,
)
from deft_policies.errors import PolicyError
from deft_policies.openvla.checkpoint_config import load_config as load_checkpoint_config
from deft_policies.openvla.checkpoint_writer import write_checkpoint
from deft_policies.openvla.prompt import load_tokenizer


@dataclass(frozen=True)
class PolicyRunConfig:
    """A run: the data set's name and the training itself."""

    statistics_key: str = "libero_object"
    fit: PolicyFitConfig = field(default_factory=PolicyFitConfig)


def main(arguments: list[str]) -> int:
    """Train, or go on training, and write the checkpoint at the end."""
    parser = argparse.ArgumentParser(prog="deft train policy", description=__doc__)
    parser.add_argument("demos", nargs="+", type=Path, help="folders of demonstrations")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new checkpoint")
    parser.add_argument("--config", type=Path, metavar="TOML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument(
        "--warm-start", type=Path, metavar="DIR", help="begin with the weights of another run"
    )
    parser.add_argument(
        "--tokens-of",
        type=Path,
        metavar="DIR",
        help="checkpoint whose statistics and tokenizer to keep",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="[%(default)s]"
    )
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--tensorboard", action="store_true", help="show losses there, too")
    parser.add_argument("--float32", action="store_true", help="store float32, not bfloat16")
    given = parser.parse_args(arguments)
    if given.out.exists():
        raise ConfigError(f"{given.out} exists; checkpoints are never overwritten")
    if given.warm_start and not given.tokens_of:
        raise ConfigError(
            "a warm start keeps what tokens mean: give --tokens-of the checkpoint of that run"
        )
    if given.threads:
        torch.set_num_threads(given.threads)
    config = load_config(PolicyRunConfig, given.config, given.overrides)
    kept = _kept_tokens(given.tokens_of, config.statistics_key)
    episodes = load_demonstrations(given.demos, only_succeeded=given.warm_start is None)
    prepared = prepare(episodes, config.fit.model, config.statistics_key, kept)
    sys.stderr.write(
        f"{len(episodes)} episodes, {len(prepared.samples)} frames, "
        f"{len(prepared.instructions)} instructions\n"
    )
    trainer = PolicyTrainer(
        config.fit,
        prepared.config,
        prepared.samples,
        prepared.prompts,
        torch.device(given.device),
    )
    net = trainer.run(given.run, given.warm_start, given.tensorboard)
    dtype = torch.float32 if given.float32 else torch.bfloat16
    write_policy(net, prepared, given.out, dtype)
    sys.stdout.write(f"{given.out}\n")
    return 0


def write_policy(net: PolicyNet, prepared: Prepared, directory: Path, dtype: torch.dtype) -> None:
    """Write what inference uses; the auxiliary head stays behind."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in net.model.named_tensors().items()
    }
    write_checkpoint(directory, prepared.config, tensors, prepared.tokenizer)
    names = json.dumps(list(prepared.instructions), indent=2) + "\n"
    (directory / "instructions.json").write_text(names)


def _kept_tokens(checkpoint: Path | None, key: str) -> KeptTokens | None:
    if checkpoint is None:
        return None
    try:
        config = load_checkpoint_config(checkpoint)
        tokenizer = load_tokenizer(checkpoint)
    except PolicyError as error:
        raise DataError(str(error)) from error
    if key not in config.statistics:
        known = ", ".join(config.statistics)
        raise DataError(f"{checkpoint} has no statistics {key!r}; it has {known}")
    return KeptTokens(config.statistics[key], tokenizer)
