"""`deft bench`: replay observations through a policy and print where the time goes."""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deft_client.commands.methods import method_text
from deft_client.commands.program import CommandParser
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_policies.base import Policy
from deft_policies.benchmark.audit import AuditReport, audit
from deft_policies.benchmark.chunk_cost import ChunkCostModel
from deft_policies.benchmark.replay import (
    Contender,
    Replay,
    ReplayFrame,
    generate_frames,
    read_pictures,
    read_stored,
    replay,
    with_statistics_key,
)
from deft_policies.benchmark.roofline import CostModel, measure_rates
from deft_policies.benchmark.scripted import Script, ScriptedPolicy, find_answers
from deft_policies.benchmark.summary import Decoding, Speed, summarise_decoding, summarise_speed
from deft_policies.benchmark.tables import Report
from deft_policies.benchmark.transformers_baseline import BaselineLoop, TransformersPolicy
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.decoding.acceptance.host_waits import find_wait
from deft_policies.decoding.autoregressive import AUTOREGRESSIVE
from deft_policies.decoding.knobs import find_method
from deft_policies.errors import PolicyError
from deft_policies.oft.policy import OftPolicy
from deft_policies.openvla.load import load_float32_twin, load_policy
from deft_policies.openvla.options import Precision, read_flags
from deft_policies.openvla.policy import OpenVLAPolicy

PROG = "deft bench"


@dataclass(frozen=True)
class BenchOptions:
    """What is replayed, how, and what it is compared with."""

    sweep: "Sweep"
    num_frames: int
    num_warm_ups: int
    batch_sizes: tuple[int, ...]
    recording: Path | None
    cameras: tuple[str, ...]
    pictures: Path | None
    scripts: tuple[float, ...]  # shares of right tokens
    is_guarded: bool
    has_baseline: bool
    has_audit: bool
    json_path: Path | None


def build_parser() -> ArgumentParser:
    """Declare the flags."""
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Replay observations through a policy; where the time goes, and how far from "
        "this device's limits.",
    )
    parser.add_argument("--frames", type=int, default=30, metavar="N", help="how many at most")
    parser.add_argument("--warm-ups", type=int, default=3, metavar="N", help="not counted")
    parser.add_argument("--batch", default="1", metavar="N[,N...]", help="observations per call")
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="DATA",
        help="replay a data set's episodes (recordings, LeRobot, ...); default: generate",
    )
    add_camera_flag(parser)
    parser.add_argument("--input", type=Path, metavar="JSONL", help="replay pictures, as deft act")
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="also run transformers' own Llama of the same weights, and print ratios",
    )
    parser.add_argument(
        "--scripted-drafts",
        metavar="SHARE[,SHARE...]",
        help="also run drafts that know the answer and get this share of its tokens right, 0 to 1, "
        "in the prefill and in the place of a draft head's path",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="list every token that differs between bfloat16 (or --quantization) and float32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    return parser


@dataclass(frozen=True)
class Sweep:
    """Methods to compare, and radii for those of them that have one."""

    methods: tuple[str, ...]
    radii: tuple[int, ...]


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], Sweep]:
    """Take every `--decoding` and `--radius` out, so that several may be given; others stay."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--decoding", action="append", type=method_text, default=[])
    parser.add_argument("--radius", action="append", type=int, default=[])
    found, rest = parser.parse_known_args(list(arguments))
    return rest, Sweep(tuple(dict.fromkeys(found.decoding)), tuple(dict.fromkeys(found.radius)))


def read_options(namespace: Namespace, sweep: Sweep) -> BenchOptions:
    """Collect the flags; raises `ValueError` for numbers that make no sense."""
    batch_sizes = tuple(int(part) for part in namespace.batch.split(","))
    if namespace.frames < 1 or namespace.warm_ups < 0 or min(batch_sizes) < 1:
        raise ValueError("--frames and --batch must be 1 or more, --warm-ups 0 or more")
    if namespace.recording is not None and namespace.input is not None:
        raise ValueError("give --recording or --input, not both")
    given = namespace.scripted_drafts
    scripts = () if given is None else tuple(float(part) for part in given.split(","))
    if not all(0.0 <= share <= 1.0 for share in scripts):
        raise ValueError(f"--scripted-drafts are shares from 0 to 1, got {given}")
    return BenchOptions(
        sweep=sweep,
        num_frames=namespace.frames,
        num_warm_ups=namespace.warm_ups,
        batch_sizes=batch_sizes,
        recording=namespace.recording,
        cameras=read_cameras(namespace),
        pictures=namespace.input,
        scripts=scripts,
        is_guarded=not getattr(namespace, "no_guard", False),
        has_baseline=namespace.against is not None,
        has_audit=namespace.audit,
        json_path=namespace.json,
    )


def main(arguments: list[str]) -> int:
    """Replay a benchmark; return the exit code: 1 where the audit found a fault."""
    parser = build_parser()

    def run() -> int:
        rest, sweep = split_sweep(arguments)
        command = parse_command(parser, rest)
        try:
            options = read_options(command.namespace, sweep)
        except ValueError as error:
            parser.error(str(error))
        policy = command.load()
        frames = with_statistics_key(read_frames(options, policy), policy)
        if isinstance(policy, OpenVLAPolicy):
            report = measure_openvla(policy, frames, options)
            if options.has_audit:
                report = replace(report, audit=run_audit(command.namespace, frames))
            following = next_command(policy, report.speeds, command.namespace)
        else:
            require_plain(policy, options)
            report = measure_any(policy, frames, options)
            following = f"next: deft serve {target_flags(command.namespace)}"
        sys.stdout.write(f"{report.render()}\n{following}\n")
        if options.json_path is not None:
            options.json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
        return 1 if report.audit is not None and report.audit.faults else 0

    return run_command(PROG, run)


def next_command(policy: OpenVLAPolicy, speeds: Sequence[Speed], given: Namespace) -> str:
    """The line that serves the fastest method of those measured."""
    typed = {}
    for one in speeds:
        named = re.fullmatch(r"(\S+)(?: r(\d+))?", one.name)
        if named and policy.has_method(named[1], int(named[2]) if named[2] else None):
            radius = f" --radius {named[2]}" if named[2] else ""
            typed[one.total.p50] = f" --decoding {named[1]}{radius}"
    return f"next: deft serve {target_flags(given)}{typed[min(typed)] if typed else ''}"


def read_frames(options: BenchOptions, policy: Policy) -> list[ReplayFrame]:
    """The observations asked for."""
    if options.recording is not None:
        return read_stored(options.recording, options.num_frames, options.cameras)
    if options.pictures is not None:
        return read_pictures(options.pictures, options.num_frames)
    frames = generate_frames(options.num_frames)
    if not isinstance(policy, OftPolicy):
        return frames
    return [replace(one, observation=policy.complete(one.observation)) for one in frames]


def require_plain(policy: Policy, options: BenchOptions) -> None:
    """Raise `PolicyError` for a comparison that only OpenVLA's decoding can be part of."""
    asked = {
        "--decoding": options.sweep.methods,
        "--radius": options.sweep.radii,
        "--against": options.has_baseline,
        "--scripted-drafts": options.scripts,
        "--audit": options.has_audit,
    }
    if wrong := [name for name, value in asked.items() if value]:
        raise PolicyError(
            f"{', '.join(wrong)}: not for {policy.info.policy}, which decodes in one way; "
            "leave it out"
        )


def measure_any(policy: Policy, frames: Sequence[ReplayFrame], options: BenchOptions) -> Report:
    """Times of a policy that decodes in one way; of OFT's also its limits."""
    info = policy.info
    contenders = [
        Contender(_name(info.policy, None, size), policy, batch_size=size)
        for size in options.batch_sizes
    ]
    runs = _replay(contenders, frames, options)
    report = Report(
        details={**info.details, **info.versions, "frames": str(len(frames))},
        speeds=tuple(map(summarise_speed, runs)),
        baseline=None,
    )
    if not isinstance(policy, OftPolicy):
        return report
    weight = policy.parts.model.model.decoder.embedding.weight
    model = ChunkCostModel(policy, measure_rates(weight.device, weight.dtype))
    rooflines = tuple(model.roofline(run, frames) for run in runs)
    return replace(report, rooflines=rooflines, rates=model.rates)


def measure_openvla(
    policy: OpenVLAPolicy, frames: Sequence[ReplayFrame], options: BenchOptions
) -> Report:
    """Times, limits, and every method's actions beside those of plain decoding."""
    contenders = _contenders(policy, options)
    contenders += _scripted(policy, frames, options)
    runs = _replay(contenders, frames, options)
    weight = policy.parts.target.decoder.embedding.weight
    rates = measure_rates(weight.device, weight.dtype)
    model = CostModel(policy, rates)
    info = policy.info
    return Report(
        details={**info.details, **info.versions, "frames": str(len(frames))},
        speeds=tuple(map(summarise_speed, runs)),
        baseline=BaselineLoop.GENERATE.value if options.has_baseline else AUTOREGRESSIVE,
        decodings=_decodings(policy, runs, frames),
        rooflines=tuple(model.roofline(run, frames) for run in runs),
        rates=rates,
    )


def run_audit(namespace: Namespace, frames: Sequence[ReplayFrame]) -> AuditReport:
    """Load the same weights in float32 and in the format asked for, and compare tokens."""
    options = replace(read_flags(namespace), action_rows_only=False, has_graphs=False)
    audited = load_policy(replace(options, precision=Precision.BFLOAT16))
    return audit(load_float32_twin(options), audited, frames)


def _contenders(policy: OpenVLAPolicy, options: BenchOptions) -> list[Contender]:
    methods = options.sweep.methods or (policy.info.decoding,)
    contenders = [
        Contender(_name(method, radius, size), policy, method, radius, size)
        for size in options.batch_sizes
        for method in dict.fromkeys((AUTOREGRESSIVE, *methods))
        for radius in _radii(policy, method, options.sweep)
    ]
    if options.has_baseline:
        contenders += [
            Contender(loop.value, TransformersPolicy(policy, loop)) for loop in BaselineLoop
        ]
    return contenders


def _scripted(
    policy: OpenVLAPolicy, frames: Sequence[ReplayFrame], options: BenchOptions
) -> list[Contender]:
    """Drafts that are right to order, guarded unless asked otherwise; answers stay the same."""
    if not options.scripts:
        return []
    answers = find_answers(policy, frames)
    contenders = []
    for share in options.scripts:
        right = f"drafts {100 * share:.0f}% right"
        for script in (
            Script(f"prefill {right}", share, num_chains=1, is_guarded=options.is_guarded),
            Script.of_head(f"head {right}", share, options.is_guarded),
        ):
            contenders.append(Contender(script.name, ScriptedPolicy(policy, script, answers)))
    return contenders


def _radii(policy: OpenVLAPolicy, method: str, sweep: Sweep) -> tuple[int | None, ...]:
    """The radii asked for, if the method has one."""
    fitting = tuple(one for one in sweep.radii if policy.has_method(method, one))
    return fitting or (None,)


def _name(method: str, radius: int | None, batch_size: int) -> str:
    named = method if radius is None else f"{method} r{radius}"
    return named if batch_size == 1 else f"{named} x{batch_size}"


def _replay(
    contenders: Sequence[Contender], frames: Sequence[ReplayFrame], options: BenchOptions
) -> list[Replay]:
    for contender in contenders:
        for frame in frames:
            contender.policy.check(frame.observation, contender.options(frame))
    return replay(contenders, frames, options.num_warm_ups)


def _decodings(
    policy: OpenVLAPolicy, runs: Sequence[Replay], frames: Sequence[ReplayFrame]
) -> tuple[Decoding, ...]:
    plain = next(run for run in runs if run.contender.decoding == AUTOREGRESSIVE)
    spaces = [policy.action_space(frame.statistics_key) for frame in frames]
    return tuple(
        replace(summarise_decoding(run, plain, spaces), wait=_wait_of(run.contender.decoding))
        for run in runs
    )


def _wait_of(decoding: str | None) -> str | None:
    """Where the rule of a method that was asked for by name makes the host wait."""
    return None if decoding is None else find_wait(find_method(decoding).rule)
