"""From demonstrations to training samples: statistics, tokenizer, tokens, thoughts, weights."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from deft_client.commands.program import CommandParser
from deft_client.datasets.demonstrations import (
    COLUMNS,
    PRIVILEGED,
    Demonstration,
    find_demonstrations,
    load_demonstration,
)
from deft_draft_training.config import load_config
from deft_draft_training.errors import ConfigError, DataError
from deft_policies.checkpoint.config import load_config as load_checkpoint_config
from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.errors import PolicyError
from deft_policies.families.action_tokens import ActionCodec
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import OpenVLAConfig, TrainingNotes
from deft_policies.model.statistics import ActionStatistics
from scripts.tiny_libero.checkpoint_writer import write_checkpoint
from scripts.tiny_libero.data import PolicySamples, Request
from scripts.tiny_libero.fit import PolicyFitConfig, PolicyTrainer
from scripts.tiny_libero.language import (
    CARRYING,
    PATTERNS,
    SEEKING,
    TAGS,
    Facts,
    reasoning,
    vocabulary,
)
from scripts.tiny_libero.model import PolicyModelConfig, PolicyNet, build_config
from scripts.tiny_libero.tokenizer import build_tokenizer

_MOVING = 0.02  # of the largest command; less counts as standing still
_DECIMETRES = 10.0  # positions of a few decimetres become numbers of order one

# Where an open hand is so near the thing that only the expert can tell how far it is off.
_NEAR_METRES, _OPEN_METRES, _RISING = 0.06, 0.07, 0.1

# How much a step counts: the grasp and what surrounds it decide an episode.
_PHASE_WEIGHTS = {"descend": 2.0, "close": 3.0, "lift": 2.0, "lower": 1.5, "release": 3.0}


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a training run starts from."""

    config: OpenVLAConfig
    tokenizer: Tokenizer
    samples: PolicySamples


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """What the tokens of an earlier checkpoint mean, in its actions and in its prompts."""

    statistics: ActionStatistics
    tokenizer: Tokenizer


def load_demonstrations(folders: Sequence[Path], only_succeeded: bool) -> list[Demonstration]:
    """Read all episodes of some folders, or only those that succeeded."""
    paths = [path for folder in folders for path in find_demonstrations(folder)]
    if not paths:
        places = ", ".join(str(folder) for folder in folders)
        raise DataError(f"no demonstrations in {places}; run the command demos first")
    loaded = (load_demonstration(path) for path in tqdm(paths, desc="read", unit="episode"))
    return [one for one in loaded if one.header.succeeded or not only_succeeded]


def decided(episode: Demonstration) -> Demonstration:
    """An episode without the steps at which an open hand, close to the thing, rises again.

    A centimetre decides whether the expert goes down or up first to come down anew. The picture
    does not show it, and a policy that is taught both hovers.
    """
    away = _columns(episode, "object", "xy") - _columns(episode, "gripper", "xy")
    opening = episode.privileged[:, PRIVILEGED.index("opening")]
    phases = np.array(episode.header.phases)[episode.phase]
    hesitates = (
        np.isin(phases, SEEKING)
        & (np.linalg.norm(away, axis=1) < _NEAR_METRES)
        & (opening > _OPEN_METRES)
        & (episode.labels[:, 2] > _RISING)
    )
    kept = np.flatnonzero(~hesitates)
    rows = {name: getattr(episode, name)[kept] for name in COLUMNS}
    return replace(episode, encoded=[episode.encoded[step] for step in kept.tolist()], **rows)


def prepare(
    episodes: Sequence[Demonstration],
    sizes: PolicyModelConfig,
    statistics_key: str,
    kept: KeptTokens | None = None,
    thinking_share: float = 0.0,
) -> Prepared:
    """Build samples. Statistics and tokenizer are made of these episodes unless some are kept.

    A run that begins with another's weights must keep both: tokens mean what they mean. Words that
    the tokenizer has not seen fall back to its smaller pieces.
    """
    if not episodes:
        raise DataError("none of the demonstrations succeeded; nothing to train on")
    requests = sorted({request_of(one) for one in episodes}, key=lambda one: one.instruction)
    instructions = tuple(one.instruction for one in requests)
    statistics = kept.statistics if kept else measure_statistics(episodes)
    tokenizer = kept.tokenizer if kept else build_tokenizer((*instructions, *vocabulary()), TAGS)
    assets = ", ".join(sorted({one.header.assets for one in episodes}))
    taught = {PromptTemplate.OPENVLA: 1 - thinking_share, PromptTemplate.ECOT: thinking_share}
    prompts = tuple(prompt.value for prompt, share in taught.items() if share > 0)
    config = replace(
        build_config(sizes, tokenizer.get_vocab_size(), {statistics_key: statistics}),
        training=TrainingNotes(instructions, assets, prompts),
    )
    samples = PolicySamples.join(_samples(one, config, statistics) for one in episodes)
    return Prepared(config, tokenizer, samples)


def request_of(episode: Demonstration) -> Request:
    """What an episode was about, in LIBERO's words where it says so."""
    header = episode.header
    if not header.subject:
        return Request(header.instruction)
    told = PATTERNS[0].format(thing=header.subject, place=header.place)
    return Request(told, header.subject, header.place)


def measure_statistics(episodes: Iterable[Demonstration]) -> ActionStatistics:
    """1st and 99th percentile of each dimension; the gripper, the last, keeps its own values."""
    rows = [one.labels.astype(np.float64) for one in episodes]
    labels = np.concatenate(rows)
    mask = np.ones(labels.shape[1], dtype=np.bool_)
    mask[-1] = False
    return ActionStatistics(
        low=np.quantile(labels, 0.01, axis=0),
        high=np.quantile(labels, 0.99, axis=0),
        mask=mask,
        mean=labels.mean(axis=0),
        std=labels.std(axis=0),
        minimum=labels.min(axis=0),
        maximum=labels.max(axis=0),
        num_transitions=len(labels),
        num_trajectories=len(rows),
    )


def entropy_of_motion(
    tokens: NDArray[np.int64], labels: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Bits of entropy of each direction's tokens, over the steps that move that way.

    Both are [step, dim]; the gripper, the last dimension, is left out.
    """
    bits = []
    for dim in range(labels.shape[1] - 1):
        moving = tokens[np.abs(labels[:, dim]) > _MOVING, dim]
        _, counts = np.unique(moving, return_counts=True)
        shares = counts / max(len(moving), 1)
        bits.append(-float((shares * np.log2(shares)).sum()))
    return np.array(bits)


def _spoken_bits(episodes: Sequence[Demonstration], prepared: Prepared) -> str:
    labels = np.concatenate([one.labels for one in episodes])
    bits = entropy_of_motion(prepared.samples.labels, labels)
    names = ("x", "y", "z", "roll", "pitch", "yaw")
    return ", ".join(f"{name} {one:.2f}" for name, one in zip(names, bits, strict=False))


def auxiliary_positions(episode: Demonstration) -> NDArray[np.float32]:
    """What the auxiliary head is asked for: where gripper, object and goal are, and how apart.

    [step, value] in decimetres; positions against each other are what actions depend on.
    """
    hand, thing, goal, target = (
        _columns(episode, name, "xyz") for name in ("gripper", "object", "goal", "target")
    )
    opening = episode.privileged[:, [PRIVILEGED.index("opening")]]
    values = (hand, thing, goal, thing - hand, target - hand, opening)
    return (np.concatenate(values, axis=1) * _DECIMETRES).astype(np.float32)


def _columns(episode: Demonstration, name: str, ends: Iterable[str]) -> NDArray[np.float32]:
    """Some of the privileged numbers, [step, end]: `object_x`, `object_y` ..."""
    return episode.privileged[:, [PRIVILEGED.index(f"{name}_{end}") for end in ends]]


def _samples(
    episode: Demonstration, config: OpenVLAConfig, statistics: ActionStatistics
) -> PolicySamples:
    codec = ActionCodec(config.vocabulary)
    phases = [episode.header.phases[number] for number in episode.phase]
    request = request_of(episode)
    return PolicySamples(
        encoded=episode.encoded,
        labels=codec.encode(episode.labels.astype(np.float64), statistics),
        positions=auxiliary_positions(episode),
        weights=np.array([_PHASE_WEIGHTS.get(phase, 1.0) for phase in phases], np.float32),
        requests=[request] * len(episode),
        thoughts=thoughts(episode) if request.thing else [""] * len(episode),
    )


def thoughts(episode: Demonstration) -> list[str]:
    """What a policy that thinks aloud would say of each step."""
    header, sides = episode.header, ("left", "top", "right", "bottom")
    hand, thing, goal = (_columns(episode, one, "xyz") for one in ("gripper", "object", "goal"))
    is_carrying = np.isin(episode.phase, [header.phases.index(one) for one in CARRYING])
    return [
        reasoning(Facts(header.subject, header.place, header.phases[phase], *facts))
        for phase, *facts in zip(
            episode.phase,
            episode.labels,
            np.where(is_carrying[:, None], goal - thing, thing - hand),
            episode.privileged[:, PRIVILEGED.index("opening")],
            _columns(episode, "object", sides),
            _columns(episode, "goal", sides),
            _columns(episode, "gripper", ("left", "top")),
            strict=True,
        )
    ]


@dataclass(frozen=True)
class PolicyRunConfig:
    """A run: the data set's name and the training itself."""

    statistics_key: str = "libero_object"
    fit: PolicyFitConfig = field(default_factory=PolicyFitConfig)


def main(arguments: list[str]) -> int:
    """Train, or go on training, and write the checkpoint at the end."""
    parser = CommandParser(prog="python -m scripts.tiny_libero train", description=__doc__)
    parser.add_argument("demos", nargs="+", type=Path, help="folders of demonstrations")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new checkpoint")
    parser.add_argument("--config", type=Path, metavar="TOML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument(
        "--warm-start",
        type=Path,
        metavar="DIR",
        help="begin with the weights of another run, or of a checkpoint",
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
    if config.fit.only_decided:
        episodes = [decided(one) for one in episodes]
    fit = config.fit
    prepared = prepare(episodes, fit.model, config.statistics_key, kept, fit.thinking_share)
    sys.stderr.write(
        f"{len(episodes)} episodes, {len(prepared.samples)} frames, "
        f"{len(prepared.config.training.instructions)} instructions\n"
        f"bits of entropy in what moves, by direction: {_spoken_bits(episodes, prepared)}\n"
    )
    trainer = PolicyTrainer(
        config.fit,
        prepared.config,
        prepared.samples,
        prepared.tokenizer,
        torch.device(given.device),
    )
    net = trainer.run(given.run, given.warm_start, given.tensorboard)
    dtype = torch.float32 if given.float32 else torch.bfloat16
    write_policy(net, prepared, given.out, dtype)
    key = config.statistics_key
    sys.stdout.write(
        f"{given.out}: {config.fit.steps} steps\n"
        f"next: deft serve --checkpoint {quote(str(given.out))} --statistics-key {key}\n"
    )
    return 0


def write_policy(net: PolicyNet, prepared: Prepared, directory: Path, dtype: torch.dtype) -> None:
    """Write what inference uses; the auxiliary head stays behind."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in net.model.named_tensors().items()
    }
    write_checkpoint(directory, prepared.config, tensors, prepared.tokenizer)


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
