"""Passes of the whole model: their bits, what capturing them costs, and where their time goes."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from deft_policies.decoding.captured import NARROW, WIDTHS, CapturedPasses, Shape, shapes_of
from deft_policies.decoding.target import PassRow, Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import CapturedStep, Reserve, StepRunner
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import Captured, MeasuredRunner, Setting, Size, reserve_of
from scripts.bit_equality import (
    CHAIN,
    SHARED_KEYS,
    SMALL,
    TREES,
    WIDE,
    Case,
    Passes,
    batch_case,
    chain_cases,
    find_difference,
    find_frame_differences,
    find_plain_difference,
    make_target,
    prompts_of,
    rider_case,
    tokens_of,
    tree_case,
)

_RIDERS = 7  # behind a prompt: with its last token they are a pass of 8
_BATCH = 3
_SPAN = 32  # positions between the shortest prompt of a batch and the longest
_ANSWER = 8  # tokens that there is room for
_FRAMES = 2
_MOST_KERNELS = 14  # of one table
# What a chrome trace calls what runs on the device.
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@torch.inference_mode()
def bits(setting: Setting) -> Iterator[Row]:
    """Whether tokens have the bits of eager plain decoding, in all layers, eager and captured."""
    size = setting.size
    eager, captured = both_ways(setting)
    (prompt,) = prompts_of(eager.target, [size.prompt - 10])
    (tokens,) = tokens_of(eager.target, 1, max(size.chains))
    where = find_plain_difference(prompt, tokens, captured, eager)
    yield verdict(f"plain along {len(tokens)} tokens", "captured", where)
    for case in cases_of(eager.target, size):
        for mode, passes in (("eager", eager), ("captured", captured)):
            yield verdict(case.name, mode, find_difference(case, passes, eager))
    for count in (_FRAMES, 8):
        differing = find_frame_differences(setting.network, count)
        text = f"frames {differing}" if differing else ""
        yield verdict(f"towers, {count} frames", "eager", text)


def both_ways(setting: Setting) -> tuple[Passes, Passes]:
    """Passes of the same fixed shapes for a batch: run as they come, and captured."""
    longest = setting.size.prompt
    reserve = Reserve(_BATCH, longest - _SPAN, longest)
    targets = setting.new_target(reserve, captures=False), setting.new_target(reserve)
    eager, captured = (Passes(one, _BATCH, longest, is_captured=True) for one in targets)
    return eager, captured


def cases_of(target: Target, size: Size) -> Iterator[Case]:
    """Passes behind a prompt, riders behind prompts of two captured lengths, a batch."""
    prompt = size.prompt
    yield from chain_cases(target, prompt - 10, size.chains)
    for name in ("comb", "star"):
        yield tree_case(target, name, prompt - 10)
    riders = CHAIN[: _RIDERS + 1]
    for length in (prompt - 18, prompt - 10, prompt):
        yield rider_case(target, riders, length)
    yield rider_case(target, TREES["comb"], prompt - 10, keeps_hidden=False)
    lengths = [prompt - 10, prompt - 20, prompt - 3]
    yield batch_case(target, lengths, TREES["woven"])


def verdict(what: str, mode: str, where: str) -> Row:
    return {"what": what, "mode": mode, "equal": not where, "first difference": where or None}


def _share(of: str, mode: str, what: str, found: Sequence[str]) -> Row:
    """How many cases are equal, and where the first of the others is not."""
    differing = [one for one in found if one]
    return {
        "of": of,
        "mode": mode,
        "what": what,
        "cases": len(found),
        "equal": len(found) - len(differing),
        "first difference": next(iter(differing), None),
    }


@torch.inference_mode()
def small_bits(setting: Setting) -> Iterator[Row]:
    """The same of small decoders, as in tests/gpu/test_bits.py: more shapes, shared keys.

    Packed, as a CPU's passes are; with fused kernels also in the shapes that a GPU captures.
    """
    kernels = setting.network.decoder.kernels
    every = {"small": SMALL, "shared keys": SHARED_KEYS}
    if kernels is not None:
        every["a layer of the 7B"] = WIDE
    for name, sizes in every.items():
        target = make_target(sizes, kernels=kernels)
        problem = "" if target.is_batch_invariant else target.describe_equality()
        yield _share(name, "", "products", [problem])
        ways = small_ways(target)
        for mode in ways if kernels is not None else ("packed",):
            passes = ways[mode]
            for what, cases in _small_cases(target).items():
                found = {case.name: find_difference(case, passes, passes) for case in cases}
                where = [where and f"{one}: {where}" for one, where in found.items()]
                yield _share(name, mode, what, where)


def small_ways(target: Target) -> dict[str, Passes]:
    """Two ways of laying out the passes of one decoder."""
    runner = StepRunner(reserve=Reserve(8, 59, 300))
    fixed = Target(target.decoder, target.action_tokens, runner=runner)
    return {
        "packed": Passes(target, 8, 320),
        "fixed shapes": Passes(fixed, 8, 300, is_captured=True),
    }


def _small_cases(target: Target) -> dict[str, list[Case]]:
    widths = (2, 5, 7, 16, 26, 50, 64)
    return {
        "chains": [one for length in (61, 84) for one in chain_cases(target, length, widths)],
        "trees": [tree_case(target, name, 84) for name in TREES],
        "riders": [
            rider_case(target, parents, length)
            for parents in (CHAIN, *TREES.values())
            for length in (59, 127, 300)
        ],
        "batches": [
            batch_case(target, lengths, TREES["woven"]) for lengths in ([84] * 8, [59, 84, 130])
        ],
    }


@dataclass(frozen=True)
class Unit:
    """A captured part of a frame, by name.

    Replays read the numbers that the last pass of any shape was given; `run` gives it its own.
    """

    name: str
    captured: Captured
    run: Callable[[], object]

    @property
    def step(self) -> CapturedStep:
        """What can be replayed."""
        return self.captured.step


def capture_units(setting: Setting, reserve: Reserve, shapes: Sequence[Shape]) -> Iterator[Unit]:
    """The parts of a frame of one row: towers, prefills and passes of these shapes."""
    size, config = setting.size, setting.config
    target = setting.new_target(reserve)
    runner = target.runner
    assert isinstance(runner, MeasuredRunner)
    side = config.image.size
    pixels = setting.random(1, 3 * len(config.towers), side, side)
    run = passes_by_shape(target, WIDTHS[-1], _ANSWER, size.prompt)
    works: dict[str, Callable[[], object]] = {
        "towers and projector": lambda: target.read(pixels, [[0, 0]])
    }
    works |= {name_of(shape): partial(run, shape) for shape in shapes}
    for name, work in works.items():
        work()
        yield Unit(name, runner.captures[-1], work)


def passes_by_shape(
    target: Target, widest: int, num_tokens: int, length: int
) -> Callable[[Shape], None]:
    """What runs a pass of one row behind a prompt of this length, or a prefill, of a shape."""
    cache = target.new_cache()
    captured = target.set_aside(cache, widest, num_tokens)
    assert isinstance(captured, CapturedPasses)

    def run(shape: Shape) -> None:
        prompt: Prompt | None = None
        start = length
        if shape.length:
            (prompt,) = prompts_of(target, [shape.length])
            start = shape.length - 1
        tree = DraftTree.of_committed([0] * shape.width)
        captured.keeps_hidden = shape.keeps_hidden
        target.forward(cache, [PassRow(0, start, tree, 0, prompt=prompt)])

    return run


def name_of(shape: Shape) -> str:
    """In words, of one row."""
    if not shape.length:
        return f"pass of {shape.width}"
    riders = f" and {shape.width - 1}" if shape.width > 1 else ""
    return f"prefill of {shape.length}{riders}" + ", all hidden states" * shape.keeps_hidden


@torch.inference_mode()
def passes(setting: Setting) -> Iterator[Row]:
    """What a frame's parts take, replayed, and what capturing each costs.

    Passes of every width, and prefills of every length that a server captures; with many riders
    and with all hidden states only those of the longest.
    """
    reserve = reserve_of(setting.config, rows=1)
    shapes = [
        one
        for one in shapes_of(reserve, WIDTHS[-1], keeps_hidden=False)
        if one.length in (0, reserve.lengths[-1]) or one.width <= 1 + NARROW
    ]
    for unit in capture_units(setting, reserve, shapes):
        times = sorted(setting.milliseconds(unit.step.replay))
        yield {
            "captured": unit.name,
            "ms": median(times),
            "p5 ms": times[len(times) // 20],
            "p95 ms": times[-1 - len(times) // 20],
            "to capture, s": unit.captured.seconds,
            "MB kept": unit.captured.num_bytes / 1e6,
        }
    yield from _who_multiplies(setting)


def _who_multiplies(setting: Setting) -> Iterator[Row]:
    """By the number of rows, which shapes were given to PyTorch as it had the bits of ours."""
    kernels = setting.network.decoder.kernels
    asked: dict[int, list[str]] = {}
    known: dict[Any, bool] = {} if kernels is None else kernels._equals_ours
    for (shape, num_rows, *_), is_theirs in known.items():
        num_out, num_in = shape
        asked.setdefault(num_rows, []).extend([f"{num_out}x{num_in}"] * is_theirs)
    for num_rows, shapes in sorted(asked.items()):
        text = ", ".join(dict.fromkeys(shapes)) or "nothing"
        yield {"captured": f"{num_rows} rows: PyTorch multiplies {text}"}


@torch.inference_mode()
def kernels(setting: Setting) -> Iterator[Row]:
    """Where the time of a replay goes, kernel by kernel; chrome traces go into the folder."""
    length = setting.size.prompt
    shapes = [Shape(1, 1, length), Shape(1, 1), Shape(1, 64)]
    units = list(capture_units(setting, Reserve(1, length, length), shapes))
    plain = next(unit for unit in units if unit.name == "pass of 1")
    plain.run()
    before_ms = setting.median_ms(plain.step.replay)
    for unit in units:
        unit.run()
        yield from profile(setting, unit.name, unit.step.replay).rows(unit.name)
    # What profiles may slow down for good.
    plain.run()
    after_ms = setting.median_ms(plain.step.replay)
    for when, ms in (("before any profile", before_ms), ("after all profiles", after_ms)):
        yield {"of": f"pass of 1, {when}", "us": 1e3 * ms}


@dataclass(frozen=True)
class Profile:
    """What has run on the device."""

    counts: Counter[str]  # of kernels, by name and grid
    busy_us: Mapping[str, float]
    gaps_us: Mapping[str, float]  # before each of them, when the device did nothing
    span_us: float  # from the first one's start to the last one's end

    def rows(self, of: str) -> Iterator[Row]:
        """The kernels that take longest, and all of them."""
        longest = sorted(self.busy_us, key=lambda name: -self.busy_us[name])
        for name in longest[:_MOST_KERNELS]:
            yield {
                "of": of,
                "kernel": name,
                "count": self.counts[name],
                "us": self.busy_us[name],
                "us each": self.busy_us[name] / self.counts[name],
                "gaps before, us": self.gaps_us[name],
            }
        yield {
            "of": of,
            "kernel": f"all {len(longest)}",
            "count": self.counts.total(),
            "us": sum(self.busy_us.values()),
            "gaps before, us": sum(self.gaps_us.values()),
            "from start to end, us": self.span_us,
        }


def profile(setting: Setting, name: str, work: Callable[[], object]) -> Profile:
    """Of some work, the second time it is done."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA if setting.is_cuda else activity.CPU]
    work()
    setting.wait()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        setting.wait()
    path = setting.folder / f"{''.join(one if one.isalnum() else '_' for one in name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return read_profile(json.loads(path.read_text()), setting.is_cuda)


def read_profile(trace: Any, is_cuda: bool) -> Profile:
    """From a chrome trace; times are in microseconds. What overlaps leaves no gap."""
    kinds = _ON_DEVICE if is_cuda else {"cpu_op"}
    events = [one for one in trace["traceEvents"] if one.get("cat") in kinds]
    counts, busy, gaps = (
        Counter[str](),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    first = end = None
    for event in sorted(events, key=lambda one: float(one["ts"])):
        start, took = float(event["ts"]), float(event["dur"])
        grid = event.get("args", {}).get("grid")
        name = _short(event["name"]) + (f" {'x'.join(map(str, grid))}" if grid else "")
        counts[name] += 1
        busy[name] += took
        gaps[name] += 0.0 if end is None else max(0.0, start - end)
        first = start if first is None else first
        end = start + took if end is None else max(end, start + took)
    return Profile(counts, busy, gaps, (end or 0.0) - (first or 0.0))


def _short(name: str) -> str:
    """A kernel's name without what its template was made of."""
    return name.partition("(")[0].partition("<")[0].removeprefix("void ")[:48]
