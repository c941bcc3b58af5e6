"""`make demo`: serve a policy on this machine, send it camera frames, print what came back."""

import sys

import numpy as np

from deft_client import ActionChunk, Observation, PolicyClient
from deft_client.stream import StreamClient
from scripts.local_server import ServerDidNotStartError, local_server

NUM_FRAMES = 300
WARM_UP_FRAMES = 20
INSTRUCTION = "pick up the alphabet soup and place it in the basket"


def main() -> int:
    """Run the demonstration; return its exit code."""
    print("starting the server ...", flush=True)
    try:
        with local_server("--policy", "constant") as url:
            show_round_trips(url)
    except ServerDidNotStartError as error:
        print(error, file=sys.stderr)
        return 1
    print("\nTry it yourself: `make serve` in one terminal, `deft-client ping` in another.")
    return 0


def show_round_trips(url: str) -> None:
    """Send frames both ways, and print the last action and how long the answers took."""
    with PolicyClient(url) as policy:
        info = policy.info()
        shape = f"{info.chunk_length}x{info.action_dim}"
        print(f"ready at {url}: policy {info.policy}, actions {shape}")
        rows = {"POST /v1/act": send_frames(policy)}
    with StreamClient(url) as policy:
        rows["/v1/stream"] = send_frames(policy)
    print(f"\nround trips of {NUM_FRAMES} frames of 256x256 pixels, in ms")
    print(f"{'':<14}{'p50':>8}{'p95':>8}{'p99':>8}{'frames/s':>10}")
    for name, chunks in rows.items():
        spent_ms = [chunk.timings.round_trip_ms for chunk in chunks]
        p50, p95, p99 = np.percentile(spent_ms, [50, 95, 99])
        rate = 1000 * len(spent_ms) / sum(spent_ms)
        print(f"{name:<14}{p50:>8.2f}{p95:>8.2f}{p99:>8.2f}{rate:>10.0f}")
    print(f"\nlast action: {chunks[-1].actions[0].tolist()}")


def send_frames(policy: PolicyClient) -> list[ActionChunk]:
    """Return the answers to frames that differ from each other, without those that warm up."""
    frames = np.random.default_rng(0).integers(0, 256, (8, 256, 256, 3), dtype=np.uint8)
    chunks = []
    for number in range(WARM_UP_FRAMES + NUM_FRAMES):
        chunks.append(policy.act(Observation(frames[number % len(frames)], INSTRUCTION)))
    return chunks[WARM_UP_FRAMES:]


if __name__ == "__main__":
    raise SystemExit(main())
