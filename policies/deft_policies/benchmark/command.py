"""`deft bench`: replay observations through a policy and print where the time goes."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deft_client.commands.methods import method_text
from deft_client.commands.program import CommandParser
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.types import ActOptions
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
from deft_policies.benchmark.summary import summarise_decoding, summarise_speed
from deft_policies.benchmark.tables import Report
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.decoding.methods import AUTOREGRESSIVE, DEFAULT_METHOD
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_float32_twin, load_policy
from deft_policies.families.model import TokenModel
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision

PROG = "deft bench"


# Who takes part beside the methods, and the name of the baseline.
Others = tuple[list[Contender], str]
FindOthers = Callable[[Namespace, VlaPolicy, Sequence[ReplayFrame]], Others]


def build_parser() -> ArgumentParser:
    """Declare the flags."""
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Replay observations through a policy; where the time goes, and how far from "
        "this device's limits.",
    )
    parser.add_argument("--frames", type=int, default=50, metavar="N", help="how many at most")
    parser.add_argument("--warm-ups", type=int, default=3, metavar="N", help="not counted")
    parser.add_argument(
        "--batch", type=_sizes, default="1", metavar="N[,N...]", help="observations per call"
    )
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="DATA",
        help="replay a data set's episodes (recordings, LeRobot, ...); default: generate",
    )
    add_camera_flag(parser)
    parser.add_argument("--input", type=Path, metavar="JSONL", help="replay pictures, as deft act")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="list every token that differs between bfloat16 (or --quantization) and float32, and "
        "every answer of an exact method that is not plain decoding's",
    )
    parser.add_argument(
        "--reasoning",
        action="store_true",
        help="have a policy that acts at once think aloud, where it can",
    )
    parser.add_argument(
        "--stages",
        action="store_true",
        help="also print the time of each stage beside this device's limits, and accepted lengths "
        "by position",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    return parser


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[str], list[int]]:
    """Take every `--decoding` and `--radius` out, so that several may be given; others stay."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--decoding", action="append", type=method_text, default=[])
    parser.add_argument("--radius", action="append", type=int, default=[])
    found, rest = parser.parse_known_args(list(arguments))
    return rest, list(dict.fromkeys(found.decoding)), list(dict.fromkeys(found.radius))


def main(arguments: list[str]) -> int:
    """Replay a benchmark; return the exit code: 1 where the audit found a fault."""
    return bench(build_parser(), arguments)


def bench(
    parser: ArgumentParser,
    arguments: list[str],
    find_others: FindOthers = lambda given, policy, frames: ([], AUTOREGRESSIVE),
) -> int:
    """The same with a parser that may know more flags, and with whom these add."""

    def run() -> int:
        rest, methods, radii = split_sweep(arguments)
        command = parse_command(parser, rest)
        given = command.namespace
        if given.frames < 1 or given.warm_ups < 0 or min(given.batch) < 1:
            parser.error("--frames and --batch must be 1 or more, --warm-ups 0 or more")
        if given.recording is not None and given.input is not None:
            parser.error("give --recording or --input, not both")
        policy = command.load()
        if given.reasoning and policy.info.max_tokens is None:
            raise PolicyError(f"--reasoning: {policy.info.policy} writes nothing but actions")
        thinks = given.reasoning or not policy.info.thinks_when_asked
        frames = with_statistics_key(read_frames(given, policy), policy)
        if isinstance(policy, VlaPolicy) and isinstance(policy.model, TokenModel):
            if given.audit and DEFAULT_METHOD not in methods:
                methods = [*(methods or [policy.info.decoding]), DEFAULT_METHOD]
            contenders = _contenders(policy, methods, radii, given.batch)
            contenders = [replace(one, want_reasoning=thinks) for one in contenders]
            beside, baseline = find_others(given, policy, frames)
            contenders += beside
            policy.warm_up(methods)  # a server knows from its start what plans cost
            report = measure(
                policy, contenders, frames, given.warm_ups, baseline, has_audit=given.audit
            )
            if given.audit:
                whole = replace(policy.options, has_graphs=False)
                audited = load_policy(replace(whole, precision=Precision.BFLOAT16))
                twin = load_float32_twin(whole)
                found = audit(twin, audited, frames, contenders[0].options(frames[0]))
                report = replace(report, audit=found)
        else:
            asked = {"--decoding": methods, "--radius": radii, "--audit": given.audit}
            if wrong := [name for name, value in asked.items() if value]:
                raise PolicyError(
                    f"{', '.join(wrong)}: not for {policy.info.policy}, which decodes in one way; "
                    "leave it out"
                )
            contenders = [
                Contender(_name(policy.info.policy, None, size), policy, batch_size=size)
                for size in given.batch
            ]
            report = measure(policy, contenders, frames, given.warm_ups)
        following = next_command(contenders, report, given)
        sys.stdout.write(f"{report.render(given.stages)}\n\n{following}\n")
        if given.json is not None:
            given.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
        return 1 if report.has_faults else 0

    return run_command(PROG, run)


def next_command(contenders: Sequence[Contender], report: Report, given: Namespace) -> str:
    """The line that serves the fastest method with plain decoding's answers.

    It names no method where no speed-up can be told. A faster method with other answers is named
    beside it, for play before it is served.
    """
    found = zip(contenders, report.speeds, report.decodings, strict=False)
    asked_for = sorted(
        (
            (speed, one, how.equal_actions)
            for one, speed, how in found
            if one.decoding is not None and one.batch_size == 1
        ),
        key=lambda row: row[0].total.mean,
    )
    target = target_flags(given)
    equal = [(speed, one) for speed, one, share in asked_for if share == 1.0]
    plain = next((one for one in report.speeds if one.name == report.baseline), None)
    flags = ""
    if equal and plain is not None:
        speed, one = equal[0]
        if speed.name == plain.name or not speed.faster_than(plain).doubts:
            flags = _method_flags(one)
    lines = [f"next: deft serve {target}{flags}"]
    if asked_for and asked_for[0][2] < 1.0:
        relaxed = asked_for[0][1]
        lines.insert(
            0,
            f"{relaxed.name} was faster, with other answers in {100 - 100 * asked_for[0][2]:.1f}%: "
            f"play episodes before a robot does: deft-client eval SUITE{_method_flags(relaxed)}",
        )
    return "\n".join(lines)


def _method_flags(contender: Contender) -> str:
    radius = "" if contender.radius is None else f" --radius {contender.radius}"
    return f" --decoding {contender.decoding}{radius}"


def read_frames(given: Namespace, policy: Policy) -> list[ReplayFrame]:
    """The observations asked for."""
    if given.recording is not None:
        return read_stored(given.recording, given.frames, read_cameras(given))
    if given.input is not None:
        return read_pictures(given.input, given.frames)
    frames = generate_frames(given.frames)
    if not isinstance(policy, VlaPolicy):
        return frames
    complete = policy.model.complete
    return [replace(one, observation=complete(one.observation)) for one in frames]


def measure(
    policy: Policy,
    contenders: Sequence[Contender],
    frames: Sequence[ReplayFrame],
    num_warm_ups: int,
    baseline: str | None = None,
    *,
    has_audit: bool = False,
) -> Report:
    """Times; of models also limits; of methods also actions beside those of plain decoding.

    With `has_audit` every answer of an exact method is compared with plain decoding's, too.
    """
    for contender in contenders:
        for frame in frames:
            contender.policy.check(frame.observation, contender.options(frame))
    runs = replay(contenders, frames, num_warm_ups)
    info = policy.info
    report = Report(
        details={**info.details, **info.versions, "frames": str(len(frames))},
        speeds=tuple(summarise_speed(run, frames) for run in runs),
        baseline=baseline,
    )
    if not isinstance(policy, VlaPolicy):
        return report
    weight = policy.model.network.decoder.embedding.weight
    rates = measure_rates(weight.device, weight.dtype)
    known = runs if has_limits(policy) else ()
    rooflines = tuple(find_limits(policy, run, frames, rates) for run in known)
    report = replace(report, rooflines=rooflines, rates=rates)
    if not isinstance(policy.model, TokenModel):
        return report
    plain = next(run for run in runs if run.contender.decoding == AUTOREGRESSIVE)
    spaces = [policy.action_space(frame.statistics_key) for frame in frames]
    decodings = tuple(summarise_decoding(run, plain, spaces) for run in runs)
    exact = [run for run in runs if run is not plain and _is_exact(run.contender)]
    equality = [check_equal(run, plain, frames) for run in exact if has_audit]
    return replace(report, decodings=decodings, equality=tuple(equality))


def _is_exact(contender: Contender) -> bool:
    """Whether it must answer what plain decoding answers."""
    if contender.decoding is None or not isinstance(contender.policy, VlaPolicy):
        return False
    method = contender.policy.method_for(ActOptions(decoding=contender.decoding))
    is_greedy = method.temperature == 0.0
    return method.rule.is_exact and is_greedy and not contender.radius


def _contenders(
    policy: VlaPolicy, methods: Sequence[str], radii: Sequence[int], sizes: Sequence[int]
) -> list[Contender]:
    """Plain decoding and every method, at the radii asked for if it has one."""
    found = []
    for size in sizes:
        for method in dict.fromkeys((AUTOREGRESSIVE, *(methods or (policy.info.decoding,)))):
            fitting = tuple(one for one in radii if policy.has_method(method, one))
            for radius in fitting or (None,):
                name = _name(method, radius, size)
                found.append(Contender(name, policy, method, radius, size))
    return found


def _name(method: str, radius: int | None, batch_size: int) -> str:
    named = method if radius is None else f"{method} r{radius}"
    return named if batch_size == 1 else f"{named} x{batch_size}"


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
