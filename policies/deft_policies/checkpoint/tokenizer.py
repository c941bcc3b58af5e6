"""A small tokenizer in Llama's manner for own checkpoints, in Hugging Face files.

For models too small to carry Llama's 32000 pieces: the words of their instructions, and bytes for
everything else. What all prompts begin and end with is one piece each, or a small model would spend
most of its prefill on it.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splitters
from tokenizers.trainers import BpeTrainer

from deft_policies.model.prompt import (
    BLANK_PIECE,
    BOS_PIECE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    PromptTemplate,
)

UNKNOWN_PIECE = "<unk>"
EOS_PIECE = "</s>"
PAD_PIECE = "<PAD>"
_SPECIAL = (UNKNOWN_PIECE, BOS_PIECE, EOS_PIECE, PAD_PIECE)
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def build_tokenizer(instructions: Iterable[str], num_pieces: int = 512) -> Tokenizer:
    """Learn the pieces of these instructions and their prompts: at most `num_pieces`.

    Any other text falls back to bytes, so nothing is unknown.
    """
    prompts = [PromptTemplate.OPENVLA.fill(instruction) for instruction in instructions]
    learnt = _learn_pieces(prompts, num_pieces)
    merges = [(left, right) for left, right in json.loads(learnt.to_str())["model"]["merges"]]
    by_id = sorted(learnt.get_vocab().items(), key=lambda item: item[1])
    pieces = dict.fromkeys((*_SPECIAL, *_BYTES, BLANK_PIECE, *(piece for piece, _ in by_id)))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=UNKNOWN_PIECE, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = _normalizer()
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
    start, end = _shared_ends(prompts)
    # The blank after a start is swallowed: the next word brings one of its own.
    tokenizer.add_tokens([AddedToken(start, rstrip=True, normalized=False)] if start else [])
    tokenizer.add_tokens([AddedToken(end, normalized=False)] if end else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_PIECE} $A", special_tokens=[(BOS_PIECE, vocabulary[BOS_PIECE])]
    )
    return tokenizer


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
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": UNKNOWN_PIECE,
    }
    (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [normalizers.Prepend(BLANK_PIECE), normalizers.Replace(" ", BLANK_PIECE)]
    )


def _shared_ends(prompts: list[str]) -> tuple[str, str]:
    """What all prompts begin with, to a word's end, and what all end with, from a word's start."""
    start = os.path.commonprefix(prompts)
    end = os.path.commonprefix([prompt[::-1] for prompt in prompts])[::-1]
    return start.rpartition(" ")[0], "".join(end.partition(" ")[1:])


def _learn_pieces(prompts: list[str], num_pieces: int) -> Tokenizer:
    """Merges within words only, so that a word is the same pieces whatever follows it.

    Texts are split while learning, not later on: no piece then reaches across a split.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = _normalizer()
    punctuation = Regex(rf"[^\w{BLANK_PIECE}]+")
    learner.pre_tokenizer = splitters.Sequence(
        [
            splitters.Split(BLANK_PIECE, "merged_with_next"),
            splitters.Split(punctuation, "isolated"),
        ]
    )
    room = num_pieces - len(_SPECIAL) - len(_BYTES)
    learner.train_from_iterator(prompts, BpeTrainer(vocab_size=room, show_progress=False))
    return learner
