"""Says whether an OpenVLA policy could be loaded: device, checkpoint, memory. Loads no weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from deft_policies.base import Finding, Verdict
from deft_policies.checkpoint.memory import check_memory, estimate_memory, find_free_bytes
from deft_policies.checkpoint.open import locate_checkpoint, open_checkpoint
from deft_policies.errors import PolicyError
from deft_policies.model.quantization import check_quantization
from deft_policies.model.statistics import find_statistics_key
from deft_policies.oft.recognition import check_is_openvla
from deft_policies.openvla.load import choose_device, choose_dtype
from deft_policies.openvla.options import OpenVLAOptions, WeightOptions

_GIB = 1024**3


def examine(options: OpenVLAOptions) -> list[Finding]:
    """Look at everything that loading would need."""
    findings = examine_weights(options)
    if not is_at_hand(options, findings):
        return findings
    assert options.checkpoint is not None
    source = locate_checkpoint(options.checkpoint, options.adapter)
    try:
        check_is_openvla(source.tuned, source.read_statistics(), options.num_steps)
    except PolicyError as error:
        findings.append(Finding("policy", Verdict.BAD, str(error)))
    return findings


def is_at_hand(options: WeightOptions, findings: Sequence[Finding]) -> bool:
    """Whether there are files to look at further, nothing being wrong with them so far."""
    name = options.checkpoint
    is_bad = any(one.verdict is Verdict.BAD for one in findings)
    return not is_bad and name is not None and Path(name).expanduser().is_dir()


def examine_weights(options: WeightOptions) -> list[Finding]:
    """Look at device, checkpoint, memory and statistics."""
    findings = [_tried("device", lambda: _examine_device(options))]
    if findings[0].verdict is Verdict.BAD:
        return findings
    if options.checkpoint is None:
        if options.random_weights is None:
            findings.append(Finding("checkpoint", Verdict.BAD, "none is named; give --checkpoint"))
        return findings
    if not Path(options.checkpoint).expanduser().is_dir():
        text = f"{options.checkpoint} is no directory here; it would be fetched from the hub"
        return [*findings, Finding("checkpoint", Verdict.DOUBTFUL, text)]
    return [*findings, *_examine_checkpoint(options, options.checkpoint)]


def _examine_device(options: WeightOptions) -> Finding:
    device = choose_device(options.device)
    dtype = choose_dtype(options.precision, device)
    check_quantization(options.quantization, device, dtype)
    free = find_free_bytes(device)
    memory = "" if free is None else f", {free / _GIB:.1f} GiB free"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Finding("device", Verdict.GOOD, f"{name}{memory}, torch {torch.__version__}")
    text = f"the CPU{memory}, torch {torch.__version__}; large models are slow on it"
    return Finding("device", Verdict.DOUBTFUL, text)


def _examine_checkpoint(options: WeightOptions, name: str) -> list[Finding]:
    try:
        checkpoint = open_checkpoint(name, options.adapter)
    except PolicyError as error:
        return [Finding("checkpoint", Verdict.BAD, str(error))]
    checkpoint.reader.close()
    config = checkpoint.config
    device = choose_device(options.device)
    dtype = choose_dtype(options.precision, device)
    need = estimate_memory(config, device, dtype, options.quantization)
    keys = tuple(config.statistics)

    def examine_memory() -> Finding:
        check_memory(need, device)
        text = f"needs about {need.total / _GIB:.1f} GiB on {device}"
        return Finding("memory", Verdict.GOOD, text)

    def examine_statistics() -> Finding:
        chosen = find_statistics_key(keys, options.statistics_key)
        return Finding("statistics", Verdict.GOOD, f"{chosen} of {', '.join(keys)}")

    whole = Finding("checkpoint", Verdict.GOOD, f"{name}: all tensors, tokenizer and statistics")
    findings = [whole, _tried("memory", examine_memory)]
    if options.statistics_key is None and len(keys) > 1:
        text = f"no default; every frame must name one of {', '.join(keys)}"
        findings.append(Finding("statistics", Verdict.DOUBTFUL, text))
    else:
        findings.append(_tried("statistics", examine_statistics))
    return findings


def _tried(subject: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except PolicyError as error:
        return Finding(subject, Verdict.BAD, str(error))
