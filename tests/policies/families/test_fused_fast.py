"""Fused kernels under the policies that write FAST codes, in passes of fixed shapes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.family import Family
from deft_policies.families.loading import open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.pi0fast import family as pi0fast
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.qwenfast import family as qwenfast
from deft_policies.memory import SessionMemory
from deft_policies.model.cpu_products import PackableLinear
from deft_policies.model.graphs import StepRunner
from deft_policies.model.vla import VisionTransformer, VlaNetwork
from tests import golden_pi0fast, golden_qwenfast
from tests.draws import IS_NIGHT
from tests.triton_twins import Counted

CPU = torch.device("cpu")
# Neither has run on a GPU; the decoder and the tower of the second have, in VLA-0's shapes.
SERVED = {"pi0fast": False, "qwenfast": True}
_ASKED = {"is_guarded": False, "largest_batch": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Loading gets kernels as on a GPU. Yields whether each family wants them by itself."""
    found: list[bool] = []

    def fuse(
        network: VlaNetwork, options: ModelOptions, device: object, by_default: bool = True
    ) -> None:
        found.append(by_default)
        network.fuse(Counted().kernels)

    for module in (pi0fast, qwenfast):
        monkeypatch.setattr(module, "fuse_kernels", fuse)
    return found


def family_of(name: str) -> Family:
    if name == "pi0fast":
        return open_model(golden_pi0fast.options_of("meanstd", **_ASKED))
    return open_model(golden_qwenfast.options_of("libero", **_ASKED))


@pytest.mark.parametrize("name", SERVED)
def test_kernels_reach_decoder_tower_and_projector(name: str, asked: list[bool]) -> None:
    network = family_of(name).load(CPU, torch.float32).network
    assert network.decoder.kernels is not None
    seeing: list[nn.Module] = [
        module
        for module in network.modules()
        if isinstance(module, PackableLinear | VisionTransformer)
    ]
    assert seeing
    assert all(module.kernels is network.decoder.kernels for module in seeing)
    assert asked == [SERVED[name]]


@pytest.mark.skipif(not IS_NIGHT, reason="interpreted passes take minutes: every night")
@pytest.mark.parametrize("name", SERVED)
def test_a_session_is_answered_as_in_the_original(name: str, asked: list[bool]) -> None:
    """The beginning of an answer is drafted in the prefill, behind what sees itself both ways."""
    family = family_of(name)
    runner = StepRunner(None, family.reserve)
    policy = VlaPolicy(family.load(CPU, torch.float32, runner), family.options)
    assert policy.engine.captured is not None
    memory = SessionMemory()
    for shown, options, expected in golden_frames(name):
        (answer,) = policy.act([PolicyRequest(shown, memory, options)])
        memory, trace = answer.memory, answer.chunk.trace
        assert trace is not None
        assert list(trace.tokens) == expected


def golden_frames(name: str) -> Iterator[tuple[Observation, ActOptions, Any]]:
    """Two frames of a session, and the tokens that the original code writes."""
    module = golden_pi0fast if name == "pi0fast" else golden_qwenfast
    session = module.variant("meanstd" if name == "pi0fast" else "libero")["sessions"][0]
    for frame in session["frames"][:2]:
        if name == "pi0fast":
            shown = golden_pi0fast.observation({**frame, "instruction": session["instruction"]})
            yield shown, ActOptions(want_trace=True), frame["generated_ids"]
        else:
            image, *wrists = (np.asarray(one) for one in golden_qwenfast.cameras(frame))
            cameras = {f"wrist_{number}": one for number, one in enumerate(wrists)}
            shown = Observation(image, session["instruction"], cameras)
            options = ActOptions(statistics_key=frame["statistics_key"], want_trace=True)
            yield shown, options, frame["generated_ids"]
