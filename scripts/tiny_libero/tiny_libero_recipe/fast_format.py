"""What a small pi0-FAST's numbers and words mean: statistics, words of prompts, codes of actions.

A word is a token, and so is each number of the state. The FAST tokenizer is fitted to the
demonstrations: coefficients as characters, and byte-level BPE over them, as upstream does it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters

from deft_policies.checkpoint.config import TOKENIZER_FILE
from deft_policies.families.pi0fast.files import read_files
from deft_policies.families.pi0fast.normalization import Mode, Normalization
from deft_policies.families.pi0fast.prompt import BOS, prompt_text
from deft_policies.families.pi0fast.words import END, PREFIX, Words, read_words
from deft_policies.fast.codec import FastCodec, to_coefficients
from deft_policies.fast.files import PROCESSOR_FILE, bytes_of_piece, read_codec

SCALE = 10.0  # of FAST's coefficients, upstream's own
STATE, ACTION = "observation.state", "action"
STATISTICS_FILE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
TEXT_FOLDER, FAST_FOLDER = "text-tokenizer", "fast-tokenizer"
HIDDEN = "<mask>"  # stands for a code of an answer that is not shown in training
_SPECIAL = ("<pad>", "<eos>", BOS, "<unk>", HIDDEN)  # in Gemma's order
_BLANK = "▁"
_SPLIT = rf"{_BLANK}?[^\s{_BLANK}:,;|]+|[:,;|\n]|{_BLANK}"
_EPS = np.float32(1e-8)
_STATISTICS: Mapping[str, float] = {"min": 0.0, "q01": 0.01, "q99": 0.99, "max": 1.0}

Numbers = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FastFormat:
    """All that a checkpoint says beside its weights."""

    statistics: Mapping[str, Numbers]  # `action.q01` and so on, [dim]
    horizon: int  # actions of an answer
    words: Words
    codec: FastCodec

    @cached_property
    def state(self) -> Normalization:
        """Of the robot's state."""
        return by_quantiles(self.statistics, STATE)

    @cached_property
    def action(self) -> Normalization:
        """Of actions, the same at every step of a chunk."""
        return by_quantiles(self.statistics, ACTION)

    @property
    def code_ids(self) -> list[int]:
        """The token of each code: the last of the vocabulary, counted down."""
        return self.words.code_ids(len(self.codec.pieces), 0)

    def encode(self, chunk: NDArray[np.float64]) -> list[int]:
        """The codes of actions [step, dim]."""
        return self.codec.encode(self.action.normalise(chunk.astype(np.float32)))


def by_quantiles(statistics: Mapping[str, Numbers], name: str) -> Normalization:
    """Of the state or of actions, from the 1st to the 99th percentile."""
    first, second = (statistics[f"{name}.{end}"] for end in ("q01", "q99"))
    return Normalization(Mode.QUANTILES, first, second, _EPS)


def measure(states: NDArray[np.float32], actions: NDArray[np.float64]) -> dict[str, Numbers]:
    """The statistics of all steps' states and actions."""
    found = {}
    for name, values in ((STATE, states), (ACTION, actions)):
        for end, share in _STATISTICS.items():
            found[f"{name}.{end}"] = np.quantile(values, share, axis=0).astype(np.float32)
    return found


def fit_format(
    statistics: Mapping[str, Numbers],
    chunks: Sequence[NDArray[np.float64]],
    texts: Iterable[str],
    num_codes: int,
) -> FastFormat:
    """Learn the codes of chunks [step, dim], and make a tokenizer that knows these texts' words."""
    normalization = by_quantiles(statistics, ACTION)
    codec = fit_codec(
        [normalization.normalise(one.astype(np.float32)) for one in chunks], num_codes
    )
    tokenizer = build_text_tokenizer(texts, len(codec.pieces))
    return FastFormat(statistics, len(chunks[0]), words_of(tokenizer), codec)


def fit_codec(chunks: Sequence[Numbers], num_codes: int) -> FastCodec:
    """A FAST tokenizer of at most `num_codes` codes, 256 of which are the single bytes."""
    coefficients = [to_coefficients(one, SCALE) for one in chunks]
    lowest = min(map(min, coefficients))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = splitters.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_codes,
        show_progress=False,
        initial_alphabet=splitters.ByteLevel.alphabet(),
    )
    texts = ("".join(chr(number - lowest) for number in one) for one in coefficients)
    bpe.train_from_iterator(texts, trainer)
    vocabulary = bpe.get_vocab()
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    num_steps, dim = chunks[0].shape
    return FastCodec(SCALE, lowest, tuple(map(bytes_of_piece, names)), bpe, num_steps, dim)


def build_text_tokenizer(texts: Iterable[str], num_codes: int) -> Tokenizer:
    """A tokenizer in Gemma's format that knows the words of some instructions.

    Other words are spelt in bytes. The codes of actions are its last pieces, as in PaliGemma's.
    """
    known = [prompt_text(text, range(-1, 256)) for text in texts]
    split = splitters.Split(Regex(_SPLIT), "isolated")
    pieces = {
        piece
        for text in (*known, PREFIX, END)
        for piece, _ in split.pre_tokenize_str(text.replace(" ", _BLANK))
    }
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    codes = [f"<loc{index:04d}>" for index in range(num_codes)]
    names = dict.fromkeys((*_SPECIAL, *letters, _BLANK, *sorted(pieces), *codes))
    tokenizer = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            [],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in _SPECIAL])
    return tokenizer


def words_of(tokenizer: Tokenizer) -> Words:
    """Which of a tokenizer's ids an answer begins and ends with."""
    prefix, (end,) = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (PREFIX, END)
    )
    return Words(tokenizer, tokenizer.get_vocab_size(with_added_tokens=False), tuple(prefix), end)


def write_tokenizers(given: FastFormat, directory: Path) -> None:
    """Both, each in its own folder below a checkpoint's."""
    codec = given.codec
    for name, tokenizer in ((TEXT_FOLDER, given.words.tokenizer), (FAST_FOLDER, codec.bpe)):
        (directory / name).mkdir()
        tokenizer.save(str(directory / name / TOKENIZER_FILE))
    settings = {
        "action_dim": codec.action_dim,
        "min_token": codec.min_token,
        "processor_class": "UniversalActionProcessor",
        "scale": codec.scale,
        "time_horizon": codec.num_steps,
        "vocab_size": len(codec.pieces),
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (directory / FAST_FOLDER / PROCESSOR_FILE).write_text(text)


def read_format(directory: Path) -> FastFormat:
    """That of a checkpoint which was written here."""
    files = read_files(directory)
    statistics = {
        name: tensor.numpy() for name, tensor in load_file(directory / STATISTICS_FILE).items()
    }
    words, codec = read_words(directory / TEXT_FOLDER), read_codec(directory / FAST_FOLDER)
    return FastFormat(statistics, files.horizon, words, codec)
