"""Measures replicas on Ray: everything in about ten minutes, on a Ray of its own.

`python -m scripts.bench_server.cluster` runs it all, naming measurements runs those.
"""

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deft_server.replicas.ray_serve import import_ray
from scripts.bench_server.changes import kill, scale, update
from scripts.bench_server.replicas import RayPlace, added_time, forecast, throughput

MEGABYTE = 1024 * 1024
MEASUREMENTS: dict[str, Callable[[RayPlace], None]] = {
    "throughput": throughput,
    "added": added_time,
    "forecast": forecast,
    "kill": kill,
    "update": update,
    "scale": scale,
}


@contextmanager
def own_ray() -> Iterator[str]:
    """Start Ray with room for eight small replicas, yield its address, and end it."""
    ray, _ = import_ray()
    context = ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 * MEGABYTE,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.WARNING,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser("python -m scripts.bench_server.cluster", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MEASUREMENT", help=", ".join(MEASUREMENTS))
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of most loads [20]",
    )
    given = parser.parse_args()
    unknown = set(given.names) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before this", flush=True)
    with own_ray() as address:
        for name in given.names or MEASUREMENTS:
            try:
                MEASUREMENTS[name](RayPlace(address, given.seconds))
            except Exception:
                logging.exception("%s is not measured; the others can be", name)
            import_ray()[1].shutdown()  # or the next would begin with these replicas


if __name__ == "__main__":
    main()
