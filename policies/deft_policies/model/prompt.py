"""Instruction to prompt to token ids, exactly as in training, and answers back to text.

The ids come from the checkpoint's `tokenizer.json` through the `tokenizers` library itself:
what wraps it has changed how Llama's tokenizers are rebuilt from release to release, the file has
not.
"""

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer

from deft_policies.errors import CheckpointError

# OpenVLA's prompts were trained with a blank before the action, which is this piece (29871 in
# Llama's vocabulary), whether or not the text ends in one.
BLANK_PIECE = "▁"
BOS_PIECE, EOS_PIECE = "<s>", "</s>"

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_OPENVLA = "In: What action should the robot take to {instruction}?\nOut:"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: What action should the "
    "robot take to {instruction}? ASSISTANT:"
)


class PromptTemplate(Enum):
    """What the instruction is wrapped in; `V01` is the first release's, on top of Vicuna.

    The two of ECoT's go on with the first tag of the reasoning.
    """

    OPENVLA = "openvla"
    V01 = "v01"
    ECOT = "ecot"
    ECOT_IN_OUT = "ecot-in-out"

    @property
    def ends_in_blank(self) -> bool:
        """Whether the answer's first token was trained behind a blank."""
        return self in (PromptTemplate.OPENVLA, PromptTemplate.V01)

    def fill(self, instruction: str) -> str:
        """Return the prompt for an instruction, lower-cased and otherwise as it is."""
        is_vicuna = self in (PromptTemplate.V01, PromptTemplate.ECOT)
        text = (_VICUNA if is_vicuna else _OPENVLA).replace("{instruction}", instruction.lower())
        return text if self.ends_in_blank else f"{text} TASK:"


class PromptEncoder:
    """Turns instructions into the ids that the model reads. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: PromptTemplate, source: Path) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.template, self._source = template, source
        self._bos = self.find_piece(BOS_PIECE)
        self._blank = self.find_piece(BLANK_PIECE)
        added = tokenizer.get_added_tokens_decoder()
        self._unsaid = {number for number, token in added.items() if token.special}

    def with_template(self, template: PromptTemplate) -> "PromptEncoder":
        """The same tokenizer for other prompts."""
        return PromptEncoder(self._tokenizer, template, self._source)

    def encode(self, instruction: str) -> tuple[int, ...]:
        """Ids of the prompt for an instruction, the blank before an action included."""
        return self.encode_text(self.template.fill(instruction))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a text that is a prompt already."""
        ids = (self._bos, *self._tokenizer.encode(text, add_special_tokens=False).ids)
        if ids[-1] == self._blank or not self.template.ends_in_blank:
            return ids
        return (*ids, self._blank)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out; ids without a piece are ⟦id⟧."""
        text: str = self._tokenizer.decoder.decode(self._pieces(ids))
        return text

    def lengths(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """A text to look for words in, and how many characters each id has in it.

        Unlike in `decode`'s, a byte is a character.
        """
        pieces = ["".join(self._pieces([token])).replace(BLANK_PIECE, " ") for token in ids]
        words = [_BYTE.sub(lambda found: chr(int(found[1], 16)), piece) for piece in pieces]
        return "".join(words), [len(word) for word in words]

    def find_piece(self, piece: str) -> int:
        """The id of a piece that must be there."""
        piece_id: int | None = self._tokenizer.token_to_id(piece)
        if piece_id is None:
            raise CheckpointError(
                f"{self._source} has no piece {piece!r}; expected a Llama tokenizer"
            )
        return piece_id

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        name = self._tokenizer.id_to_token
        return [name(token) or f"⟦{token}⟧" for token in ids if token not in self._unsaid]
