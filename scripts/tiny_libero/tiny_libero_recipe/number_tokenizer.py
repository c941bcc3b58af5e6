"""A small tokenizer in Qwen's format, for prompts and answers of VLA-0.

Digits and the space are a token each, and so are the words that it is taught; other words are spelt
in bytes. What every prompt begins and ends with is one token: the text stays word for word.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as splitters

from deft_policies.checkpoint.config import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from deft_policies.families.vla0.prompt import END, IMAGE_PAD, prompt_text
from deft_policies.families.vla0.run_folder import RunFolder

HIDDEN = "?"  # stands for a token of an answer that is not shown in training
PAD_PIECE = "<|endoftext|>"
_VISION = ("<|vision_start|>", "<|vision_end|>")
_SPECIAL = (PAD_PIECE, "<|im_start|>", END, *_VISION, IMAGE_PAD, "<|video_pad|>")
# Qwen's own split: a digit stands alone, and a blank goes with the word behind it.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_number_tokenizer(texts: Iterable[str], run: RunFolder) -> Tokenizer:
    """A tokenizer that knows the words of some instructions, and the prompt of a run."""
    bytes_of = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    split = splitters.Sequence([splitters.Split(Regex(_SPLIT), "isolated"), bytes_of])
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    pieces = dict.fromkeys((*sorted(splitters.ByteLevel.alphabet()), *sorted(words)))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in _SPECIAL])
    begin, rest = prompt_text(run, "").split(_VISION[0])
    fixed = (begin, rest.split(_VISION[1])[1])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in fixed])
    return tokenizer


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    """Of a token that it is known to have."""
    found: int = tokenizer.get_vocab()[piece]
    return found


def write_number_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that Hugging Face's loaders expect beside a model."""
    tokenizer.save(str(directory / TOKENIZER_FILE))
    settings = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": 4096,
        "pad_token": PAD_PIECE,
        # Qwen's class would split the text anew before it looks words up.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
