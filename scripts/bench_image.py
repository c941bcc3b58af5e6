"""Median times of the image chain and of its slow twin: `python -m scripts.bench_image`."""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from deft_client.image_chain import ImageChain, crop_centre, resize_lanczos3, round_trip_jpeg
from deft_policies.checkpoint.config import load_config
from deft_policies.model.image import ImageProcessor
from tests import slow_image_chain
from tests.golden import TINY_OPENVLA, chain_image


def median_ms(work: Callable[[], object], repeats: int) -> str:
    """Wall time and the thread's own time, which other processes disturb less."""
    work()
    wall, own = [], []
    for _ in range(repeats):
        start, own_start = time.perf_counter(), time.thread_time()
        work()
        own.append((time.thread_time() - own_start) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
    return f"{statistics.median(wall):9.2f} {statistics.median(own):9.2f} {min(wall):9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    frame = chain_image("synth256", "0_input")
    compressed = round_trip_jpeg(frame)
    resized = resize_lanczos3(compressed)
    processor = ImageProcessor(load_config(Path(TINY_OPENVLA)).image, ImageChain.NONE)

    def run_twin() -> np.ndarray:
        return slow_image_chain.crop_centre(
            slow_image_chain.resize_lanczos3(round_trip_jpeg(frame), 224), 224
        )

    if not np.array_equal(run_twin(), ImageChain.LIBERO.apply(frame)):
        raise SystemExit("the chain and its twin differ")
    rows = {
        "jpeg round trip": median_ms(lambda: round_trip_jpeg(frame), repeats),
        "lanczos3 256 -> 224": median_ms(lambda: resize_lanczos3(compressed), repeats),
        "centre crop": median_ms(lambda: crop_centre(resized), repeats),
        "whole libero chain": median_ms(lambda: ImageChain.LIBERO.apply(frame), repeats),
        "slow twin of the chain": median_ms(run_twin, 3),
        "processor 256 -> 224": median_ms(lambda: processor.fit(frame), repeats),
        "pixel values": median_ms(lambda: processor.pixel_values([resized]), repeats),
    }
    print(f"one core of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    print(f"{'milliseconds':24}    median  cpu only      best")
    for name, times in rows.items():
        print(f"{name:24} {times}")


if __name__ == "__main__":
    main()
