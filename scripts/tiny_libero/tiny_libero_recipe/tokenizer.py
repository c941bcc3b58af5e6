"""A small tokenizer for own checkpoints, in Hugging Face files: a word is a token.

For models too small to carry Llama's 32000 pieces: the words they are taught, and bytes for
everything else. What prompts begin and end with, and each tag of a reasoning, is one token too, or
a small model would spend most of its prefill on it.
"""

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splitters

from deft_policies.checkpoint.config import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from deft_policies.model.prompt import BLANK_PIECE, BOS_PIECE, PromptEncoder, PromptTemplate
from tiny_libero_recipe.language import PATTERNS, PLACES, THINGS, prompt_ends

UNKNOWN_PIECE = "<unk>"
EOS_PIECE = "</s>"
PAD_PIECE = "<PAD>"
_SPECIAL = (UNKNOWN_PIECE, BOS_PIECE, EOS_PIECE, PAD_PIECE)
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def build_tokenizer(texts: Iterable[str], tags: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer that knows the words of some texts; other words are spelt in bytes."""
    words = sorted({BLANK_PIECE + word for text in texts for word in text.split()})
    pieces = dict.fromkeys((*_SPECIAL, *_BYTES, BLANK_PIECE, *words))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [],
            unk_token=UNKNOWN_PIECE,
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK_PIECE), normalizers.Replace(" ", BLANK_PIECE)]
    )
    tokenizer.pre_tokenizer = splitters.Split(BLANK_PIECE, "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK_PIECE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in _SPECIAL]
    )
    fixed = [text for ends in prompt_ends() for text in ends] + [f" {tag}" for tag in tags]
    # The blank behind one is swallowed: the next word brings one of its own.
    tokenizer.add_tokens([AddedToken(text, rstrip=True, normalized=False) for text in fixed])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_PIECE} $A", special_tokens=[(BOS_PIECE, vocabulary[BOS_PIECE])]
    )
    return tokenizer


def words_of_thoughts(tokenizer: Tokenizer) -> list[int]:
    """Ids that only thinking aloud meets: no prompt that is acted on at once holds one."""
    prompt = PromptEncoder(tokenizer, PromptTemplate.OPENVLA, Path("the tokenizer"))
    known = tokenizer.get_vocab()
    elsewhere = {known[piece] for piece in (*_SPECIAL, *_BYTES)}
    for pattern, thing, place in product(PATTERNS, THINGS, PLACES):
        elsewhere |= set(prompt.encode(pattern.format(thing=thing, place=place)))
    return sorted(set(known.values()) - elsewhere)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that Hugging Face's loaders expect beside a model."""
    tokenizer.save(str(directory / TOKENIZER_FILE))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS_PIECE,
        "eos_token": EOS_PIECE,
        "legacy": False,
        "pad_token": PAD_PIECE,
        "padding_side": "right",
        # Llama's own class would build the tokenizer anew from vocabulary and merges.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN_PIECE,
    }
    (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
