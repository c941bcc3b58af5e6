"""Reads a checkpoint's tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError
from deft_policies.model.prompt import PromptEncoder, PromptTemplate

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def load_encoder(directory: Path, template: PromptTemplate, text_vocab_size: int) -> PromptEncoder:
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
