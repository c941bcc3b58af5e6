"""What questions are asked about: a device, a model on it, and how steps are captured and timed."""

import gc
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from deft_core.image_chain import ImageChain
from deft_core.types import Observation
from deft_policies.benchmark.replay import ReplayFrame, generate_frames
from deft_policies.decoding.captured import CapturedPasses
from deft_policies.decoding.methods import AUTOREGRESSIVE
from deft_policies.families.family import LONGEST_INSTRUCTION
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.graphs import (
    Capture,
    CapturedStep,
    Reserve,
    Step,
    StepRunner,
    Tensors,
    capture_on_cuda,
)
from deft_policies.model.image import ImageProcessor
from deft_policies.model.random_weights import (
    STATISTICS_KEY,
    build_random_model,
    openvla_7b,
    unit_statistics,
    word_ids,
)
from deft_policies.model.sizes import LlamaSizes, OpenVLAConfig, find_action_tokens
from deft_policies.model.vla import OpenVLAModel
from scripts.bench.gpu.asking import Row, ask_nvidia

_INSTRUCTION = "put the white mug on the left plate and the yellow mug on the right plate"
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Size:
    """How large the model is, and how often things are done."""

    name: str
    config: Callable[[], OpenVLAConfig]
    prompt: int  # positions of the prompt that passes are timed behind: a captured length
    product_rows: tuple[int, ...]  # of matrix products
    repeats: int  # of what is timed; times are medians
    frames: int
    chains: tuple[int, ...]  # drafts whose bits are compared with plain decoding along the longest
    text: int  # tokens of a long answer
    copy_bytes: int  # what ceilings are measured with
    product_side: int
    captures_s: float  # how long a server may capture at its start


def tiny() -> OpenVLAConfig:
    """Everything that the 7B has, as small as it can be."""
    whole = openvla_7b()
    dinov2, siglip = whole.towers
    towers = (
        replace(dinov2, width=16, depth=3, heads=2, mlp=24, image_size=28),
        replace(siglip, width=24, depth=2, heads=2, mlp=40, image_size=28),
    )
    return replace(
        whole,
        llm=LlamaSizes(384, 32, 48, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8),
        towers=towers,
        image=replace(whole.image, size=28),
        action_tokens=find_action_tokens(text_vocab_size=320),
    )


SIZES = {
    "7b": Size(
        name="7b",
        config=openvla_7b,
        prompt=288,
        product_rows=(1, 8, 16, 64, 128, 288, 296, 352, 512),
        repeats=30,
        frames=20,
        chains=(8, 64),
        text=257,
        copy_bytes=1 << 31,
        product_side=8192,
        captures_s=30.0,
    ),
    "tiny": Size(
        name="tiny",
        config=tiny,
        prompt=32,
        product_rows=(1, 16, 39),
        repeats=2,
        frames=2,
        chains=(8, 20),
        text=33,
        copy_bytes=1 << 16,
        product_side=64,
        captures_s=0.5,
    ),
}


@dataclass(frozen=True)
class Captured:
    """A step that was captured: what it cost, and what it is."""

    key: Hashable
    step: CapturedStep
    seconds: float
    num_bytes: int  # of the device, while it can be replayed


class OutOfTimeError(RuntimeError):
    """Capturing took longer than it was allowed to."""


class MeasuredRunner(StepRunner):
    """Remembers what each capture cost."""

    def __init__(self, setting: "Setting", reserve: Reserve, seconds: float = 1e9) -> None:
        """Raises `OutOfTimeError` instead of capturing more, when so many seconds are over."""
        super().__init__(setting.new_capture(), reserve)
        self.captures: list[Captured] = []
        self._setting, self._ends = setting, time.monotonic() + seconds

    def _capture_step(self, capture: Capture, step: Step, inputs: Tensors) -> CapturedStep:
        if time.monotonic() > self._ends:
            raise OutOfTimeError("no time is left to capture more")
        setting = self._setting
        free, started = setting.free_bytes(), time.monotonic()
        captured = super()._capture_step(capture, step, inputs)
        setting.wait()
        seconds = time.monotonic() - started
        found = Captured(None, captured, seconds, free - setting.free_bytes())
        self.captures.append(found)
        return captured

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """The same; what was captured gets its key."""
        count = len(self.captures)
        found = super().run(key, step, inputs)
        self.captures[count:] = [replace(one, key=key) for one in self.captures[count:]]
        return found

    @property
    def kinds(self) -> dict[str, list[Captured]]:
        """What was captured, by what it is."""
        found: dict[str, list[Captured]] = {}
        for one in self.captures:
            found.setdefault(kind_of(one.key), []).append(one)
        return found


def kind_of(key: Any) -> str:
    """What a runner's key names: see `CapturedPasses` and `StepRunner.run_batch`."""
    if not isinstance(key[0], CapturedPasses):
        return "towers"
    return "prefills" if key[1].length else "passes"


def repeat(step: Step, inputs: Tensors) -> CapturedStep:
    """Where there are no graphs a replay is the step itself."""
    outputs = tuple(one.clone() for one in step(*inputs))

    def replay() -> None:
        for kept, new in zip(outputs, step(*inputs), strict=True):
            kept.copy_(new)

    return CapturedStep(inputs, outputs, replay)


def reserve_of(config: OpenVLAConfig, rows: int = Reserve.rows) -> Reserve:
    """What a server of this model captures passes for: as `OpenVLAFamily.reserve`."""
    patches = config.num_patches
    return Reserve(rows, shortest=patches + 1, longest=patches + LONGEST_INSTRUCTION)


class Setting:
    """A device with a model of random weights, which is made once."""

    def __init__(
        self, size: Size, device: torch.device, folder: Path, capture: Capture | None = None
    ) -> None:
        """Questions may write into the folder. `capture` stands in for CUDA's graphs."""
        self.size, self.device, self.folder = size, device, folder
        self.config = size.config()
        self.is_cuda = device.type == "cuda"
        # On a CPU without the layouts that make it batch-invariant bfloat16 is only slow.
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self._capture = capture

    @cached_property
    def network(self) -> OpenVLAModel:
        """The model, with fused kernels where there is a GPU."""
        network = self.make_network()
        if self.is_cuda:
            # Imported here: only GPUs have it.
            from deft_policies.model.kernels.launch import add_whole_sums, kernels_for

            add_whole_sums()
            network.fuse(kernels_for(self.device))
        return network

    def make_network(self) -> OpenVLAModel:
        """Random weights, drawn on the device."""
        return build_random_model(self.config, self.device, self.dtype)

    def new_capture(self) -> Capture:
        """What captures steps into memory of their own, which is free again when they are gone."""
        if self._capture is not None:
            return self._capture
        if self.is_cuda:
            return partial(capture_on_cuda, torch.cuda.graph_pool_handle())
        return repeat

    def new_target(self, reserve: Reserve, captures: bool = True) -> VlaTarget:
        """Passes of fixed shapes over the model; without capturing they run as they come."""
        runner = MeasuredRunner(self, reserve) if captures else StepRunner(reserve=reserve)
        return VlaTarget(self.network, runner=runner)

    def new_policy(self, runner: StepRunner, num_tokens: int = 7) -> VlaPolicy:
        """A policy whose answers have so many tokens."""
        model = OpenVLA(
            VlaTarget(self.network, runner=runner),
            self.encode,
            self.images,
            {STATISTICS_KEY: unit_statistics(num_tokens)},
        )
        return VlaPolicy(model, ModelOptions(decoding=AUTOREGRESSIVE))

    @property
    def images(self) -> ImageProcessor:
        """As `OpenVLAFamily` has it: a GPU resizes frames itself."""
        return ImageProcessor(self.config.image, ImageChain.NONE, resizes_on_device=self.is_cuda)

    @property
    def encode(self) -> Callable[[str], tuple[int, ...]]:
        """Prompt ids of an instruction."""
        return partial(word_ids, self.config.action_tokens.first)

    def frames(self, count: int) -> list[ReplayFrame]:
        """Frames of one episode with one instruction, so that one captured length serves all."""
        return [
            ReplayFrame(Observation(one.observation.image, _INSTRUCTION), "episode")
            for one in generate_frames(count)
        ]

    def reserve(self, num_rows: int) -> Reserve:
        """What such frames need, and nothing else."""
        length = self.config.num_patches + len(self.encode(_INSTRUCTION))
        return Reserve(num_rows, length, length)

    def random(self, *shape: int) -> Tensor:
        """Numbers as activations have them."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def milliseconds(self, work: Callable[[], object], count: int | None = None) -> list[float]:
        """Of runs that follow each other, the first one left out."""
        work()
        count = self.size.repeats if count is None else count
        if not self.is_cuda:
            marks = [time.perf_counter()]
            for _ in range(count):
                work()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        self.wait()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]

    def median_ms(self, work: Callable[[], object], count: int | None = None) -> float:
        """The median of such times."""
        return median(self.milliseconds(work, count))

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of the device, when nothing is kept for later."""
        if not self.is_cuda:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def describe(self) -> Row:
        """What does not change during a run."""
        told: Row = {"card": "CPU", "size": self.size.name}
        if self.is_cuda:
            about = torch.cuda.get_device_properties(self.device)
            told |= {"card": about.name, "memory GiB": about.total_memory / _GIB}
            told |= {"multiprocessors": about.multi_processor_count, "L2 MiB": self.l2_bytes / _MIB}
            told["driver"] = ask_nvidia("driver_version")["driver_version"]
        return told | {"torch": torch.__version__, "CUDA": torch.version.cuda}

    @property
    def l2_bytes(self) -> int:
        """Of the device's cache: what is timed must read more than it holds."""
        if not self.is_cuda:
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def state(self) -> Row:
        """Clocks now, and the most memory since the last question."""
        if not self.is_cuda:
            return {}
        told = ask_nvidia("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        try:
            most = torch.cuda.max_memory_allocated() / _GIB
        except RuntimeError as error:  # of a device that is lost
            return told | {"error": str(error)}
        return told | {"most GiB": most}

    def clear(self) -> None:
        """Give back what a question held, also one that ended with an exception."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()  # raises where the device is lost
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
