"""Whole frames, by method: the table of docs/performance.md, and what it lacks.

Drafts are scripted, because none is ever right about random weights; all scripts share one engine.
"""

import cProfile
import pstats
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deft_core.measures.statistics import percentiles
from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.replay import Contender, Replay, ReplayFrame, replay
from deft_policies.benchmark.transformers_loops import BaselineLoop, TransformersPolicy
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.warm_up import capture
from deft_policies.memory import SessionMemory
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import MeasuredRunner, Setting
from scripts.reproduce.acceptance import measured_chances
from scripts.scripted_drafts import Script, ScriptedPolicy, find_answers

PLAIN = "plain"
# As the small policy's own drafts stood, by the lines that the page of performance is made from.
LIKE = {
    "lossless": "lossless:plan=memory-once",
    "deft": "deft:drafts=previous",
    "Spec-VLA strict": "spec-vla-published:radius=0",
    "Spec-VLA r=9": "spec-vla-published",
}
_OF_TEXT = 0.93  # of drafts of a thinking text stand
_BASELINE_FRAMES = 5
_BATCHES = (2, 4, 8)
_MOST = 30  # functions of the host that are shown


def scripts_like(names: Sequence[str]) -> list[Script]:
    """Plain decoding first, then drafts that stand as often as those of methods."""
    methods = {name: find_method(LIKE[name]) for name in names}
    found = [
        Script.like(name, method, measured_chances(LIKE[name])) for name, method in methods.items()
    ]
    return [Script(PLAIN), *found]


def captured_policy(
    setting: Setting,
    scripts: Sequence[Script],
    frames: Sequence[ReplayFrame],
    num_rows: int = 1,
    num_tokens: int = 7,
) -> tuple[ScriptedPolicy, MeasuredRunner]:
    """One engine for all scripts, whose passes are captured."""
    runner = MeasuredRunner(setting, setting.reserve(num_rows))
    policy = setting.new_policy(runner, num_tokens)
    answers: dict[int, tuple[int, ...]] = {}
    ours = ScriptedPolicy(policy, scripts, answers)
    with runner.warming_up(), torch.inference_mode():
        ours.model.capture()
        capture(ours.engine)
    answers.update(find_answers(ours, frames))
    return ours, runner


def frames(setting: Setting) -> Iterator[Row]:
    """Methods in turn at every frame."""
    scripts = scripts_like(list(LIKE))
    seen = setting.frames(setting.size.frames)
    policy, runner = captured_policy(setting, scripts, seen)
    yield {
        "method": f"{len(runner.captures)} graphs",
        "captured in, s": sum(one.seconds for one in runner.captures),
        "MB kept": sum(one.num_bytes for one in runner.captures) / 1e6,
    }
    contenders = [Contender(one.name, policy, one.name) for one in scripts]
    for run in replay(contenders, seen, num_warm_ups=3):
        yield {"method": run.contender.name, **times_of(run)}
    for key in runner.uncaptured:
        yield {"method": f"not captured: {key}"[:80]}


def host(setting: Setting) -> Iterator[Row]:
    """What the host does in a plain frame, by function; a profiler makes all of it slower."""
    scripts, seen = [Script(PLAIN)], setting.frames(setting.size.frames)
    policy, _ = captured_policy(setting, scripts, seen)
    batches = [
        [PolicyRequest(one.observation, SessionMemory(), ActOptions(decoding=PLAIN))]
        for one in seen
    ]
    policy.act(batches[0])
    setting.wait()
    profiler = cProfile.Profile()
    profiler.enable()
    for batch in batches:
        policy.act(batch)
    profiler.disable()
    found: Any = pstats.Stats(profiler)
    # Of each function: calls, and seconds in itself and with what it calls.
    functions = [(where, *took) for where, (_, *took, _) in found.stats.items()]
    for (file, line, name), calls, own, whole in sorted(functions, key=lambda one: -one[2])[:_MOST]:
        yield {
            "function": f"{Path(file).name}:{line} {name}"[:70],
            "calls a frame": calls / len(batches),
            "own ms": 1e3 * own / len(batches),
            "with what it calls, ms": 1e3 * whole / len(batches),
        }


def times_of(run: Replay) -> Row:
    """Medians over frames, in milliseconds; what is outside of stages is the host's alone."""
    timings = [one.chunk.timings for one in run.answers]
    behind = [one.draft_ms + one.verify_ms + one.judge_ms + one.commit_ms for one in timings]
    later = sum(num_later(run))
    wall = percentiles([one.wall_ms for one in run.answers])
    outside = [one.wall_ms - one.chunk.timings.total_ms for one in run.answers]
    return {
        "p50 ms": wall.p50,
        "p95 ms": wall.p95,
        "prepare": median(one.prepare_ms for one in timings),
        "vision": median(one.vision_ms for one in timings),
        "prefill": median(one.prefill_ms for one in timings),
        "later passes": later / len(run.answers) if later else None,
        "ms each": sum(behind) / later if later else None,
        "finish": median(one.finish_ms for one in timings),
        "outside": median(outside),
    }


def num_later(run: Replay) -> list[int]:
    """Passes behind the prefill, where they are known."""
    passes = [one.chunk.trace.num_passes for one in run.answers if one.chunk.trace is not None]
    return [max(0, one - 1) for one in passes]


def transformers(setting: Setting) -> Iterator[Row]:
    """Transformers' own model and loop behind our towers, beside ours in the same process."""
    seen = setting.frames(_BASELINE_FRAMES)
    ours, _ = captured_policy(setting, [Script(PLAIN)], seen)
    theirs = TransformersPolicy(ours, BaselineLoop.GENERATE)
    contenders = [
        Contender(PLAIN, ours, PLAIN),
        Contender(f"transformers, {BaselineLoop.GENERATE.name.lower()}", theirs),
    ]
    runs = replay(contenders, seen, num_warm_ups=2)
    for run in runs:
        yield {"method": run.contender.name, **times_of(run)}
    mine, other = (median(one.wall_ms for one in run.answers) for run in runs)
    yield {"method": "theirs over ours", "p50 ms": other / mine}


def text(setting: Setting) -> Iterator[Row]:
    """An answer as long as ECoT's, plain and with all of it drafted."""
    length, seen = setting.size.text, setting.frames(2)
    scripts = [Script(PLAIN), Script("drafted", _OF_TEXT, num_chains=1)]
    ours, _ = captured_policy(setting, scripts, seen, num_tokens=length)
    contenders = [Contender(f"{one.name}, {length} tokens", ours, one.name) for one in scripts]
    for run in replay(contenders, seen, num_warm_ups=1):
        yield {"method": run.contender.name, **times_of(run)}


def batches(setting: Setting) -> Iterator[Row]:
    """Robots that are answered together, by one method and by several."""
    scripts = scripts_like(["lossless", "deft"])
    seen = setting.frames(max(_BATCHES))
    policy, runner = captured_policy(setting, scripts, seen, max(_BATCHES))
    names, repeats = [one.name for one in scripts], max(1, setting.size.repeats // 6)
    for count in _BATCHES:
        mixes = {name: [name] * count for name in names}
        mixes["mixed"] = [names[index % len(names)] for index in range(count)]
        for what, methods in mixes.items():
            batch = [
                PolicyRequest(frame.observation, SessionMemory(), ActOptions(decoding=method))
                for frame, method in zip(seen, methods, strict=False)
            ]
            times = setting.milliseconds(lambda: policy.act(batch), repeats)  # noqa: B023
            timings = [one.chunk.timings for one in policy.act(batch)]
            yield {
                "robots": count,
                "methods": what,
                "ms": median(times),
                "actions/s": 1e3 * count / median(times),
                "vision": timings[0].vision_ms,
                "prefill": timings[0].prefill_ms,
            }
    for key in runner.uncaptured:
        yield {"methods": f"not captured: {key}"[:80]}
