"""An OFT fine-tune, opened and checked; what no file says has to be said by flags.

Everything that can be wrong is found before the weights of the model are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deft_policies.checkpoint.open import Checkpoint, locate_checkpoint, open_checkpoint
from deft_policies.errors import CheckpointError
from deft_policies.oft.chunk_model import ChunkParts, ChunkShape
from deft_policies.oft.files import load_head, load_state_projector
from deft_policies.oft.film import FilmTowers
from deft_policies.oft.options import OftOptions
from deft_policies.oft.ranges import RangeScheme, RobotRanges, parse_ranges
from deft_policies.oft.recognition import OftFile, find_file

# Two arms, commanded by poses of their joints. Everything else is one arm commanded by motions.
_ALOHA_DIM = 14
_ALOHA_STEPS = 25


@dataclass(frozen=True, eq=False)
class FineTune:
    """Everything of a fine-tune but the weights it shares with OpenVLA."""

    checkpoint: Checkpoint
    parts: ChunkParts
    ranges: Mapping[str, RobotRanges]
    shape: ChunkShape


def open_fine_tune(options: OftOptions) -> FineTune:
    """Open what the options name, or say what is missing."""
    if options.checkpoint is None:
        raise CheckpointError("give --checkpoint, the folder or hub id of an OFT fine-tune")
    source = locate_checkpoint(options.checkpoint, options.adapter)
    directory, film = source.tuned, find_file(source.tuned, OftFile.VISION)
    if film is not None and source.overlay is not None:
        raise CheckpointError(
            f"{film} is of a fine-tune with FiLM, whose {source.overlay} cannot be merged here; "
            "merge it into its base with OFT's own script, and give the folder that this writes"
        )
    checkpoint = open_checkpoint(options.checkpoint, options.adapter)
    config = checkpoint.config
    head, towers = load_head(directory, config.llm.width), FilmTowers.load(directory)
    if towers is not None:
        towers.check(config)
        if head is None:
            raise CheckpointError(
                f"{film} is of a fine-tune with FiLM, which has a "
                f"*{OftFile.HEAD.value}*checkpoint* beside it; restore that file"
            )
        checkpoint = replace(checkpoint, adapter=towers)
    parts = ChunkParts(
        head=head,
        # The original leaves the state out where the model answers with tokens.
        state=None if head is None else load_state_projector(directory, config.llm.width),
        film=None if towers is None else towers.build_film(config),
    )
    action_dim = _find_action_dim(checkpoint, parts)
    ranges = _read_ranges(checkpoint, parts, action_dim)
    shape = choose_shape(options, action_dim, parts, source=str(_find_source(checkpoint)))
    return FineTune(checkpoint, parts, ranges, shape)


def choose_shape(
    options: OftOptions, action_dim: int, parts: ChunkParts, source: str
) -> ChunkShape:
    """Join what the files tell and what the flags do; `source` is what was looked at."""
    num_steps = options.num_steps or (_ALOHA_STEPS if action_dim == _ALOHA_DIM else None)
    if num_steps is not None and options.num_pictures is not None:
        state_dim = None if parts.state is None else parts.state.fc1.in_features
        return ChunkShape(options.num_pictures, num_steps, action_dim, state_dim)
    wanted = []
    if options.num_pictures is None:
        wanted.append(
            "--pictures N (1 is the frame alone, 2 adds a wrist camera as in LIBERO's published "
            "fine-tunes, 3 two of them as in ALOHA's)"
        )
    if num_steps is None:
        wanted.append("--chunk N (8 actions per answer in LIBERO's fine-tunes, 5 in Bridge's)")
    raise CheckpointError(
        f"{source} tells that an action has {action_dim} numbers, but no file tells how the model "
        f"was trained otherwise; add {' and '.join(wanted)}"
    )


def is_absolute(shape: ChunkShape) -> bool:
    """True if actions are poses to be in, not motions to make."""
    return shape.action_dim == _ALOHA_DIM


def _find_source(checkpoint: Checkpoint) -> object:
    head = find_file(checkpoint.source.tuned, OftFile.HEAD)
    return head or checkpoint.source.read_statistics().path


def _find_action_dim(checkpoint: Checkpoint, parts: ChunkParts) -> int:
    """The head's, or that of the statistics, which must be one and the same."""
    dims = {one.action_dim for one in checkpoint.config.statistics.values()}
    if parts.head is not None:
        dims.add(parts.head.action_dim)
    if len(dims) > 1:
        raise CheckpointError(
            f"{checkpoint.source.read_statistics().path} and {_find_source(checkpoint)} disagree "
            f"about the length of an action: {sorted(dims)}; restore the files of one fine-tuning "
            "run"
        )
    return dims.pop()


def _read_ranges(
    checkpoint: Checkpoint, parts: ChunkParts, action_dim: int
) -> Mapping[str, RobotRanges]:
    scheme = RangeScheme.EXTREMES if action_dim == _ALOHA_DIM else RangeScheme.QUANTILES
    statistics = checkpoint.source.read_statistics()
    ranges = parse_ranges(statistics, scheme)
    wanted = None if parts.state is None else parts.state.fc1.in_features
    for key, one in ranges.items():
        found = 0 if one.state is None else len(one.state.low)
        if wanted not in (None, found):
            raise CheckpointError(
                f"{statistics.path}: {key}.proprio has {found} dimensions, but "
                f"{find_file(checkpoint.source.tuned, OftFile.STATE)} reads {wanted}; restore "
                "the files of one fine-tuning run"
            )
    return ranges
