"""The flags of the `openvla` policy. Imports nothing heavy: it also runs for `--help`."""

from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deft_client.commands.methods import method_text
from deft_client.image_chain import ImageChain
from deft_policies.decoding.plan import (
    OUR_KINDS,
    DraftKind,
    KeyMask,
    RopeOffset,
    TreeShape,
    read_kinds,
    read_tree,
)

_METHODS = (  # as decoding/methods.py has them, which imports torch
    "autoregressive, lossless, deft, spec-vla, spec-vla-strict, spec-vla-long, "
    "spec-vla-published, fly, lvspec, small-model, specvlm, pld, token-recycling, heisd-like, "
    "kerv-like, ratio-test, within-bins, top-k, near-top, entropy-radius"
)


class Precision(Enum):
    """Number format of the weights and the arithmetic."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(Enum):
    """Number format of the decoder's matrices in memory."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


@dataclass(frozen=True)
class WeightOptions:
    """Which weights, where and in what format. None leaves the choice to device or checkpoint."""

    checkpoint: str | None = None
    adapter: str | None = None
    random_weights: str | None = None
    statistics_key: str | None = None
    device: str | None = None
    precision: Precision | None = None
    quantization: Quantization = Quantization.NONE
    image_chain: ImageChain = ImageChain.NONE
    seed: int = 0
    has_graphs: bool = True
    fuses_kernels: bool = True
    largest_batch: int = 8
    num_threads: int | None = None
    num_steps: int | None = None  # actions per answer


@dataclass(frozen=True)
class OpenVLAOptions(WeightOptions):
    """How to load and run an OpenVLA policy."""

    name: str = "openvla"  # what the policy calls itself
    decoding: str = "lossless"  # a method as text: NAME:KNOB=VALUE,...
    draft_heads: tuple[Path, ...] = ()
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    retrieval_index: Path | None = None
    draft_model: str | None = None
    self_draft_layers: int | None = None
    drafts: tuple[DraftKind, ...] | None = None
    draft_tree: TreeShape | None = None
    is_guarded: bool = True
    radius: int | None = None
    temperature: float = 0.0
    action_rows_only: bool = False


def add_flags(group: _ArgumentGroup) -> None:
    """Declare the flags."""
    add_weight_flags(group)
    group.add_argument(
        "--decoding",
        default="lossless",
        metavar="METHOD",
        help=f"one of {_METHODS}; or NAME:KNOB=VALUE,..., or a file that ends in .toml; "
        "default: lossless, the actions of plain decoding",
    )
    group.add_argument(
        "--draft-head",
        type=Path,
        action="append",
        metavar="DIR",
        help="a trained draft head (EAGLE-style or Medusa); one of each kind may be given",
    )
    _add_drafting_flags(group)
    group.add_argument("--radius", type=_at_least_zero, metavar="BINS", help="acceptance radius")
    group.add_argument(
        "--temperature", type=float, default=0.0, help="draw tokens; default 0: greedy"
    )
    group.add_argument(
        "--action-rows-only",
        action="store_true",
        help="compute logits of action tokens alone; equal unless the model would answer with "
        "another token, which `deft bench --audit` counts",
    )


def add_weight_flags(group: _ArgumentGroup, chain: ImageChain = ImageChain.NONE) -> None:
    """Declare the flags of `WeightOptions`; frames go through `chain` unless they say otherwise."""
    group.add_argument(
        "--checkpoint", metavar="DIR|HUB-ID", help="directory in Hugging Face layout, or a hub id"
    )
    group.add_argument(
        "--adapter", metavar="DIR", help="an unmerged LoRA adapter for the checkpoint"
    )
    group.add_argument(
        "--random-weights",
        metavar="SIZES",
        help="no checkpoint: openvla-7b, small, or a directory whose config.json gives the sizes",
    )
    group.add_argument("--statistics-key", metavar="KEY", help="default action statistics")
    group.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda if there is one")
    group.add_argument(
        "--dtype", choices=[one.value for one in Precision], help="default: bfloat16 on a GPU"
    )
    group.add_argument(
        "--quantization",
        choices=[one.value for one in Quantization],
        default=Quantization.NONE.value,
        help="weight-only, of the decoder's matrices",
    )
    group.add_argument(
        "--image-chain",
        choices=[one.value for one in ImageChain],
        default=chain.value,
        help="what happens to a frame before the processor's resize; 'none' where clients do it "
        f"(default: {chain.value})",
    )
    group.add_argument("--seed", type=int, default=0, help="of drawing, and of random weights")
    group.add_argument("--no-graphs", action="store_true", help="on a GPU: run passes eagerly")
    group.add_argument(
        "--no-fused-kernels", action="store_true", help="on a GPU: PyTorch's own kernels alone"
    )
    group.add_argument(
        "--largest-batch",
        type=at_least_one,
        default=8,
        metavar="N",
        help="on a GPU: frames in a batch that memory is set aside and passes are captured for; "
        "larger ones are answered more slowly",
    )
    group.add_argument(
        "--threads", type=at_least_one, metavar="N", help="on a CPU; more than are idle is slower"
    )
    group.add_argument(
        "--chunk",
        type=at_least_one,
        metavar="N",
        help="actions per answer, where the checkpoint does not tell: 1 of OpenVLA's, 8 of OFT's "
        "for LIBERO, 5 for Bridge; 25 of OFT's for ALOHA is known",
    )


def _add_drafting_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--draft-rope",
        choices=[one.value for one in RopeOffset],
        default=RopeOffset.CORRECT.value,
        help="where a head places its guesses; 'published' as Spec-VLA's code does",
    )
    group.add_argument(
        "--draft-key-mask",
        choices=[one.value for one in KeyMask],
        default=KeyMask.CAUSAL.value,
        help="what a head may attend to; 'prefix-only' as Spec-VLA's training does",
    )
    group.add_argument(
        "--retrieval-index", type=Path, metavar="FILE", help="stored frames to draft from"
    )
    group.add_argument(
        "--draft-model",
        metavar="DIR|HUB-ID",
        help="another checkpoint that drafts (source small-model), with a tokenizer, pictures and "
        "a cache of its own; its bins must mean the same",
    )
    group.add_argument(
        "--self-draft-layers",
        type=at_least_one,
        metavar="N",
        help="draft with the decoder's own first N layers (source small-model)",
    )
    group.add_argument(
        "--drafts",
        type=_draft_kinds,
        metavar="SOURCE[,SOURCE...]",
        help="draft from these alone: "
        + ", ".join(kind.value for kind in OUR_KINDS)
        + ", or one that an installed package brings",
    )
    group.add_argument(
        "--draft-tree",
        type=_draft_tree,
        metavar="SHAPE",
        help="dynamic:LEVELS,TOP_K,GUESSES, template:LEVELS,REACH (a tree of fixed shape), "
        "branches:NUM,LEVELS, chain:LEVELS or eagle; default: the method's",
    )
    group.add_argument(
        "--no-guard", action="store_true", help="never fall back to plain decoding by measured cost"
    )


def read_flags(namespace: Namespace) -> OpenVLAOptions:
    """Collect the flags that `add_flags` declared."""
    return OpenVLAOptions(
        **vars(read_weight_flags(namespace)),
        decoding=method_text(namespace.decoding),
        draft_heads=tuple(namespace.draft_head or ()),
        rope_offset=RopeOffset(namespace.draft_rope),
        key_mask=KeyMask(namespace.draft_key_mask),
        retrieval_index=namespace.retrieval_index,
        draft_model=namespace.draft_model,
        self_draft_layers=namespace.self_draft_layers,
        drafts=namespace.drafts,
        draft_tree=namespace.draft_tree,
        is_guarded=not namespace.no_guard,
        radius=namespace.radius,
        temperature=namespace.temperature,
        action_rows_only=namespace.action_rows_only,
    )


def read_weight_flags(namespace: Namespace) -> WeightOptions:
    """Collect the flags that `add_weight_flags` declared."""
    precision = namespace.dtype
    return WeightOptions(
        checkpoint=namespace.checkpoint,
        adapter=namespace.adapter,
        random_weights=namespace.random_weights,
        statistics_key=namespace.statistics_key,
        device=namespace.device,
        precision=None if precision is None else Precision(precision),
        quantization=Quantization(namespace.quantization),
        image_chain=ImageChain(namespace.image_chain),
        seed=namespace.seed,
        has_graphs=not namespace.no_graphs,
        fuses_kernels=not namespace.no_fused_kernels,
        largest_batch=namespace.largest_batch,
        num_threads=namespace.threads,
        num_steps=namespace.chunk,
    )


def _at_least_zero(text: str) -> int:
    return _at_least(0, text)


def at_least_one(text: str) -> int:
    """Read a count; to be used as an argument's `type`."""
    return _at_least(1, text)


def _at_least(lowest: int, text: str) -> int:
    if not text.lstrip("-").isdigit() or int(text) < lowest:
        raise ArgumentTypeError(f"expected a whole number of at least {lowest}, got {text!r}")
    return int(text)


def _draft_tree(text: str) -> TreeShape:
    try:
        return read_tree(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _draft_kinds(text: str) -> tuple[DraftKind, ...]:
    try:
        return read_kinds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
