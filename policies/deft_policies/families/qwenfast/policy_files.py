"""What the files of a policy say that writes FAST codes with Qwen2.5-VL, whichever project's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling
from tokenizers import Tokenizer

from deft_policies.base import Finding, Verdict
from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.open import download_snapshot
from deft_policies.checkpoint.tensor_file import StoredTensor
from deft_policies.errors import CheckpointError
from deft_policies.fast.codec import FastCodec
from deft_policies.fast.files import PROCESSOR_FILE, TOKENIZER_FILE, is_fast_folder, read_codec
from deft_policies.model.statistics import ActionStatistics

INSTRUCTION = "{instruction}"
END, OTHER_END = "<|im_end|>", "<|endoftext|>"
MOST_STATISTICS_BYTES = 2**22
_PUBLISHED_FAST = "physical-intelligence/fast"
_REMEDY = "restore it"
_OF_QWEN = {"normalizer": "NFC", "decoder": "ByteLevel"}  # parts of its tokenizer
_USUAL_PENALTY = 1.05  # of Qwen2.5-VL's own file
MOST_STEPS, MOST_DIM = 256, 64  # of an answer

Unnormalise = Callable[[NDArray[np.float64], ActionStatistics], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class GenerationSettings:
    """What `generation_config.json` says of how answers are written."""

    repetition_penalty: float
    stops: tuple[int, ...]  # ids; empty where no file names any
    max_new_tokens: int | None
    doubts: tuple[str, ...]

    @staticmethod
    def read(folder: Path) -> "GenerationSettings":
        """Without the file nothing is penalised, as transformers has it."""
        path = folder / "generation_config.json"
        if not path.exists():
            doubt = f"{path} is missing: no repetition penalty is served"
            return GenerationSettings(1.0, (), None, (doubt,))
        fields = JsonFields.load(path, _REMEDY)
        penalty = fields.value("repetition_penalty", float, 1.0)
        if penalty <= 0:
            raise fields.error("repetition_penalty", f"is {penalty:g}, expected more than 0")
        key = "eos_token_id"
        stops = fields.values(key, int, ()) if fields.is_list(key) else ()
        if fields.has(key) and not fields.is_list(key):
            stops = (fields.value(key, int),)
        most = fields.count("max_new_tokens", 1 << 20) if fields.has("max_new_tokens") else None
        doubt = (
            f"{path} names no repetition_penalty; Qwen2.5-VL's own has {_USUAL_PENALTY:g}, so see "
            "that the file is the one the policy was served with"
        )
        return GenerationSettings(penalty, stops, most, (doubt,) if penalty == 1.0 else ())


@dataclass(frozen=True, eq=False)
class PolicyFiles:
    """A policy whose files were found, in whichever layout they were saved."""

    base: Path  # sizes, tokenizer and generation settings
    stored: Mapping[str, StoredTensor]  # by the names of transformers
    weight_files: Sequence[Path]
    codec: FastCodec
    fast: Path
    num_steps: int
    action_dim: int
    num_cameras: int
    template: str  # of the prompt behind the pictures
    resample: Resampling  # to the size that the model looks at
    statistics: Mapping[str, ActionStatistics]
    unnormalise: Unnormalise
    gripper: str  # what the last number means, in words
    settings: GenerationSettings
    tokenizer: Tokenizer
    doubts: tuple[str, ...] = ()  # besides those of the settings

    @property
    def num_coefficients(self) -> int:
        """Of an answer."""
        return self.num_steps * self.action_dim

    def code_ids(self) -> list[int]:
        """The tokenizer's id of each code: `<robot_action_0>` and so on."""
        names = [f"<robot_action_{code}>" for code in range(len(self.codec.pieces))]
        ids = [self.tokenizer.token_to_id(name) for name in names]
        known_ids = [token for token in ids if token is not None]
        if len(known_ids) != len(ids) or len(set(known_ids)) != len(known_ids):
            raise CheckpointError(
                f"{self.base}: the tokenizer has {len(set(known_ids))} of the {len(ids)} tokens "
                f"<robot_action_0> to {names[-1]} that {self.fast} needs; give the base and the "
                "FAST tokenizer of one and the same policy"
            )
        return known_ids

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; that of `<|im_end|>` comes first where it is one."""
        usual = [self.tokenizer.token_to_id(name) for name in (END, OTHER_END)]
        usual_stops = [stop for stop in usual if stop is not None]
        stops = self.settings.stops or usual_stops
        if not stops:
            raise CheckpointError(f"{self.base}: the tokenizer has no {END}; expected Qwen's")
        return tuple(sorted(set(stops), key=lambda stop: (stop not in usual_stops[:1], stop)))

    def findings(self) -> list[Finding]:
        """What costs users their success without a word, for `deft doctor`."""
        codec, num = self.codec, self.num_coefficients
        text = (
            f"{self.fast}: {len(codec.pieces)} codes, scale {codec.scale:g}, from {codec.min_token}"
            f" on; an answer is {self.num_steps} x {self.action_dim} = {num} coefficients. Of "
            "another FAST tokenizer than the policy's own no action would be right"
        )
        findings = [Finding("action tokens", Verdict.GOOD, text)]
        doubts = (*self.doubts, *self.settings.doubts)
        return [*findings, *(Finding("answers", Verdict.DOUBTFUL, doubt) for doubt in doubts)]


def open_base(folder: Path) -> tuple[Tokenizer, GenerationSettings]:
    """Tokenizer and generation settings of a model's folder."""
    return load_tokenizer(folder, _OF_QWEN), GenerationSettings.read(folder)


def find_fast(candidates: Sequence[Path]) -> tuple[Path, FastCodec]:
    """The FAST tokenizer of the first folder that is one, or else the published one's."""
    folder = next((candidate for candidate in candidates if is_fast_folder(candidate)), None)
    if folder is None:
        try:
            patterns = (TOKENIZER_FILE, f"*/{TOKENIZER_FILE}", PROCESSOR_FILE)
            folder = download_snapshot(_PUBLISHED_FAST, patterns)
        except CheckpointError as error:
            looked = ", ".join(map(str, candidates))
            raise CheckpointError(
                f"there is no FAST tokenizer ({TOKENIZER_FILE} and {PROCESSOR_FILE}) in {looked}, "
                f"and {error}"
            ) from None
    return folder, read_codec(folder)


def check_statistics(
    path: Path, statistics: Mapping[str, ActionStatistics], action_dim: int
) -> None:
    """Raise `CheckpointError` where they are of actions of another length."""
    for key, one in statistics.items():
        if one.action_dim != action_dim:
            raise CheckpointError(
                f"{path}: {key} has {one.action_dim} numbers for an action, the policy writes "
                f"{action_dim}"
            )


def doubts_of(fast: Path, codec: FastCodec, num_steps: int, action_dim: int) -> tuple[str, ...]:
    """What speaks against a FAST tokenizer for chunks of this size.

    The projects set both sizes themselves, whatever its file says.
    """
    doubts = []
    if codec.num_steps not in (None, num_steps) or codec.action_dim not in (None, action_dim):
        doubts.append(
            f"{fast / PROCESSOR_FILE} is for {codec.num_steps} x {codec.action_dim} numbers, and "
            f"answers have {num_steps} x {action_dim}: is it the policy's own?"
        )
    lowest = -round(codec.scale * math.sqrt(num_steps))
    if lowest < codec.min_token:
        doubts.append(
            f"{fast} begins at the coefficient {codec.min_token}, and a chunk at its lowest has "
            f"{lowest}: is it the policy's own?"
        )
    return tuple(doubts)
