"""The options and flags of every model family. Imports nothing heavy: it also runs for `--help`."""

from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import dataclass
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
from deft_policies.model.formats import Precision, Quantization

FAMILY_NAMES = ("openvla", "oft", "ecot")
PROMPTS = ("vicuna", "in-out", "openvla+vicuna", "openvla+in-out")
DEFAULT_METHOD = "lossless"
_METHODS = (  # as decoding/methods.py has them, which imports torch
    "autoregressive, lossless, deft, spec-vla, spec-vla-strict, spec-vla-long, "
    "spec-vla-published, fly, lvspec, small-model, specvlm, pld, token-recycling, heisd-like, "
    "kerv-like, ratio-test, within-bins, top-k, near-top, entropy-radius"
)
_OF_DECODING = {
    "--decoding": "decoding",
    "--radius": "radius",
    "--temperature": "temperature",
    "--drafts": "drafts",
    "--draft-tree": "draft_tree",
    "--draft-head": "draft_heads",
    "--draft-rope": "rope_offset",
    "--draft-key-mask": "key_mask",
    "--retrieval-index": "retrieval_index",
    "--draft-model": "draft_model",
    "--self-draft-layers": "self_draft_layers",
    "--no-guard": "is_guarded",
    "--action-rows-only": "action_rows_only",
}


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it runs. None leaves the choice to device, checkpoint or family."""

    checkpoint: str | None = None
    adapter: str | None = None
    random_weights: str | None = None
    family: str | None = None
    name: str | None = None  # what the policy calls itself; None: as its family
    statistics_key: str | None = None
    num_steps: int | None = None  # actions per answer
    num_pictures: int | None = None
    image_chain: ImageChain | None = None
    device: str | None = None
    precision: Precision | None = None
    quantization: Quantization = Quantization.NONE
    num_threads: int | None = None
    has_graphs: bool = True
    fuses_kernels: bool = True
    largest_batch: int = 8
    seed: int = 0
    # Of models that answer token by token:
    decoding: str = DEFAULT_METHOD  # a method as text: NAME:KNOB=VALUE,...
    radius: int | None = None
    temperature: float = 0.0
    drafts: tuple[DraftKind, ...] | None = None
    draft_tree: TreeShape | None = None
    draft_heads: tuple[Path, ...] = ()
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    retrieval_index: Path | None = None
    draft_model: str | None = None
    self_draft_layers: int | None = None
    is_guarded: bool = True
    action_rows_only: bool = False
    # Of models that write before they act:
    prompt: str | None = None  # one of `PROMPTS`
    max_tokens: int | None = None  # of one answer

    def of_reasoning(self) -> list[str]:
        """The flags given that say nothing to a model which writes nothing but actions."""
        given = {"--prompt": self.prompt, "--max-tokens": self.max_tokens}
        return [flag for flag, value in given.items() if value is not None]

    def of_decoding(self) -> list[str]:
        """The flags given that say nothing to a model which answers in one pass."""
        default = ModelOptions()
        return [
            flag
            for flag, name in _OF_DECODING.items()
            if getattr(self, name) != getattr(default, name)
        ]


def add_flags(group: _ArgumentGroup, family: str | None = None) -> None:
    """Declare the flags of all families; each refuses what says nothing to it."""
    group.add_argument(
        "--family",
        choices=FAMILY_NAMES,
        default=family,
        help="what kind of model it is; default: what the checkpoint's files look like",
    )
    _add_weight_flags(group)
    _add_decoding_flags(group)
    _add_reasoning_flags(group)


def _add_weight_flags(group: _ArgumentGroup) -> None:
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
        help="what happens to a frame before the processor's resize; 'none' where clients do it; "
        "default: none, of OFT's models oft",
    )
    group.add_argument("--seed", type=int, default=0, help="of drawing, and of random weights")
    group.add_argument("--no-graphs", action="store_true", help="on a GPU: run passes eagerly")
    group.add_argument(
        "--no-fused-kernels", action="store_true", help="on a GPU: PyTorch's own kernels alone"
    )
    group.add_argument(
        "--largest-batch",
        type=_at_least_one,
        default=8,
        metavar="N",
        help="on a GPU: frames in a batch that memory is set aside and passes are captured for; "
        "larger ones are answered more slowly",
    )
    group.add_argument(
        "--threads",
        type=_at_least_one,
        metavar="N",
        help="on a CPU; more than are idle is much slower; default: 1 for small models, else every "
        "core",
    )
    group.add_argument(
        "--chunk",
        type=_at_least_one,
        metavar="N",
        help="actions per answer, where the checkpoint does not tell: 1 of OpenVLA's, 8 of OFT's "
        "for LIBERO, 5 for Bridge; 25 of OFT's for ALOHA is known",
    )
    group.add_argument(
        "--pictures",
        type=_at_least_one,
        metavar="N",
        help="how many OFT's models look at: the frame, then the wrist cameras in their order",
    )


def _add_reasoning_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--prompt",
        choices=PROMPTS,
        help="what ECoT's models are asked by; with openvla+ they act at once, by OpenVLA's "
        "prompt, wherever no reasoning is asked for; default: what the checkpoint notes, else "
        "vicuna, as in all published code that serves them",
    )
    group.add_argument(
        "--max-tokens",
        type=_at_least_one,
        metavar="N",
        help="of an answer with reasoning, text and action; frames may ask for less; default: "
        "1024, or what there is room for",
    )


def _add_decoding_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--decoding",
        default=DEFAULT_METHOD,
        metavar="METHOD",
        help=f"one of {_METHODS}; or NAME:KNOB=VALUE,..., or a file that ends in .toml; "
        "default: lossless, the actions of plain decoding",
    )
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
    group.add_argument(
        "--draft-head",
        type=Path,
        action="append",
        metavar="DIR",
        help="a trained draft head (EAGLE-style or Medusa); one of each kind may be given",
    )
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
        type=_at_least_one,
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


def read_flags(namespace: Namespace) -> ModelOptions:
    """Collect the flags that `add_flags` declared."""
    given, chain, precision = namespace, namespace.image_chain, namespace.dtype
    return ModelOptions(
        checkpoint=given.checkpoint,
        adapter=given.adapter,
        random_weights=given.random_weights,
        family=given.family,
        statistics_key=given.statistics_key,
        num_steps=given.chunk,
        num_pictures=given.pictures,
        image_chain=None if chain is None else ImageChain(chain),
        device=given.device,
        precision=None if precision is None else Precision(precision),
        quantization=Quantization(given.quantization),
        num_threads=given.threads,
        has_graphs=not given.no_graphs,
        fuses_kernels=not given.no_fused_kernels,
        largest_batch=given.largest_batch,
        seed=given.seed,
        decoding=method_text(given.decoding),
        radius=given.radius,
        temperature=given.temperature,
        drafts=None if given.drafts is None else read_kinds(given.drafts),
        draft_tree=None if given.draft_tree is None else read_tree(given.draft_tree),
        draft_heads=tuple(given.draft_head or ()),
        rope_offset=RopeOffset(given.draft_rope),
        key_mask=KeyMask(given.draft_key_mask),
        retrieval_index=given.retrieval_index,
        draft_model=given.draft_model,
        self_draft_layers=given.self_draft_layers,
        is_guarded=not given.no_guard,
        action_rows_only=given.action_rows_only,
        prompt=given.prompt,
        max_tokens=given.max_tokens,
    )


def _at_least_zero(text: str) -> int:
    return _at_least(0, text)


def _at_least_one(text: str) -> int:
    return _at_least(1, text)


def _at_least(lowest: int, text: str) -> int:
    if not text.lstrip("-").isdigit() or int(text) < lowest:
        raise ArgumentTypeError(f"expected a whole number of at least {lowest}, got {text!r}")
    return int(text)


def _draft_tree(text: str) -> str:
    return _checked(read_tree, text)


def _draft_kinds(text: str) -> str:
    return _checked(read_kinds, text)


def _checked(read: Callable[[str], object], text: str) -> str:
    """The text as it is, so that it can be told again, once it can be read."""
    try:
        read(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text
