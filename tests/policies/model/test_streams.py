"""Streams of a GPU, of which every one that multiplies keeps a workspace of 32 MiB."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deft_policies.model import graphs, vla


class FakeStream:
    """Counts how many there are; nothing waits for anything."""

    made = 0

    def __init__(self, *_: object) -> None:
        FakeStream.made += 1

    def wait_stream(self, _: object) -> None:
        """Nothing runs at the same time here."""


class FakeResult:
    """What a part returns, as far as it is used on another stream."""

    def record_stream(self, _: object) -> None:
        """Its memory is nobody else's."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeStream]]:
    current = FakeStream()
    FakeStream.made = 0

    @contextmanager
    def on(_: object) -> Iterator[None]:
        yield

    @contextmanager
    def recording(*_: object, **__: object) -> Iterator[None]:
        yield

    class Graph:
        def replay(self) -> None:
            """Nothing was recorded."""

    fakes: dict[str, Any] = {
        "Stream": FakeStream,
        "current_stream": lambda *_: current,
        "current_device": lambda: 0,
        "stream": on,
        "graph": recording,
        "CUDAGraph": Graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for remembered in (graphs._stream_of, vla._stream_aside):
        remembered.cache_clear()
    yield FakeStream
    for remembered in (graphs._stream_of, vla._stream_aside):
        remembered.cache_clear()


def test_all_captures_and_all_frames_share_a_few_streams(streams: type[FakeStream]) -> None:
    gpu = torch.device("cuda", 0)
    for _ in range(5):
        results = [FakeResult(), FakeResult()]
        parts: list[Any] = [lambda one=one: one for one in results]
        assert vla.run_side_by_side(parts, gpu) == results
        step = graphs.capture_on_cuda(None, lambda one: (one + 1,), (torch.zeros(2),))
        assert step.outputs[0].tolist() == [1.0, 1.0]
    assert streams.made == 2
