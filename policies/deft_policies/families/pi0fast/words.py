"""The tokenizers that a policy names: folders below the checkpoint first, then hub ids.

Real checkpoints hold neither. Of the text tokenizer the file alone is read; what a prompt may
become is bounded before anything is encoded.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from deft_policies.checkpoint.config import TOKENIZER_FILE, load_tokenizer
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.open import download_snapshot
from deft_policies.errors import CheckpointError
from deft_policies.families.pi0fast.prompt import BOS
from deft_policies.fast.files import PROCESSOR_FILE

PREFIX, END = "Action: ", "|"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_FILES = (TOKENIZER_FILE, f"bpe_tokenizer/{TOKENIZER_FILE}", PROCESSOR_FILE)
_OF_GEMMA = {"normalizer": "Replace", "pre_tokenizer": "Split", "decoder": "Sequence"}
_DECODERS = ("Replace", "ByteFallback", "Fuse")
_MOST_DECODERS, _MOST_REPLACEMENT, _MOST_PIECE = 4, 4, 1024  # characters of one
_REMEDY = "copy the folder of PaliGemma's tokenizer"


def find_folder(checkpoint: Path, name: str) -> Path:
    """Where the files of a tokenizer lie; `CheckpointError` says where they were looked for."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{checkpoint} names the tokenizer {name!r}, expected a folder below the checkpoint or "
            "a hub id"
        )
    beside = checkpoint / name
    if beside.is_dir():
        return beside
    try:
        return download_snapshot(name, _FILES)
    except CheckpointError as error:
        raise CheckpointError(
            f"the tokenizer {name}, which {checkpoint} names, is no folder below it, and not at "
            f"hand otherwise: {error}; Gemma's is gated: accept its terms, or copy it to {beside}"
        ) from None


@dataclass(frozen=True, eq=False)
class Words:
    """The text tokenizer, and which of its ids an answer is made of."""

    tokenizer: Tokenizer
    num_text: int  # ids, without those that were added
    prefix: tuple[int, ...]  # how every answer begins
    end: int

    def code_ids(self, num_codes: int, num_skipped: int) -> list[int]:
        """The id of each FAST code: they count down from the end of the text vocabulary."""
        first = self.num_text - 1 - num_skipped
        return [first - code for code in range(num_codes)]


def read_words(folder: Path) -> Words:
    """Read `tokenizer.json`, which must split a prompt as PaliGemma's does."""
    path = folder / TOKENIZER_FILE
    fields = JsonFields.load(path, _REMEDY)
    _check_rules(fields)
    tokenizer = load_tokenizer(folder, _OF_GEMMA)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    end, prefix = ids_of(END), ids_of(PREFIX)
    if tokenizer.token_to_id(BOS) is None or len(end) != 1 or not 1 <= len(prefix) <= 8:
        raise CheckpointError(
            f"{path}: {BOS} and {END!r} must be one token each, and {PREFIX!r} a few; {_REMEDY}"
        )
    if tokenizer.decode(prefix, skip_special_tokens=False) != PREFIX:
        raise CheckpointError(f"{path} does not write {PREFIX!r} back as it was; {_REMEDY}")
    num_text = tokenizer.get_vocab_size(with_added_tokens=False)
    return Words(tokenizer, num_text, tuple(prefix), end[0])


def _check_rules(fields: JsonFields) -> None:
    """Nothing may make a text, or the name of an answer's token, as long as it likes."""
    decoders = fields.section("decoder").sections("decoders") if fields.has("decoder") else ()
    kinds = {decoder.value("type", str) for decoder in decoders}
    if len(decoders) > _MOST_DECODERS or kinds - {*_DECODERS}:
        raise fields.error("decoder", f"must have {', '.join(_DECODERS)}, as Gemma's; {_REMEDY}")
    for section in (fields.section("normalizer"), *decoders):
        length = len(section.value("content", str, ""))
        if length > _MOST_REPLACEMENT:
            raise section.error("content", f"has {length} characters, Gemma's 1; {_REMEDY}")
    pieces = fields.section("model").section("vocab").names
    added = [section.value("content", str) for section in fields.sections("added_tokens")]
    longest = max(map(len, (*pieces, *added)), default=0)
    if longest > _MOST_PIECE:
        raise fields.error("model.vocab", f"has a piece of {longest} characters; {_REMEDY}")
