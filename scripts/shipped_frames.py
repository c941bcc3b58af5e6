"""Makes the frames that ship with `deft bench` of recorded episodes.

deft serve --decoding autoregressive --record episodes
deft-client eval libero_object --tasks 0,2,4,6,8 --trials 40 --out played --video none
python -m scripts.shipped_frames episodes policies/deft_policies/benchmark/frames

Twenty steps in a row of each episode: at the reach in the first, at the basket in the last.
Pictures are JPEGs, a tenth of the size of the PNGs that were recorded.
"""

import sys
from pathlib import Path

from deft_core.recordings import (
    SUFFIX,
    EpisodeHeader,
    RecordedStep,
    StepReader,
    encode_end,
    encode_header,
    encode_step,
    find_episodes,
    read_header,
)
from deft_core.types import ActionChunk, ActOptions
from deft_core.wire.images import ImageEncoding
from deft_policies.benchmark.shipped import NUM_EPISODES, NUM_STEPS

_QUALITY = 75  # a hundred pictures in a megabyte
_FIRST_STEP, _STEPS_LATER = 10, 20  # of the first episode, and of each later one


def main(arguments: list[str]) -> int:
    """Read a folder of recordings and write another; return the exit code."""
    source, target = map(Path, arguments)
    for number, path in enumerate(find_episodes(source)[:NUM_EPISODES]):
        first = _FIRST_STEP + number * _STEPS_LATER
        steps = list(StepReader(path))[first : first + NUM_STEPS]
        (target / f"{number}{SUFFIX}").write_bytes(shipped(read_header(path), steps))
    return 0


def shipped(header: EpisodeHeader, steps: list[RecordedStep]) -> bytes:
    """An episode of these steps, with nothing of the machine that recorded them."""
    begun = encode_header(EpisodeHeader(header.session_id, 0.0, header.policy))
    written = [
        encode_step(
            RecordedStep(
                index,
                step.at_s - steps[0].at_s,
                step.observation,
                ActOptions(statistics_key=step.options.statistics_key),
                ActionChunk(step.chunk.actions),
            ),
            ImageEncoding.JPEG,
            _QUALITY,
        )
        for index, step in enumerate(steps)
    ]
    return b"".join((begun, *written, encode_end("twenty steps")))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
