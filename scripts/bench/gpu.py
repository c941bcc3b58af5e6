"""Every way of decoding at full size, beside the limits of this device and beside the goals.

Weights are random (speed does not depend on values) and acceptance is scripted, because no draft is
ever right about random weights. `python -m scripts.bench gpu` takes some minutes on a GPU; the
goals are those that `scripts.predict_gpu` computes for an H200.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from deft_client.commands.program import CommandParser
from deft_policies.benchmark.command import measure
from deft_policies.benchmark.replay import (
    Contender,
    ReplayFrame,
    generate_frames,
    with_statistics_key,
)
from deft_policies.benchmark.tables import Report
from deft_policies.commands.parse import run_command
from deft_policies.decoding.methods import AUTOREGRESSIVE
from deft_policies.families.loading import load_policy
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision, Quantization
from scripts.predict_gpu import predictions
from scripts.reproduce.published import PUBLISHED_SHARES, RELAXED_GOAL
from scripts.scripted_drafts import Script, ScriptedPolicy, find_answers
from scripts.transformers_baseline import BaselineLoop, TransformersPolicy

PROG = "python -m scripts.bench gpu"
_LEAST_RATIO = 4.0  # of a batch of 8 over one, and of ours over transformers
_STRICT, _RELAXED = "spec-vla strict", "spec-vla relaxed"  # trees of 50 nodes
_PREFILL = tuple(
    Script(f"prefill p={right} x{chains}", right, chains)
    for right in (0.6, 0.8, 1.0)
    for chains in (1, 3)
)
_OF_BATCHES = _PREFILL[2]
# By goal: weights, who is to reach it, and whether it is one of a pass behind the prefill.
_GOALS: Mapping[str, tuple[str, tuple[str, ...], bool]] = {
    "autoregressive": ("bfloat16", (AUTOREGRESSIVE,), False),
    "one decode pass": ("bfloat16", (AUTOREGRESSIVE,), True),
    "one 50-node pass": ("bfloat16", (_STRICT,), True),
    "Spec-VLA relaxed": ("bfloat16", (_RELAXED,), False),
    "prefill p = 0.8": ("bfloat16", ("prefill p=0.8 x1", "prefill p=0.8 x3"), False),
    "prefill p = 1": ("bfloat16", ("prefill p=1.0 x1", "prefill p=1.0 x3"), False),
    "autoregressive fp8": ("fp8", (AUTOREGRESSIVE,), False),
    "prefill p = 0.8 fp8": ("fp8", ("prefill p=0.8 x1", "prefill p=0.8 x3"), False),
}


def main(arguments: list[str]) -> int:
    """Measure and print; return the exit code."""
    parser = CommandParser(prog=PROG, description=__doc__, allow_abbrev=False)
    parser.add_argument("--sizes", default="openvla-7b", help="as deft bench --random-weights")
    parser.add_argument("--device", default=None)
    parser.add_argument("--frames", type=int, default=50)
    # Enough to meet every tree width that scripted drafts lead to.
    parser.add_argument("--warm-ups", type=int, default=10)
    parser.add_argument("--batch", default="1,2,4,8,16")
    parser.add_argument("--quantization", default="none,fp8,int8")
    parser.add_argument("--no-fused-kernels", action="store_true", help="as deft serve")
    parser.add_argument("--no-baseline", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, by weights")

    def run() -> int:
        given = parser.parse_args(arguments)
        reports = {}
        for name in given.quantization.split(","):
            weights = Precision.BFLOAT16.value if name == Quantization.NONE.value else name
            reports[weights] = _measure(given, Quantization(name))
            sys.stdout.write(f"{weights}, random weights, scripted drafts\n\n")
            sys.stdout.write(f"{reports[weights].render()}\n\n")
        if given.json is not None:
            found = {weights: asdict(report) for weights, report in reports.items()}
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.write("\n".join(verdicts(reports)) + "\n")
        return 0

    return run_command(PROG, run)


def _measure(given: Namespace, quantization: Quantization) -> Report:
    """All contenders on one format of the decoder's matrices."""
    sizes = sorted({1, *(int(part) for part in given.batch.split(","))})
    options = ModelOptions(
        random_weights=given.sizes,
        device=given.device,
        quantization=quantization,
        precision=Precision.BFLOAT16,
        decoding=AUTOREGRESSIVE,
        fuses_kernels=not given.no_fused_kernels,
        largest_batch=max(sizes),
    )
    started = time.perf_counter()
    policy = load_policy(options)
    assert isinstance(policy, VlaPolicy)
    policy.warm_up(methods=())
    sys.stderr.write(
        f"{PROG}: {quantization.value}: ready in {time.perf_counter() - started:.1f} s\n"
    )
    frames = with_statistics_key(generate_frames(given.frames), policy)
    contenders = list(_contenders(policy, frames, sizes))
    if quantization is Quantization.NONE:
        contenders.append(_eager(policy))
        if not given.no_baseline:
            loops = (BaselineLoop.GENERATE, BaselineLoop.STATIC)
            contenders += [Contender(one.value, TransformersPolicy(policy, one)) for one in loops]
    return measure(policy, contenders, frames, given.warm_ups, AUTOREGRESSIVE)


def _contenders(
    policy: VlaPolicy, frames: Sequence[ReplayFrame], sizes: Sequence[int]
) -> Iterator[Contender]:
    """Plain decoding and drafts in the prefill by batch size, and the published loop."""
    answers = find_answers(policy, frames)

    def scripted(script: Script, size: int = 1) -> Contender:
        drafting = ScriptedPolicy(policy, [script], answers)
        drafting.warm_up()
        return Contender(_name(script.name, size), drafting, batch_size=size)

    for size in sizes:
        yield Contender(_name(AUTOREGRESSIVE, size), policy, AUTOREGRESSIVE, batch_size=size)
    yield scripted(Script.of_published(_STRICT, PUBLISHED_SHARES["libero_goal"]))
    yield scripted(Script.of_published(_RELAXED, RELAXED_GOAL))
    for script in _PREFILL:
        yield scripted(script)
    for size in sizes[1:]:
        yield scripted(_OF_BATCHES, size)


def _eager(policy: VlaPolicy) -> Contender:
    """Plain decoding without recorded passes."""
    ours = policy.model
    assert isinstance(ours, OpenVLA)
    model = OpenVLA(VlaTarget(ours.network), ours.encode, ours.images, ours.statistics)
    slow = VlaPolicy(model)
    return Contender(f"{AUTOREGRESSIVE} eager", slow, AUTOREGRESSIVE)


def _name(what: str, batch_size: int) -> str:
    return what if batch_size == 1 else f"{what} batch {batch_size}"


def verdicts(reports: Mapping[str, Report]) -> list[str]:
    """PASS or FAIL for every goal, by weights."""
    lines = []
    for goal in predictions():
        weights, names, is_pass = _GOALS[goal.what]
        report = reports.get(weights)
        found = [one for name in names if report and (one := _median_ms(report, name, is_pass)) > 0]
        lines.append(
            f"{'PASS' if min(found) <= goal.goal_ms else 'FAIL'}  {goal.what}: {min(found):.2f} "
            f"ms, at most {goal.goal_ms} ms"
            if found
            else f"not measured  {goal.what}: at most {goal.goal_ms} ms"
        )
    report = reports.get(Precision.BFLOAT16.value)
    if report:
        alone = _median_ms(report, AUTOREGRESSIVE)
        ratios = {
            "batch 8": 8 * alone / (_median_ms(report, _name(AUTOREGRESSIVE, 8)) or float("nan")),
            "transformers": _median_ms(report, BaselineLoop.GENERATE.value) / alone,
        }
        lines += [
            f"{'PASS' if ratio >= _LEAST_RATIO else 'FAIL'}  {what}: {ratio:.2f}x, at least "
            f"{_LEAST_RATIO:g}x"
            for what, ratio in ratios.items()
            if ratio > 0
        ]
    return lines


def _median_ms(report: Report, name: str, is_pass: bool = False) -> float:
    """Of a whole answer, or of one pass behind the prefill; 0 where nobody measured it."""
    for speed, decoding in zip(report.speeds, report.decodings, strict=True):
        if speed.name == name:
            if not is_pass:
                return speed.total.p50
            assert decoding.speculation is not None
            return speed.stages["decode"].p50 / (decoding.speculation.passes_per_action - 1)
    return 0.0
