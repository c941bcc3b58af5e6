"""What is counted, without a server around it."""

from hypothesis import given, strategies
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from deft_server.serving.metrics import Metrics

BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@given(sizes=strategies.lists(strategies.integers(0, 70)))
def test_values_are_counted_as_the_library_counts_them(sizes: list[int]):
    ours, registry = Metrics(), CollectorRegistry()
    twin = Histogram("deft_batch_size", "Frames in a batch", buckets=BOUNDS, registry=registry)
    for size in sizes:
        ours.batch_size.observe(size)
        twin.observe(size)

    page = ours.page().decode()
    told = [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]
    assert all(line in page.splitlines() for line in told)
