"""Instruction to prompt to token ids, exactly as in training.

The ids come from the checkpoint's `tokenizer.json` through the `tokenizers` library itself:
what wraps it has changed how Llama's tokenizers are rebuilt from release to release, the file has
not.
"""

from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Prompts were trained with a blank before the action, which is this piece (29871 in Llama's
# vocabulary), whether or not the text ends in one.
BLANK_PIECE = "▁"
BOS_PIECE = "<s>"

_OPENVLA = "In: What action should the robot take to {instruction}?\nOut:"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: What action should the "
    "robot take to {instruction}? ASSISTANT:"
)


class PromptTemplate(Enum):
    """What the instruction is wrapped in; `V01` is the first release's, on top of Vicuna."""

    OPENVLA = "openvla"
    V01 = "v01"

    def fill(self, instruction: str) -> str:
        """Return the prompt for an instruction, lower-cased and otherwise as it is."""
        template = _VICUNA if self is PromptTemplate.V01 else _OPENVLA
        return template.replace("{instruction}", instruction.lower())


class PromptEncoder:
    """Turns instructions into the ids that the model reads. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: PromptTemplate, source: Path) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._template = template
        self._bos = _find_piece(tokenizer, BOS_PIECE, source)
        self._blank = _find_piece(tokenizer, BLANK_PIECE, source)

    @staticmethod
    def load(directory: Path, template: PromptTemplate, text_vocab_size: int) -> "PromptEncoder":
        """Read a checkpoint's tokenizer, which must fit the decoder's vocabulary."""
        path = directory / TOKENIZER_FILE
        tokenizer = load_tokenizer(directory)
        # The padding id lies behind the text vocabulary and never appears in a prompt.
        if tokenizer.get_vocab_size(with_added_tokens=False) > text_vocab_size:
            raise CheckpointError(
                f"{path} has {tokenizer.get_vocab_size(with_added_tokens=False)} pieces, the "
                f"decoder has room for {text_vocab_size}; copy the tokenizer of this checkpoint"
            )
        return PromptEncoder(tokenizer, template, path)

    def encode(self, instruction: str) -> tuple[int, ...]:
        """Ids of the prompt for an instruction, the blank before the action included."""
        return self.encode_text(self._template.fill(instruction))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a text that is a prompt already."""
        ids = (self._bos, *self._tokenizer.encode(text, add_special_tokens=False).ids)
        return ids if ids[-1] == self._blank else (*ids, self._blank)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json`."""
    path = directory / TOKENIZER_FILE
    remedy = f"copy {TOKENIZER_FILE} from the checkpoint this one was fine-tuned from"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; {remedy}")
    fields = JsonFields.load(path, remedy)
    if fields.section("model").value("type", str, "unknown") != "BPE":
        raise fields.error("model.type", "is not BPE, which Llama's tokenizers are")
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
        raise CheckpointError(f"{path} is not a tokenizer ({error}); {remedy}") from None
    return tokenizer


def _find_piece(tokenizer: Tokenizer, piece: str, source: Path) -> int:
    found: int | None = tokenizer.token_to_id(piece)
    if found is None:
        raise CheckpointError(f"{source} has no piece {piece!r}; expected a Llama tokenizer")
    return found
