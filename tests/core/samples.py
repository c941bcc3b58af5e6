"""Observations and answers with every field filled, and a strict way to compare them."""

import io
import struct
import zlib

import numpy as np
import PIL.Image

from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    FastAnswer,
    Image,
    Intervention,
    LogProbs,
    Observation,
    PassTrace,
    StageTimings,
)
from deft_core.wire.messages import ActMessage


def frame(height: int = 6, width: int = 5, seed: int = 0) -> Image:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def full_message() -> ActMessage:
    observation = Observation(
        frame(),
        "ставь the bowl on the plate",
        {"wrist": frame(4, 4, seed=1), "left": frame(3, 8, seed=2)},
        np.array([0.5, -1.25, 3e-7], np.float32),
    )
    options = ActOptions(
        "robot-1", 150.0, "libero_goal", "lossless", 9,
        want_trace=True, want_reasoning=True, max_tokens=320, want_log_probs=True, executed_steps=3,
        want_notes=True,
    )  # fmt: skip
    return ActMessage(observation, options)


def full_answer() -> ActionChunk:
    prefill = PassTrace(
        is_prefill=True,
        tokens=(11, 12, 13),
        parents=(-1, 0, 1),
        sources=("", "previous action", "previous action"),
        predictions=(12, 99, 14),
        path=(1,),
        bonus=99,
        draft_ms=0.25,
        pass_ms=3.5,
    )
    trace = DecodeTrace(
        method="lossless",
        tokens=(12, 99),
        predicted=(12, 98),
        margins=(1.5, 0.125),
        passes=(prefill,),
        guard="speculation pays",
        rule="ExactMatch()",
        parts=(1, 1),
        fast=FastAnswer((40, -3), (True, False)),
    )
    actions = np.array([[0.1, -0.2, np.pi], [1e-300, 0.0, 1.0]])
    timings = StageTimings(wire_ms=0.5, total_ms=12.25)
    log_probs = LogProbs((-0.25, -7.5), 0.7, "vocabulary")
    text = " Lift it. ACTION: ≡"
    notes = ("the instruction is unusual", "ü")
    return ActionChunk(actions, timings, trace, Intervention.CLAMP, text, log_probs, notes)


def assert_same_message(sent: ActMessage, received: ActMessage) -> None:
    np.testing.assert_array_equal(received.observation.image, sent.observation.image)
    assert received.observation.instruction == sent.observation.instruction
    assert list(received.observation.cameras) == list(sent.observation.cameras)
    for name, image in sent.observation.cameras.items():
        np.testing.assert_array_equal(received.observation.cameras[name], image)
    np.testing.assert_array_equal(received.observation.state, sent.observation.state)
    assert received.options == sent.options


def assert_same_answer(sent: ActionChunk, received: ActionChunk) -> None:
    assert received.actions.tobytes() == sent.actions.tobytes()
    assert received.actions.shape == sent.actions.shape
    assert received.timings == sent.timings
    assert received.trace == sent.trace
    assert received.intervention is sent.intervention
    assert received.reasoning == sent.reasoning
    assert received.log_probs == sent.log_probs
    assert received.notes == sent.notes


def png_bomb(height: int, width: int) -> bytes:
    """A well-formed PNG of a few kilobytes that decompresses to height x width black pixels."""
    lines = b"\0" * (height * (3 * width + 1))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    written = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def saved(picture: PIL.Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()
