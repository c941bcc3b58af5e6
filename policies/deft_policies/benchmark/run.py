"""Runs what `deft bench` was asked for: loads, replays, measures, and says what to do next."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from deft_core.datasets.flags import read_cameras
from deft_core.measures.speed import SpeedUp
from deft_core.measures.statistics import LEAST_EPISODES
from deft_core.types import ActOptions
from deft_policies.base import Policy
from deft_policies.benchmark.audit import audit, check_equal
from deft_policies.benchmark.replay import (
    Contender,
    ReplayFrame,
    generate_frames,
    read_pictures,
    read_stored,
    replay,
    with_statistics_key,
)
from deft_policies.benchmark.roofline import find_limits, has_limits, measure_rates
from deft_policies.benchmark.shipped import read_shipped
from deft_policies.benchmark.summary import summarise_decoding, summarise_speed
from deft_policies.benchmark.tables import Report
from deft_policies.commands.parse import target_flags
from deft_policies.decoding.methods import AUTOREGRESSIVE, DEFAULT_METHOD, find_method
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_float32_twin, load_token_policy
from deft_policies.families.model_policy import ModelPolicy
from deft_policies.families.openvla import OpenVLA
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from deft_policies.progress import shown

if TYPE_CHECKING:
    from deft_policies.benchmark.command import BenchRequest, FindOthers

_INTERRUPTED = 130  # the exit code of a command that was
_SHIPPED = "tiny-libero"  # the policy whose frames ship


def run_benchmark(request: BenchRequest, find_others: FindOthers) -> int:
    """Replay a benchmark and print it; return the exit code."""
    command, methods, radii = request.command, request.methods, request.radii
    flags = command.namespace
    with shown():
        policy = command.load()
        if flags.reasoning and policy.info.max_tokens is None:
            raise PolicyError(f"--reasoning: {policy.info.policy} writes nothing but actions")
        thinks = flags.reasoning or not policy.info.thinks_when_asked
        frames, source = read_frames(flags, policy)
        frames = with_statistics_key(frames, policy)
        if isinstance(policy, VlaPolicy):
            if flags.audit and DEFAULT_METHOD not in methods:
                methods = [*(methods or [policy.info.decoding]), DEFAULT_METHOD]
            contenders = _contenders(policy, methods, radii, flags.batch)
            contenders = [replace(contender, want_reasoning=thinks) for contender in contenders]
            beside, baseline = find_others(flags, policy, frames)
            contenders += beside
            policy.warm_up(methods)  # a server knows from its start what plans cost
            report = measure(
                policy, contenders, frames, flags.warm_ups, baseline, has_audit=flags.audit
            )
            if flags.audit and not report.is_interrupted:
                whole = replace(policy.options, has_graphs=False)
                audited = load_token_policy(replace(whole, precision=Precision.BFLOAT16))
                twin = load_float32_twin(whole)
                flips = audit(twin, audited, frames, contenders[0].options(frames[0]))
                report = replace(report, audit=flips)
        else:
            unused = {"--decoding": methods, "--radius": radii, "--audit": flags.audit}
            if wrong := [name for name, value in unused.items() if value]:
                raise PolicyError(
                    f"{', '.join(wrong)}: not for {policy.info.policy}, which decodes in one way; "
                    "leave it out"
                )
            contenders = [
                Contender(_name(policy.info.policy, None, size), policy, batch_size=size)
                for size in flags.batch
            ]
            report = measure(policy, contenders, frames, flags.warm_ups)
    report = replace(report, frames=source)
    following = next_command(contenders, report, flags)
    sys.stdout.write(f"{report.render(flags.stages)}\n\n{following}\n")
    if flags.json is not None:
        flags.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    if report.is_interrupted:
        return _INTERRUPTED
    return 1 if report.has_faults else 0


def next_command(contenders: Sequence[Contender], report: Report, given: Namespace) -> str:
    """The line that serves the fastest exact method, with its knobs.

    It names no method that was slower than plain decoding, nor a draft head with which every method
    was. A faster method with other answers is named, too, to be tried in episodes before it is
    served. Where no speed-up may be quoted it names none, and is the command to measure again.
    """
    target = target_flags(given)
    found = zip(contenders, report.speeds, report.decodings, strict=False)
    rows = sorted(
        (
            (speed, one, how.equal_actions)
            for one, speed, how in found
            if one.decoding is not None and one.batch_size == 1
        ),
        key=lambda row: row[0].total.mean,
    )
    plain = next((row for row in rows if row[1].decoding == AUTOREGRESSIVE), None)
    if plain is None:
        return f"next: deft serve {target}"
    speedups = [one.faster_than(plain[0]) for one in report.speeds if one is not plain[0]]
    if doubtful := [one for one in speedups if one.doubts]:
        return _measure_again(contenders, doubtful, given)
    faster = [row for row in rows if row[0].total.mean < plain[0].total.mean]
    exact = next((one for _, one, equal in faster if equal == 1.0 and is_exact(one)), None)
    lines = []
    if faster and faster[0][1] is not exact:
        _, relaxed, share = faster[0]
        lines.append(
            f"{relaxed.name} was faster, with other answers in {100 - 100 * share:.1f}%: "
            f"play episodes before a robot does: deft-client eval SUITE{_method_flags(relaxed)}"
        )
    if exact is None:
        heads = [str(head) for head in getattr(given, "draft_heads", None) or ()]
        if heads and len(rows) > 1 and not faster:
            lines.append(
                f"Nothing was faster than plain decoding with {', '.join(heads)}: do not serve "
                f"{'it' if len(heads) == 1 else 'them'}."
            )
        target = target_flags(given, "--draft-head")
    return "\n".join([*lines, f"next: deft serve {target}{_method_flags(exact or plain[1])}"])


def _measure_again(
    contenders: Sequence[Contender], doubtful: Sequence[SpeedUp], given: Namespace
) -> str:
    """What the measurement lacked, and the command that takes it again."""
    is_short = [one.num_episodes < LEAST_EPISODES for one in doubtful]
    lacks = [f"with frames of {LEAST_EPISODES} episodes or more"] if any(is_short) else []
    if any(len(one.doubts) > short for one, short in zip(doubtful, is_short, strict=True)):
        lacks.append("on an idle machine")
    words = []
    if getattr(given, "recording", None) is not None:
        words += ["--recording", str(given.recording)]
    if not any(is_short) and getattr(given, "frames", None) is not None:
        words += ["--frames", str(given.frames)]
    named = [one for one in contenders if one.decoding not in (None, AUTOREGRESSIVE)]
    for decoding in dict.fromkeys(one.decoding for one in named):
        words += ["--decoding", str(decoding)]
    for radius in dict.fromkeys(one.radius for one in named if one.radius is not None):
        words += ["--radius", str(radius)]
    return (
        f"Measure again {' and '.join(lacks)}, before you choose a method by its speed.\n"
        f"next: deft bench {target_flags(given, '--decoding', '--radius')} {shlex.join(words)}"
    )


def _method_flags(contender: Contender) -> str:
    radius = "" if contender.radius is None else f" --radius {contender.radius}"
    return f" --decoding {contender.decoding}{radius}"


def read_frames(flags: Namespace, policy: Policy) -> tuple[list[ReplayFrame], str]:
    """The observations asked for, and what they are."""
    if flags.recording is not None:
        frames = read_stored(flags.recording, flags.frames, read_cameras(flags))
        return frames, _sentence(frames, f"of {flags.recording}")
    if flags.input is not None:
        frames = read_pictures(flags.input, flags.frames)
        return frames, _sentence(frames, f"of {flags.input}")
    if policy.info.policy == _SHIPPED:
        frames = read_shipped(flags.frames)
        about = "that tiny-libero saw when it played LIBERO's objects (they ship with Deft)"
        return frames, _sentence(frames, about)
    frames = generate_frames(flags.frames)
    source = _sentence(frames, "generated, of a camera that hardly moves") + (
        " Guesses from the last action look better on them than on a robot: give --recording DATA "
        "for numbers to quote."
    )
    if not isinstance(policy, ModelPolicy):
        return frames, source
    complete = policy.model.complete
    return [replace(frame, observation=complete(frame.observation)) for frame in frames], source


def _sentence(frames: Sequence[ReplayFrame], of: str) -> str:
    num, episodes = len(frames), len({frame.episode for frame in frames})
    return f"Frames: {num} in {episodes} episode{'s' * (episodes != 1)}, {of}."


def measure(
    policy: Policy,
    contenders: Sequence[Contender],
    frames: Sequence[ReplayFrame],
    num_warm_ups: int,
    baseline: str | None = None,
    *,
    has_audit: bool = False,
) -> Report:
    """Times; of models also limits; of methods also actions compared with plain decoding's.

    With `has_audit` every answer of an exact method is compared with plain decoding's, too.
    """
    for contender in contenders:
        for frame in frames:
            contender.policy.check(frame.observation, contender.options(frame))
    runs, num_asked = replay(contenders, frames, num_warm_ups, may_stop=True), len(frames)
    frames = frames[: len(runs[0].answers)]  # an interrupted replay has some alone
    info = policy.info
    report = Report(
        details={**info.details, **info.versions, "frames": str(len(frames))},
        speeds=tuple(summarise_speed(run, frames) for run in runs),
        baseline=baseline,
        num_asked=num_asked,
    )
    if not isinstance(policy, ModelPolicy):
        return report
    weight = policy.model.network.decoder.embedding.weight
    rates = measure_rates(weight.device, weight.dtype)
    limited = runs if has_limits(policy) else ()
    rooflines = tuple(find_limits(policy, run, frames, rates) for run in limited)
    report = replace(report, rooflines=rooflines, rates=rates)
    if not isinstance(policy, VlaPolicy):
        return report
    plain = next(run for run in runs if run.contender.decoding == AUTOREGRESSIVE)
    spaces = [policy.action_space(frame.statistics_key) for frame in frames]
    model = policy.model
    bins = model.target.action_tokens if isinstance(model, OpenVLA) else None
    decodings = tuple(summarise_decoding(run, plain, spaces, bins) for run in runs)
    exact = [run for run in runs if run is not plain and _must_equal(run.contender)]
    equality = [check_equal(run, plain, frames) for run in exact if has_audit]
    return replace(report, decodings=decodings, equality=tuple(equality))


def is_exact(contender: Contender) -> bool:
    """Whether it must answer what plain decoding answers."""
    if contender.decoding is None or contender.radius:
        return False
    if isinstance(contender.policy, VlaPolicy):
        method = contender.policy.method_for(ActOptions(decoding=contender.decoding))
    else:
        method = find_method(contender.decoding)
    return method.rule.is_exact and method.temperature == 0.0


def _must_equal(contender: Contender) -> bool:
    """Whether an audit compares it with plain decoding."""
    return isinstance(contender.policy, VlaPolicy) and is_exact(contender)


def _contenders(
    policy: VlaPolicy, methods: Sequence[str], radii: Sequence[int], sizes: Sequence[int]
) -> list[Contender]:
    """Plain decoding and every method, at the radii asked for if it has one."""
    contenders = []
    for size in sizes:
        for method in dict.fromkeys((AUTOREGRESSIVE, *(methods or (policy.info.decoding,)))):
            fitting = tuple(one for one in radii if policy.has_method(method, one))
            for radius in fitting or (None,):
                name = _name(method, radius, size)
                contenders.append(Contender(name, policy, method, radius, size))
    return contenders


def _name(method: str, radius: int | None, batch_size: int) -> str:
    named = method if radius is None else f"{method} r{radius}"
    return named if batch_size == 1 else f"{named} x{batch_size}"
