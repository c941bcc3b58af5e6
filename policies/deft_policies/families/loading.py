"""From options to a policy, and the one place where a model's family is found."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import torch

from deft_policies.base import Finding, Verdict
from deft_policies.checkpoint.drafts import (
    is_block,
    is_medusa,
    load_block,
    load_head,
    load_medusa,
)
from deft_policies.checkpoint.open import (
    CheckpointSource,
    check_memory,
    find_free_bytes,
    hub_bytes,
    is_hub_id,
    locate_checkpoint,
)
from deft_policies.checkpoint.tensor_file import digest_weights
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.plugins import broken_plugins
from deft_policies.decoding.target import Target, self_draft_target
from deft_policies.errors import CheckpointError, PolicyError
from deft_policies.families.ecot import EcotFamily
from deft_policies.families.family import DTYPES, Family, choose_device, choose_precision
from deft_policies.families.model import TokenModel
from deft_policies.families.model_policy import ModelPolicy
from deft_policies.families.nora.family import NoraFamily
from deft_policies.families.oft.family import OftFamily
from deft_policies.families.oft.model import Oft
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.openvla import OpenVLA, OpenVLAFamily, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.pi0fast.family import Pi0FastFamily
from deft_policies.families.policy import VlaPolicy, choose_method
from deft_policies.families.qwenfast.family import QwenFastFamily
from deft_policies.families.vla0.family import Vla0Family
from deft_policies.model.formats import Quantization
from deft_policies.model.quantization import check_quantization
from deft_policies.model.statistics import find_statistics_key
from deft_policies.progress import doing

Judged = tuple[Verdict, str]  # of something examined

_log = logging.getLogger(__name__)
_GIB = 1024**3
# On a CPU, passes of narrower decoders are so short that threads gain little by sharing one; and
# where other work wants the cores, they wait for each other many times longer than they compute.
_WIDE = 1024
# In the order in which they are asked whether files are theirs; the last one takes what is left.
FAMILIES: tuple[type[Family], ...] = (
    Vla0Family,
    Pi0FastFamily,
    QwenFastFamily,
    NoraFamily,
    EcotFamily,
    OftFamily,
    OpenVLAFamily,
)


def find_family(source: CheckpointSource | None, options: ModelOptions) -> type[Family]:
    """The family that the options name, or else the first that the files look like."""
    for family in FAMILIES:
        if family.name == options.family:
            return family
        if options.family is None and family.matches(source, options):
            return family
    names = ", ".join(entry.name for entry in FAMILIES)
    raise CheckpointError(f"unknown family {options.family!r}; known: {names}")


def open_model(options: ModelOptions) -> Family:
    """Check everything that can be checked before weights are read."""
    if (options.checkpoint is None) == (options.random_weights is None):
        raise CheckpointError(
            "give one of --checkpoint (a directory or hub id) and --random-weights (sizes)"
        )
    source = None
    if options.checkpoint is not None:
        source = locate_checkpoint(options.checkpoint, options.adapter)
    return find_family(source, options)(source, options)


def load_policy(options: ModelOptions) -> ModelPolicy:
    """Load what the options name; what needs no weights to be checked is checked before them."""
    method = choose_method(options)
    _check_draft_files(options)
    device = choose_device(options.device)
    if options.precision is not None:
        check_quantization(options.quantization, device, DTYPES[options.precision])
    doing("looking at the checkpoint's files")
    family = open_model(options)
    _choose_threads(options, device, family)
    precision, reason = choose_precision(options, device)
    dtype = DTYPES[precision]
    check_quantization(options.quantization, device, dtype)
    _check_memory(family, options, device, dtype)
    keys = tuple(family.config.statistics)
    if options.statistics_key is not None:
        find_statistics_key(keys, options.statistics_key)
    elif len(keys) > 1:
        _log.warning(
            "no --statistics-key is given, so every request must name one of %s", ", ".join(keys)
        )
    draft_family = None if options.draft_model is None else _open_draft_model(options)
    # The files are hashed on other threads while they are loaded.
    with _digesting(family, draft_family, options.draft_heads) as digests:
        model = family.load(device, dtype)
        policy: ModelPolicy
        if isinstance(model, Oft):
            policy = OftPolicy(model, options)
        else:
            assert isinstance(model, TokenModel)
            doing("loading what drafts")
            if draft_family is not None:
                model.draft_with(draft_family.load(device, dtype, model.runner))
            policy = VlaPolicy(model, options, _load_drafts(options, model), method)
        policy.reason_for_dtype = reason
        doing("hashing the files of the weights")
        policy.digests = {name: digest.result() for name, digest in digests.items()}
    _log.info("served in %s (%s)", precision.value, reason)
    if isinstance(policy, VlaPolicy):
        _log.info("answers of exact methods: %s", policy.model.target.describe_equality())
    return policy


def load_token_policy(options: ModelOptions) -> VlaPolicy:
    """The same for what decodes tokens; `PolicyError` for a model that answers in one pass."""
    policy = load_policy(options)
    if not isinstance(policy, VlaPolicy):
        raise PolicyError(f"{policy.model.family} answers in one pass and decodes no tokens")
    return policy


def _open_draft_model(options: ModelOptions) -> Family:
    return open_model(
        replace(
            options,
            checkpoint=options.draft_model,
            adapter=None,
            random_weights=None,
            family=None,
        )
    )


@contextmanager
def _digesting(
    family: Family, draft_family: Family | None, heads: Sequence[Path]
) -> Iterator[Mapping[str, "Future[str]"]]:
    """Digests of all weights that are read from files, by the name that /v1/info gives each.

    Given up where the block raises, so that a command that fails ends at once.
    """
    unwanted = Event()
    folders = {"digest of weights": family.weight_folders}
    folders |= {f"digest of head {head.name}": [head] for head in heads}
    if draft_family is not None:
        folders["digest of draft model"] = draft_family.weight_folders
    executor = ThreadPoolExecutor()
    started = {
        name: executor.submit(digest_weights, places, unwanted)
        for name, places in folders.items()
        if places
    }
    executor.shutdown(wait=False)
    try:
        yield started
    except BaseException:
        unwanted.set()
        raise


def _choose_threads(options: ModelOptions, device: torch.device, family: Family) -> None:
    """Set the number of threads. Loading a model measures which rows get equal bits with it."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    elif device.type == "cpu" and family.config.llm.width < _WIDE:
        torch.set_num_threads(1)


def load_float32_twin(options: ModelOptions) -> VlaPolicy:
    """The same weights in float32 and not quantised: what other formats are audited against."""
    plain = replace(options, quantization=Quantization.NONE)
    device, is_drawn = choose_device(options.device), options.random_weights is not None
    # Random numbers depend on the format they are drawn in, so these are drawn in the other one.
    model = open_model(plain).load(device, torch.bfloat16 if is_drawn else torch.float32)
    if is_drawn and isinstance(model, OpenVLA):
        model = OpenVLA(
            VlaTarget(model.network.float()), model.encode, model.images, model.statistics
        )
    assert isinstance(model, TokenModel)
    return VlaPolicy(model, plain, method=find_method(AUTOREGRESSIVE))


def _load_drafts(options: ModelOptions, model: TokenModel) -> DraftModels:
    target, network, draft = model.target, model.network, model.draft
    like, width = network.decoder.embedding.weight, network.config.llm.width
    small: Target | None = None if draft is None else draft.target
    if options.self_draft_layers is not None:
        small = self_draft_target(target, options.self_draft_layers)
    drafts = DraftModels(
        rope_offset=options.rope_offset, key_mask=options.key_mask, small_model=small
    )
    for directory in options.draft_heads:
        if is_block(directory):
            drafts = replace(drafts, block=load_block(directory, target.decoder.sizes, like))
        elif is_medusa(directory):
            drafts = replace(drafts, medusa=load_medusa(directory, width, like))
        else:
            drafts = replace(drafts, head=load_head(directory, width, like))
    return drafts


def _check_draft_files(options: ModelOptions) -> None:
    """Raise `CheckpointError` for a head or an index that is not there, and two small models."""
    if options.draft_model is not None and options.self_draft_layers is not None:
        raise CheckpointError("give --draft-model or --self-draft-layers: there is one small model")
    for head in options.draft_heads:
        if not head.is_dir():
            raise CheckpointError(
                f"--draft-head {head}: no such directory; `deft train export` writes one"
            )


def examine(options: ModelOptions) -> list[Finding]:
    """Say whether `load_policy` could work: device, files, memory, statistics."""
    findings = [_tried("device", lambda: _examine_device(options))]
    if broken := broken_plugins():
        findings.append(Finding("plugins", Verdict.DOUBTFUL, "; ".join(broken)))
    name = options.checkpoint
    if findings[0].verdict is Verdict.BAD or (name is None and options.random_weights is not None):
        return findings
    if name is None:
        return [*findings, Finding("checkpoint", Verdict.BAD, "none is named; give --checkpoint")]
    if is_hub_id(name):
        return [*findings, _tried("checkpoint", lambda: _examine_hub(name))]
    try:
        family = open_model(options)
    except PolicyError as error:
        return [*findings, Finding("checkpoint", Verdict.BAD, str(error))]
    text = f"{name}: all tensors, tokenizer and statistics of {family.summary}"
    return [
        *findings,
        Finding("checkpoint", Verdict.GOOD, text),
        *family.findings(),
        _tried("memory", lambda: _examine_memory(family, options)),
        _tried("statistics", lambda: _examine_statistics(family, options)),
    ]


def _examine_hub(name: str) -> Judged:
    size = hub_bytes(name)
    if not size:
        return Verdict.GOOD, f"{name}: a model of the hub whose files are in the cache here"
    text = f"{name}: {size / _GIB:.1f} GiB would be fetched from the hub; nothing of it is examined"
    return Verdict.DOUBTFUL, text


def _examine_device(options: ModelOptions) -> Judged:
    device = choose_device(options.device)
    precision, reason = choose_precision(options, device)
    check_quantization(options.quantization, device, DTYPES[precision])
    free = find_free_bytes(device)
    memory = "" if free is None else f", {free / _GIB:.1f} GiB free"
    format_ = f"{precision.value} ({reason})"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Verdict.GOOD, f"{name}{memory}, torch {torch.__version__}, {format_}"
    text = f"the CPU{memory}, torch {torch.__version__}, {format_}; large models are slow on it"
    return Verdict.DOUBTFUL, text


def _examine_memory(family: Family, options: ModelOptions) -> Judged:
    device = choose_device(options.device)
    precision, reason = choose_precision(options, device)
    need = _check_memory(family, options, device, DTYPES[precision])
    parts = ", ".join(f"{size / _GIB:.1f} of {name}" for name, size in need.items())
    total = f"{sum(need.values()) / _GIB:.1f} GiB on {device}"
    return Verdict.GOOD, f"needs about {total} in {precision.value} ({reason}): {parts}"


def _check_memory(
    family: Family, options: ModelOptions, device: torch.device, dtype: torch.dtype
) -> dict[str, int]:
    """Weights, and on a GPU what captured passes set aside."""
    is_captured = device.type == "cuda" and options.has_graphs
    planned = family.planned_bytes(dtype) if is_captured else None
    return check_memory(family.places, device, dtype, options.quantization, planned)


def _examine_statistics(family: Family, options: ModelOptions) -> Judged:
    keys = tuple(family.config.statistics)
    if options.statistics_key is None and len(keys) > 1:
        text = f"no default; every frame must name one of {', '.join(keys)}"
        return Verdict.DOUBTFUL, text
    chosen = find_statistics_key(keys, options.statistics_key)
    return Verdict.GOOD, f"{chosen} of {', '.join(keys)}"


def _tried(subject: str, look: Callable[[], Judged]) -> Finding:
    try:
        return Finding(subject, *look())
    except PolicyError as error:
        return Finding(subject, Verdict.BAD, str(error))
