"""The options and flags of every model family. Imports nothing heavy: it also runs for `--help`."""

from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from deft_core.image_chain import ImageChain
from deft_core.methods import method_text
from deft_policies.decoding.kinds import OUR_KINDS, read_kinds
from deft_policies.decoding.methods import DEFAULT_METHOD, presets
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape, read_tree
from deft_policies.decoding.plugins import from_files
from deft_policies.model.formats import Precision, Quantization

FAMILY_NAMES = ("openvla", "oft", "ecot", "vla0", "qwenfast", "nora", "pi0fast")
PROMPTS = ("vicuna", "in-out", "openvla+vicuna", "openvla+in-out")
# Of a model that answers token by token; of one that writes before it acts.
OF_DECODING, OF_REASONING = "decoding", "reasoning"


def _flag(
    name: str,
    default: object = None,
    read: Callable[[Any], object] | None = None,
    of: str = "",
    **argument: Any,
) -> Any:
    """An option and its flag. `argument` goes to argparse, `read` makes the option of a text."""
    if isinstance(default, bool):
        argument["action"] = "store_false" if default else "store_true"
    if isinstance(default, Enum):
        read = type(default)
    if isinstance(read, type) and issubclass(read, Enum):
        argument["choices"] = [choice.value for choice in read]
    about = {"flag": name, "read": read, "of": of, "argument": argument}
    return field(default=default, metadata=about)


_of_decoding, _of_reasoning = partial(_flag, of=OF_DECODING), partial(_flag, of=OF_REASONING)


def _at_least(lowest: int, text: str) -> int:
    if not text.lstrip("-").isdigit() or int(text) < lowest:
        raise ArgumentTypeError(f"expected a whole number of at least {lowest}, got {text!r}")
    return int(text)


def _readable(read: Callable[[str], object], text: str) -> str:
    """Validate, but return the original text, so that commands can print it back."""
    try:
        read(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


_count = partial(_flag, type=partial(_at_least, 1), metavar="N")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it runs. None leaves the choice to device, checkpoint or family."""

    name: str | None = None  # what the policy calls itself; None: as its family
    usual_precision: Precision | None = None  # what its files ask for where --dtype does not
    family: str | None = _flag(
        "--family",
        choices=FAMILY_NAMES,
        help="what kind of model it is; default: what the checkpoint's files look like",
    )
    checkpoint: str | None = _flag(
        "--checkpoint", metavar="DIR|HUB-ID", help="directory in Hugging Face layout, or a hub id"
    )
    adapter: str | None = _flag(
        "--adapter", metavar="DIR", help="an unmerged LoRA adapter for the checkpoint"
    )
    random_weights: str | None = _flag(
        "--random-weights",
        metavar="SIZES",
        help="no checkpoint: openvla-7b, small, or a directory whose config.json gives the sizes",
    )
    statistics_key: str | None = _flag(
        "--statistics-key", metavar="KEY", help="default action statistics"
    )
    device: str | None = _flag("--device", help="cpu, cuda, cuda:1; default: cuda if there is one")
    precision: Precision | None = _flag(
        "--dtype",
        read=Precision,
        help="default: bfloat16 on a GPU and on a CPU with AMX, else float32",
    )
    quantization: Quantization = _flag(
        "--quantization", Quantization.NONE, help="weight-only, of the decoder's matrices"
    )
    image_chain: ImageChain | None = _flag(
        "--image-chain",
        read=ImageChain,
        help="what happens to a frame before the processor's resize; 'none' where clients do it; "
        "default: none, of OFT's models oft",
    )
    seed: int = _flag("--seed", 0, type=int, help="of drawing, and of random weights")
    has_graphs: bool = _flag("--no-graphs", True, help="on a GPU: run passes eagerly")
    fuses_kernels: bool | None = _flag(
        "--fused-kernels",
        action=BooleanOptionalAction,
        help="on a GPU: multiply and attend by Deft's own kernels; default: yes, of pi0fast no, "
        "because its shapes have not run on a GPU yet",
    )
    largest_batch: int = _count(
        "--largest-batch",
        8,
        help="on a GPU: answers at a time that memory is set aside and passes are captured for; "
        "further ones wait",
    )
    num_threads: int | None = _count(
        "--threads",
        help="on a CPU; more than are idle is much slower; default: 1 for small models, else every "
        "core",
    )
    num_steps: int | None = _count(
        "--chunk",
        help="actions per answer, where the checkpoint does not tell: 1 of OpenVLA's and NORA's, 5 "
        "of NORA-long's, 8 of OFT's for LIBERO, 5 for Bridge; 25 of OFT's for ALOHA is known",
    )
    num_pictures: int | None = _count(
        "--pictures",
        help="how many OFT's models look at: the frame, then the wrist cameras in their order",
    )
    decoding: str = _of_decoding(
        "--decoding",
        DEFAULT_METHOD,
        read=method_text,
        metavar="METHOD",
        help=f"one of {', '.join(presets())}; or NAME:KNOB=VALUE,..., or a file that ends in "
        f".toml; default: {DEFAULT_METHOD}, the actions of plain decoding",
    )
    radius: int | None = _of_decoding(
        "--radius", type=partial(_at_least, 0), metavar="BINS", help="acceptance radius"
    )
    temperature: float = _of_decoding(
        "--temperature", 0.0, type=float, help="draw tokens; default 0: greedy"
    )
    draft_heads: tuple[Path, ...] = _of_decoding(
        "--draft-head",
        (),
        read=tuple,
        type=Path,
        action="append",
        metavar="DIR",
        help="a trained draft head (EAGLE-style or Medusa); one of each kind may be given",
    )
    rope_offset: RopeOffset = _of_decoding(
        "--draft-rope",
        RopeOffset.CORRECT,
        help="where a head places its guesses; 'published' as Spec-VLA's code does",
    )
    key_mask: KeyMask = _of_decoding(
        "--draft-key-mask",
        KeyMask.CAUSAL,
        help="what a head may attend to; 'prefix-only' as Spec-VLA's training does",
    )
    draft_model: str | None = _of_decoding(
        "--draft-model",
        metavar="DIR|HUB-ID",
        help="another checkpoint that drafts (source small-model), with a tokenizer, pictures and "
        "a cache of its own; its bins must mean the same",
    )
    self_draft_layers: int | None = _count(
        "--self-draft-layers",
        of=OF_DECODING,
        help="draft with the decoder's own first N layers (source small-model)",
    )
    drafts: tuple[str, ...] | None = _of_decoding(
        "--drafts",
        read=read_kinds,
        type=partial(_readable, read_kinds),
        metavar="SOURCE[,SOURCE...]",
        help="draft from these alone: "
        + ", ".join((*OUR_KINDS, *from_files("SOURCES")))
        + ", or one that an installed package brings",
    )
    draft_tree: TreeShape | None = _of_decoding(
        "--draft-tree",
        read=read_tree,
        type=partial(_readable, read_tree),
        metavar="SHAPE",
        help="dynamic:LEVELS,TOP_K,GUESSES, template:LEVELS,REACH (a tree of fixed shape), "
        "branches:NUM,LEVELS, chain:LEVELS or eagle; default: the method's",
    )
    is_guarded: bool = _of_decoding(
        "--no-guard", True, help="never fall back to plain decoding by measured cost"
    )
    prompt: str | None = _of_reasoning(
        "--prompt",
        choices=PROMPTS,
        help="what ECoT's models are asked by; with openvla+ they act at once, by OpenVLA's "
        "prompt, wherever no reasoning is asked for; default: what the checkpoint notes, else "
        "vicuna, as in all published code that serves them",
    )
    max_tokens: int | None = _count(
        "--max-tokens",
        of=OF_REASONING,
        help="of an answer with reasoning, text and action; frames may ask for less; default: "
        "1024, or what there is room for",
    )

    grammar: str = _flag(
        "--grammar",
        "on",
        choices=("on", "off"),
        help="of answers in FAST codes: on, nothing but a whole chunk can be written; off, as "
        "published, what is no chunk is an error; default: on",
    )

    pads_state: bool = _flag(
        "--padded-state",
        False,
        help="of pi0-FAST: the prompt has the state padded with zeros, as LeRobot 0.4 wrote it",
    )

    def set_flags(self, *names: str) -> list[str]:
        """Explicitly set flags, of those that `names` has by flag or kind."""
        flags = [flag.metadata for flag in _FLAGS if getattr(self, flag.name) != flag.default]
        return [about["flag"] for about in flags if about["of"] in names or about["flag"] in names]


_FLAGS = [flag for flag in fields(ModelOptions) if flag.metadata]


def add_flags(group: _ArgumentGroup, family: str | None = None) -> None:
    """Declare the flags of all families; each refuses those that it ignores."""
    for option in _FLAGS:
        about, default = option.metadata, option.default
        if isinstance(default, Enum):
            default = default.value
        elif default == ():
            default = None  # argparse appends to it
        group.add_argument(about["flag"], dest=option.name, default=default, **about["argument"])
    group.set_defaults(family=family)


def read_flags(namespace: Namespace) -> ModelOptions:
    """Collect the flags that `add_flags` declared."""
    values: dict[str, Any] = {}
    for option in _FLAGS:
        value, read = getattr(namespace, option.name), option.metadata["read"]
        if value is not None:
            values[option.name] = value if read is None else read(value)
    return ModelOptions(**values)
