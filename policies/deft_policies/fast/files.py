"""Reads the folder of a FAST tokenizer: `tokenizer.json` and `processor_config.json`.

Upstream's class comes as code with these files. Nothing of it is needed, and nothing is run: the
pieces and the merges alone are read, and all else in `tokenizer.json` must be what upstream writes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.fast.codec import FastCodec

PROCESSOR_FILE = "processor_config.json"
TOKENIZER_FILE = "tokenizer.json"
_SUBFOLDER = "bpe_tokenizer"  # where transformers 5 saves the tokenizer
_REMEDY = "copy the folder of the FAST tokenizer that the policy was trained with"
# Far beyond what upstream saves (some 150 kB, 2048 pieces of at most 30 characters or so).
_MOST_BYTES, _MOST_CONFIG_BYTES = 2**20, 2**16
_MOST_PIECES, _MOST_CHARACTERS = 2**15, 2**10
_MOST_STEPS, _MOST_DIM = 1024, 256
_LAST_CHARACTER = 0x10FFFF


def is_fast_folder(folder: Path) -> bool:
    """Whether it looks like one; `read_codec` may still refuse it."""
    return (folder / PROCESSOR_FILE).is_file() and _find_tokenizer(folder).is_file()


def read_codec(folder: Path) -> FastCodec:
    """Read the two files; `CheckpointError` says what is wrong with them."""
    config = JsonFields.load(folder / PROCESSOR_FILE, _REMEDY, _MOST_CONFIG_BYTES)
    scale = config.value("scale", float)
    if not (0 < scale < math.inf):
        raise config.error("scale", f"is {scale:g}, expected more than 0")
    min_token = config.value("min_token", int)
    if abs(min_token) > _LAST_CHARACTER:
        raise config.error("min_token", f"is {min_token}, which no character can make up for")
    vocabulary, merges = _read_bpe(JsonFields.load(_find_tokenizer(folder), _REMEDY, _MOST_BYTES))
    bpe = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    return FastCodec(
        scale=scale,
        min_token=min_token,
        pieces=tuple(map(bytes_of_piece, names)),
        bpe=bpe,
        num_steps=_optional(config, "time_horizon", _MOST_STEPS),
        action_dim=_optional(config, "action_dim", _MOST_DIM),
    )


def bytes_of_piece(piece: str) -> bytes:
    """The bytes of a piece.

    Its characters encode bytes, as in GPT-2. Where one of them does not, all are themselves: a
    tokenizer that upstream's `fit` has made holds such pieces, and never writes them.
    """
    byte_or_none = [_BYTES.get(character) for character in piece]
    byte_values = [byte for byte in byte_or_none if byte is not None]
    return bytes(byte_values) if len(byte_values) == len(piece) else piece.encode()


def _gpt2_bytes() -> Mapping[str, int]:
    """The byte of each character: printable ones are themselves, the others begin at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


_BYTES = _gpt2_bytes()


def _find_tokenizer(folder: Path) -> Path:
    below = folder / _SUBFOLDER / TOKENIZER_FILE
    return below if below.is_file() else folder / TOKENIZER_FILE


def _optional(config: JsonFields, key: str, most: int) -> int | None:
    return config.count(key, most) if config.has(key) else None


def _read_bpe(fields: JsonFields) -> tuple[Mapping[str, int], Sequence[tuple[str, str]]]:
    """Pieces and merges, once everything else was found to be as upstream writes it."""
    model = fields.section("model")
    if model.value("type", str, "BPE") != "BPE":
        raise model.error("type", f"is {model.value('type', str)!r}, expected 'BPE'")
    if fields.items("added_tokens", ()):
        raise fields.error("added_tokens", "holds some; all codes of FAST are pieces of its BPE")
    if fields.has("normalizer"):
        raise fields.error("normalizer", "is set, and would change coefficients")
    splitter = fields.section("pre_tokenizer")
    if splitter.value("type", str, "none") != "ByteLevel":
        raise splitter.error("type", "must be 'ByteLevel'")
    if splitter.value("add_prefix_space", bool, True):
        raise splitter.error("add_prefix_space", "must be false: a space is a coefficient")
    if not splitter.value("use_regex", bool, True):
        raise splitter.error("use_regex", "must be true, as upstream writes it")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.has(key):
            raise model.error(key, "is set; upstream's is null")
    for key in ("byte_fallback", "ignore_merges"):
        if model.value(key, bool, False):
            raise model.error(key, "is true; upstream's is false")
    vocabulary = _read_vocabulary(model)
    return vocabulary, _read_merges(model, vocabulary)


def _read_vocabulary(model: JsonFields) -> Mapping[str, int]:
    pieces = model.section("vocab")
    names = pieces.names
    if not 0 < len(names) <= _MOST_PIECES:
        raise model.error("vocab", f"has {len(names)} pieces, expected 1 to {_MOST_PIECES}")
    for name in names:
        if not 0 < len(name) <= _MOST_CHARACTERS:
            raise model.error(
                "vocab",
                f"has a piece of {len(name)} characters, expected 1 to {_MOST_CHARACTERS}",
            )
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise model.error("vocab", f"has the piece {name!a}, which is no text")
    vocabulary = {name: pieces.value(name, int) for name in names}
    if sorted(vocabulary.values()) != list(range(len(names))):
        raise model.error("vocab", f"must number its {len(names)} pieces from 0 without a gap")
    return vocabulary


def _read_merges(model: JsonFields, vocabulary: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    """Pairs of pieces, in either way of writing them."""
    pairs: list[tuple[str, str]] = []
    for index, one in enumerate(model.items("merges", ())):
        parts = one.split(" ") if isinstance(one, str) else one
        words = parts if isinstance(parts, list) else []
        names = [part for part in words if isinstance(part, str)]
        if len(names) != 2 or len(words) != 2:
            raise model.error(f"merges[{index}]", "must be two pieces")
        left, right = names
        if not {left, right, left + right} <= vocabulary.keys():
            raise model.error(f"merges[{index}]", "names a piece that vocab does not hold")
        pairs.append((left, right))
    return pairs
