"""What the server counts and measures, for Prometheus. One registry per app, nothing global."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from deft_core.types import ActionChunk, Intervention
from deft_policies.errors import DeviceError, NoActionError, RequestError
from deft_server.errors import (
    DeadlineError,
    ForbiddenError,
    MissingKeyError,
    NotReadyError,
    OverloadedError,
    PolicyFailedError,
    SupersededFrameError,
    UnsafeAnswerError,
    WrongHostError,
)
from deft_server.serving.frame import Failure, QueuedFrame

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5,
)  # fmt: skip
_NOT_STAGES = ("total_ms", "round_trip_ms")
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_PASSES = (1, 2, 3, 4, 5, 6, 7, 8)
# Why a frame may get no actions. What is not here is counted, too, from its first time on.
_REASONS = (
    DeadlineError, DeviceError, ForbiddenError, MissingKeyError, NoActionError, NotReadyError,
    OverloadedError, PolicyFailedError, RequestError, SupersededFrameError, UnsafeAnswerError,
    WrongHostError,
)  # fmt: skip
MAX_KEYS = 256  # whose frames are counted apart
OTHER_KEYS = "(others)"


class Metrics:
    """Every metric of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self._children: dict[tuple[object, ...], Counter] = {}
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.requests = counter(
            "deft_requests", "Requests by route and status", ("route", "status")
        )
        self.act_seconds = self._histogram(
            "deft_act_seconds", "Seconds from a frame's last byte to its answer", _SECONDS
        )
        self.queue_seconds = self._histogram(
            "deft_queue_seconds", "Seconds a frame waited", _SECONDS
        )
        self.batch_seconds = self._histogram(
            "deft_batch_seconds", "Seconds the policy took for a batch", _SECONDS
        )
        self.batch_size = self._histogram("deft_batch_size", "Frames in a batch", _SIZES)
        self.passes = self._histogram("deft_passes", "Target passes per action", _PASSES)
        self.max_batch = gauge("deft_max_batch", "Most frames in a batch, as memory allows now")
        self.replicas = gauge("deft_replicas", "Replicas that take batches")
        self.replica_batches = counter("deft_replica_batches", "Batches by replica", ("replica",))
        self.replica_seconds = counter(
            "deft_replica_seconds",
            "Seconds a replica had a batch, with the way there and back",
            ("replica",),
        )
        self.stage_seconds = counter(
            "deft_stage_seconds", "Seconds of policy time by stage", ("stage",)
        )
        self.accepted = counter("deft_accepted_tokens", "Drafted tokens that were accepted")
        self.relaxed = counter(
            "deft_relaxed_tokens", "Executed tokens that differ from the target's own choice"
        )
        self.unanswered = counter("deft_unanswered_frames", "Frames not answered", ("reason",))
        self.unsafe = counter("deft_unsafe_answers", "Answers withheld: not finite or out of range")
        self.interventions = counter("deft_interventions", "Answers changed for safety", ("kind",))
        self.policy_failures = counter(
            "deft_policy_failures", "Calls of the policy that failed", ("kind",)
        )
        self._key_frames = counter(
            "deft_key_frames", "Frames by API key, and what became of them", ("key", "outcome")
        )
        self._keys: set[str] = set()
        # An alert on `increase()` does not see a series that is born with its first event.
        for kind in (*get_args(Failure), "hang"):
            self.policy_failures.labels(kind)
        for reason in _REASONS:
            self.unanswered.labels(reason.__name__)
        for one in (Intervention.CLAMP, Intervention.GRAMMAR):
            self.interventions.labels(one.value)
        self.keys_usable = gauge("deft_keys_usable", "0 while the key file cannot be read")
        self.ready = gauge("deft_ready", "1 where frames are answered")
        self.waiting = gauge("deft_waiting_frames", "Frames waiting")
        self.in_flight = gauge("deft_frames_with_policy", "Frames in the batch in hand")
        self.in_hand = gauge("deft_requests_in_hand", "Requests not answered yet")
        self.sessions = gauge("deft_sessions", "Sessions remembered")

    def _histogram(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, about, buckets=bounds, registry=self.registry)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def count_request(self, route: str, status: int) -> None:
        """Count one HTTP request."""
        self._once(self.requests, route, str(status)).inc()

    def count_outcome(self, key: str, error: Exception | None = None) -> None:
        """Count what became of a frame: answered, or why it was not."""
        outcome = "answered"
        if error is not None:
            reason = type(error).__name__
            self._once(self.unanswered, reason).inc()
            outcome = "late" if isinstance(error, DeadlineError) else "not answered"
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            key = OTHER_KEYS
        self._keys.add(key)
        self._once(self._key_frames, key, outcome).inc()

    def count_frame(self, frame: QueuedFrame) -> None:
        """Count a frame that the policy answered, its time, and who answered it."""
        self.batch_size.observe(frame.batch_size)
        self.batch_seconds.observe(frame.service_s)
        self._once(self.replica_batches, frame.replica).inc()
        # Frames that were there at the same time share it: a replica is busy once.
        busy_s = frame.service_s / max(1, frame.batch_size)
        self._once(self.replica_seconds, frame.replica).inc(busy_s)

    def observe_answer(self, chunk: ActionChunk, queue_s: float, total_s: float) -> None:
        """Take in what a policy answered to a frame, and the server's own times."""
        self.act_seconds.observe(total_s)
        self.queue_seconds.observe(queue_s)
        for stage, milliseconds in filter(itemgetter(1), vars(chunk.timings).items()):
            if stage not in _NOT_STAGES:
                self._once(self.stage_seconds, stage.removesuffix("_ms")).inc(milliseconds / 1000)
        trace = chunk.trace
        if trace is not None:
            self.passes.observe(trace.num_passes)
            self.accepted.inc(sum(trace.accepted_lengths))
            self.relaxed.inc(round(trace.relaxed_share * len(trace.tokens)))

    def _once(self, counter: Counter, *labels: str) -> Counter:
        """Return the child of a counter; looking it up in the library takes longer."""
        key = (id(counter), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        return child
