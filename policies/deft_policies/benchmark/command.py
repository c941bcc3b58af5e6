"""`deft bench`: replay observations through a policy and print where the time goes."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from deft_policies.base import Policy
from deft_policies.benchmark.audit import AuditReport, audit
from deft_policies.benchmark.device import DeviceRates, measure_rates
from deft_policies.benchmark.frames import (
    Frame,
    generate_frames,
    read_pictures,
    read_recordings,
    with_statistics_key,
)
from deft_policies.benchmark.options import (
    PROG,
    BenchOptions,
    Sweep,
    build_parser,
    read_options,
    split_sweep,
)
from deft_policies.benchmark.report import Report
from deft_policies.benchmark.roofline import CostModel
from deft_policies.benchmark.runs import Contender, Run, replay
from deft_policies.benchmark.scripted_policy import Script, find_answers, script_policy
from deft_policies.benchmark.summary import Decoding, summarise_decoding, summarise_speed
from deft_policies.commands import parse_command, run_command
from deft_policies.openvla.load import load_float32_twin, load_policy
from deft_policies.openvla.options import Precision, read_flags
from deft_policies.openvla.policy import OpenVLAPolicy
from deft_policies.openvla.transformers_baseline import BaselineLoop, TransformersPolicy

PLAIN = "autoregressive"


def main(arguments: list[str]) -> int:
    """Run a benchmark; return the exit code: 1 where the audit found a fault."""
    parser = build_parser()

    def run() -> int:
        rest, sweep = split_sweep(arguments)
        command = parse_command(parser, rest)
        try:
            options = read_options(command.namespace, sweep)
        except ValueError as error:
            parser.error(str(error))
        policy = command.load()
        frames = with_statistics_key(read_frames(options), policy)
        if isinstance(policy, OpenVLAPolicy):
            report = measure_openvla(policy, frames, options)
            if options.has_audit:
                report = replace(report, audit=run_audit(command.namespace, frames))
        else:
            report = measure_any(policy, frames, options)
        sys.stdout.write(report.render() + "\n")
        if options.json_path is not None:
            options.json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
        return 1 if report.audit is not None and report.audit.faults else 0

    return run_command(PROG, run)


def read_frames(options: BenchOptions) -> list[Frame]:
    """The observations asked for."""
    if options.recording is not None:
        return read_recordings(options.recording, options.num_frames)
    if options.pictures is not None:
        return read_pictures(options.pictures, options.num_frames)
    return generate_frames(options.num_frames)


def measure_any(policy: Policy, frames: Sequence[Frame], options: BenchOptions) -> Report:
    """Only times, for a policy that nothing else is known of."""
    name = policy.info.policy
    contenders = [Contender(name, policy, batch_size=size) for size in options.batch_sizes]
    runs = _replay(contenders, frames, options)
    return Report(dict(policy.info.details), tuple(map(summarise_speed, runs)), None)


def measure_openvla(
    policy: OpenVLAPolicy, frames: Sequence[Frame], options: BenchOptions
) -> Report:
    """Times, limits, and every method's actions beside those of plain decoding."""
    contenders = _contenders(policy, options)
    contenders += _scripted(policy, frames, options)
    runs = _replay(contenders, frames, options)
    weight = policy.parts.target.decoder.embedding.weight
    rates: DeviceRates = measure_rates(weight.device, weight.dtype)
    model = CostModel(policy, policy.weight_bytes, rates)
    info = policy.info
    return Report(
        details={**info.details, **info.versions, "frames": str(len(frames))},
        speeds=tuple(map(summarise_speed, runs)),
        baseline=BaselineLoop.GENERATE.value if options.has_baseline else PLAIN,
        decodings=_decodings(policy, runs, frames),
        rooflines=tuple(model.roofline(run, frames) for run in runs),
        rates=rates,
    )


def run_audit(namespace: Namespace, frames: Sequence[Frame]) -> AuditReport:
    """Load the same weights in float32 and in the format asked for, and compare tokens."""
    options = replace(read_flags(namespace), action_rows_only=False, has_graphs=False)
    audited = load_policy(replace(options, precision=Precision.BFLOAT16))
    return audit(load_float32_twin(options), audited, frames)


def _contenders(policy: OpenVLAPolicy, options: BenchOptions) -> list[Contender]:
    methods = options.sweep.methods or (policy.info.decoding,)
    contenders = [
        Contender(_name(method, radius, size), policy, method, radius, size)
        for size in options.batch_sizes
        for method in dict.fromkeys((PLAIN, *methods))
        for radius in _radii(policy, method, options.sweep)
    ]
    if options.has_baseline:
        contenders += [
            Contender(loop.value, TransformersPolicy(policy, loop)) for loop in BaselineLoop
        ]
    return contenders


def _scripted(
    policy: OpenVLAPolicy, frames: Sequence[Frame], options: BenchOptions
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
            contenders.append(Contender(script.name, script_policy(policy, script, answers)))
    return contenders


def _radii(policy: OpenVLAPolicy, method: str, sweep: Sweep) -> tuple[int | None, ...]:
    """The radii asked for, if the method has one."""
    fitting = tuple(one for one in sweep.radii if policy.has_method(method, one))
    return fitting or (None,)


def _name(method: str, radius: int | None, batch_size: int) -> str:
    named = method if radius is None else f"{method} r{radius}"
    return named if batch_size == 1 else f"{named} x{batch_size}"


def _replay(
    contenders: Sequence[Contender], frames: Sequence[Frame], options: BenchOptions
) -> list[Run]:
    for contender in contenders:
        for frame in frames:
            contender.policy.check(frame.observation, contender.options(frame))
    return replay(contenders, frames, options.num_warm_ups, _progress(len(frames)))


def _decodings(
    policy: OpenVLAPolicy, runs: Sequence[Run], frames: Sequence[Frame]
) -> tuple[Decoding, ...]:
    plain = next(run for run in runs if run.contender.decoding == PLAIN)
    spaces = [policy.action_space(frame.statistics_key) for frame in frames]
    return tuple(summarise_decoding(run, plain, spaces) for run in runs)


def _progress(total: int) -> Callable[[int], None]:
    def show(done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            sys.stderr.write(f"\rdeft bench: {done} of {total} frames{end}")
            sys.stderr.flush()

    return show
