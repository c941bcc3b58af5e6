"""What each method takes for the 24 golden frames of tiny-libero: passes, and milliseconds a pass.

`python -m tests.policies.speed_table`, on a quiet machine, writes golden/tiny_libero/speed.json
anew: after a change that makes a method faster, or one that costs passes on purpose and says so.
"""

import json
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from deft_core.types import ActOptions, Observation
from deft_policies import tiny_libero
from deft_policies.base import PolicyRequest
from deft_policies.commands.act import load_image
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_libero"
TABLE = GOLDEN / "speed.json"


@cache
def policy() -> VlaPolicy:
    """The policy that ships, with fixed plans: a guard's choice would depend on the machine."""
    return load_policy(tiny_libero.complete(ModelOptions(device="cpu", is_guarded=False)))


@cache
def observations() -> tuple[Observation, ...]:
    """One episode's frames in order."""
    lines = (GOLDEN / "cases.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    return tuple(
        Observation(load_image(GOLDEN / one["image"]), one["instruction"]) for one in cases
    )


def methods() -> tuple[str, ...]:
    """Every method that the policy can answer with."""
    return policy().info.decoding_methods


def play(method: str) -> tuple[int, float]:
    """Passes of all frames as one robot's session, and milliseconds a pass in the quickest frame.

    The quickest, in time of this thread: other work on the machine makes frames slower, none
    quicker.
    """
    memory, num_passes, quickest_s = SessionMemory(), 0, float("inf")
    for observation in observations():
        options = ActOptions(decoding=method, want_trace=True)
        start_s = time.thread_time()
        (answer,) = policy().act([PolicyRequest(observation, memory, options)])
        spent_s = time.thread_time() - start_s
        memory, trace = answer.memory, answer.chunk.trace
        assert trace is not None
        num_passes += trace.num_passes
        quickest_s = min(quickest_s, spent_s / trace.num_passes)
    return num_passes, 1000 * quickest_s


def measured() -> Iterator[tuple[str, dict[str, float]]]:
    """By method, after one frame that is not counted."""
    torch.set_num_threads(1)
    policy().act([PolicyRequest(observations()[0], SessionMemory(), ActOptions())])
    for method in methods():
        num_passes, pass_ms = play(method)
        yield method, {"passes": num_passes, "pass_ms": round(pass_ms, 1)}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(dict(measured()), indent=2) + "\n")
    sys.stdout.write(TABLE.read_text())
