"""From the options of an evaluation to its runs: one per suite, decoding method and pacing."""

import argparse
import platform
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path

from deft_core.measures.statistics import LEAST_EPISODES
from deft_core.types import ChunkBlending, ServerInfo
from deft_libero.errors import SelectionError
from deft_libero.evaluation.selection import (
    LIBERO,
    TRAINED,
    check_physics,
    describe_assets,
    find_suite,
    held_out_trials,
    select_episodes,
    trained_tasks,
    untrained_tasks,
)
from deft_libero.policies.source import PolicySource
from deft_libero.results.records import TrialKey
from deft_libero.results.store import RunHeader
from deft_libero.simulator.environment import EnvironmentSettings
from deft_libero.simulator.mujoco_version import installed_mujoco
from deft_libero.simulator.suites import Suite

DEFAULT_SEED = 7
_SIMULATOR_PACKAGES = ("hf-libero", "libero", "robosuite", "mujoco", "bddl")
# Of what a server says in detail: which model it is, and what decides how fast it answers; and
# of its own method, where no other one is asked for.
_OF_MODEL = (
    *("weights", "device", "processor", "dtype", "quantization", "draft model", "guard"),
    *("head", "film", "state"),
)
_OF_METHOD = ("rule", "plans", "options")


class Pacing(Enum):
    """Whether the simulator waits for answers."""

    LOCK_STEP = "lock-step"
    REAL_TIME = "real-time"


class VideoChoice(Enum):
    """Of which episodes a video is kept."""

    ALL = "all"
    FAILURES = "failures"  # whatever did not succeed
    NONE = "none"


@dataclass(frozen=True)
class RunConfig:
    """One run, whole: it is planned once, pickled to the workers and written to `run.json`.

    Results are added to a folder only where everything agrees that `header` puts into its options,
    versions, server and assets; the last four fields may differ when a run is resumed.
    """

    suite: str
    source: PolicySource = field(default_factory=PolicySource)
    simulator: str = LIBERO
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    pacing: Pacing = Pacing.LOCK_STEP
    blending: ChunkBlending = ChunkBlending.WAIT
    step_limit: int = 0
    seed: int = DEFAULT_SEED  # of Python's and numpy's global generators, in every episode
    held_out_attempt: int | None = None  # at held-out initial states: 1, 2, ...
    assets: str = ""  # what the simulator shows, as results name it
    server: Mapping[str, str] = field(default_factory=dict)  # what it says of itself
    plan: Mapping[str, str] = field(default_factory=dict)  # which plan it is an entry of
    out: Path = Path("results")  # a folder per run in it
    video: VideoChoice = VideoChoice.NONE
    keys: tuple[TrialKey, ...] = ()  # the episodes that are asked for

    @property
    def name(self) -> str:
        """What reports call it."""
        return " ".join([self.suite, *self._name_parts()])

    @property
    def folder(self) -> Path:
        """Where its results are."""
        return self.out / re.sub(r"[^A-Za-z0-9._-]+", "-", self.name)

    @property
    def executed_steps(self) -> int | None:
        """Actions of an answer that are executed before the next observation; None: all."""
        return self.source.profile.executed_steps

    def header(self) -> RunHeader:
        """What `run.json` says of it, with a new number of a run."""
        now = datetime.now(UTC)
        machine = f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"
        return RunHeader(
            run=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",
            created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
            name=self.name,
            suite=self.suite,
            assets=self.assets,
            options=self._options(),
            versions=dict(_versions(self.simulator)),
            server=self.server,
            notes={
                "url": "" if self.source.factory else self.source.url,
                "machine": machine,
                **self.plan,
            },
        )

    def _name_parts(self) -> Iterator[str]:
        source = self.source
        if (self.held_out_attempt or 1) > 1:  # first: reports leave out last words of all runs
            yield f"look {self.held_out_attempt}"
        if source.factory:
            yield source.name
        else:
            if source.profile.name != "deft":
                yield source.profile.name
            if decoding := source.options.decoding or self.server.get("decoding"):
                yield decoding
            if source.options.radius is not None:
                yield f"r{source.options.radius}"
            if source.options.want_reasoning:
                yield "thinking-aloud"
        if self.seed != DEFAULT_SEED:
            yield f"seed{self.seed}"
        if (dtype := self.server.get("dtype", "float32")) != "float32":
            yield dtype
        if source.stream:
            yield "stream"
        if self.environment.widen_metres > 0:
            yield f"moved-{100 * self.environment.widen_metres:g}cm"
        if self.pacing is Pacing.REAL_TIME:
            yield "real-time"
        if self.blending is not ChunkBlending.WAIT and self._uses_blending:
            yield self.blending.value
        if source.network_delay_ms > 0:
            yield f"delay{source.network_delay_ms:g}ms"

    @property
    def _uses_blending(self) -> bool:
        """In lock step chunks follow each other whatever the blending, but for an ensemble."""
        return self.pacing is Pacing.REAL_TIME or self.blending is ChunkBlending.ENSEMBLE

    @property
    def _steps_as_robosuite(self) -> bool:
        return self.simulator == LIBERO and not self.environment.fast

    def _options(self) -> dict[str, str]:
        """Everything that was decided on this side and that changes what a result means."""
        source = self.source
        return {
            "decoding": source.options.decoding or "",
            "environment": self.simulator,
            "environment_seed": str(self.environment.seed),
            "executed_steps": str(self.executed_steps or "all"),
            "frame_size": str(self.environment.frame_size),
            "gripper": source.profile.gripper.value,
            **(
                {}
                if self.held_out_attempt is None
                else {"held-out look": str(self.held_out_attempt)}
            ),
            "image_chain_of_client": source.profile.client_chain.value,
            "network_delay_ms": f"{source.network_delay_ms:g}",
            "pacing": self.pacing.value,
            # Runs that do not say were played by Deft's stepping, as all were at first.
            **({"physics": "robosuite"} if self._steps_as_robosuite else {}),
            "policy": source.name or "server",
            "policy_factory": source.factory,
            "profile": source.profile.name,
            **({"reasoning": "aloud"} if source.options.want_reasoning else {}),
            "radius": "" if source.options.radius is None else str(source.options.radius),
            **({"seam": self.blending.value} if self._uses_blending else {}),
            "seed": str(self.seed),
            "statistics_key": source.options.statistics_key or "",
            "step_limit": str(self.step_limit),
            "transport": "websocket" if source.stream else "request",
            "widen_metres": _moved(self.environment.widen_metres),
        }


def plan_runs(asked: argparse.Namespace, info: ServerInfo | None) -> list[RunConfig]:
    """Every run that the options of `deft-client eval` ask for, in the order of playing."""
    suites = [find_suite(asked.environment, name) for name in asked.suites]
    environment = EnvironmentSettings(
        widen_metres=asked.widen_cm / 100,
        assets_folder=asked.assets,
        wrist_camera=asked.source.profile.wrist_camera,
        fast=asked.fast,
    )
    if not asked.any_mujoco:
        check_physics(asked.environment, environment, asked.suites, installed_mujoco())
    assets = describe_assets(asked.environment, environment)
    pacings = [Pacing.LOCK_STEP] if asked.lock_step or not asked.real_time else []
    pacings += [Pacing.REAL_TIME] if asked.real_time else []
    runs = []
    for suite in suites:
        wanted = trained_tasks(suite, info) if asked.tasks == TRAINED else asked.tasks
        keys = select_episodes(suite, wanted, asked.trials, asked.episodes)
        if asked.held_out_attempt is None:
            _refuse_held_out(suite, keys, info)
        for decoding in asked.decoding:
            source = _source(asked.source, suite, decoding, info)
            for pacing in pacings:
                runs.append(
                    RunConfig(
                        suite=suite.name,
                        source=source,
                        simulator=asked.environment,
                        environment=environment,
                        pacing=pacing,
                        blending=asked.blending,
                        step_limit=asked.step_limit or suite.step_limit,
                        seed=asked.seed,
                        held_out_attempt=asked.held_out_attempt,
                        assets=assets,
                        server=_server(source, info),
                        plan=asked.plan_notes,
                        out=asked.out,
                        video=asked.video,
                        keys=keys,
                    )
                )
    return runs


def in_turn(runs: Sequence[RunConfig]) -> Iterator[tuple[RunConfig, Sequence[TrialKey]]]:
    """Every run with a part of its episodes, the runs of a suite in turn.

    Runs whose times are compared must see the same machine, so a part is a task at most, and there
    are as many parts as a comparison takes.
    """
    for suite in dict.fromkeys(run.suite for run in runs):
        peers = [run for run in runs if run.suite == suite]
        if len(peers) == 1:
            yield peers[0], peers[0].keys
            continue
        keys = sorted(peers[0].keys)
        tasks = sorted({key.task for key in keys})
        parts = -(-LEAST_EPISODES // len(tasks)) if tasks else 0
        for task in tasks:
            own = [key for key in keys if key.task == task]
            for part in range(min(parts, len(own))):
                for run in peers:
                    yield run, own[part :: min(parts, len(own))]


def warnings_of(run: RunConfig, info: ServerInfo | None) -> Iterator[str]:
    """What the policy was not trained on, and is to play."""
    strange = untrained_tasks(find_suite(run.simulator, run.suite), info)
    if played := [str(task) for task in strange if task in {key.task for key in run.keys}]:
        yield (
            f"the policy was not trained on tasks {', '.join(played)} of {run.suite}; "
            f"`--tasks {TRAINED}` leaves them out"
        )
    trained_on = info.assets if info is not None else ""
    kinds = {one.partition(" ")[0] for one in trained_on.split(", ")}
    if trained_on and run.assets.partition(" ")[0] not in kinds:
        yield f"the policy was trained on {trained_on}, and this is {run.assets}"


def choose_statistics_key(asked: str | None, suite: Suite, info: ServerInfo | None) -> str | None:
    """The key to ask for: the one given, else the suite's own if the server has it.

    Checkpoints fine-tuned on LIBERO name their statistics after the suite, some of them with
    `_no_noops`. A server of another project does not tell which it has: it gets the suite's.
    """
    if asked is not None:
        if info is not None and asked not in info.statistics_keys:
            known = ", ".join(info.statistics_keys) or "none"
            raise SelectionError(f"the server has no statistics key {asked!r}; it has: {known}")
        return asked
    if info is None:
        return suite.statistics_key
    for key in (suite.statistics_key, f"{suite.statistics_key}_no_noops"):
        if key in info.statistics_keys:
            return key
    return info.default_statistics_key


def _refuse_held_out(suite: Suite, keys: Sequence[TrialKey], info: ServerInfo | None) -> None:
    played = held_out_trials(suite, info) & {key.trial for key in keys}
    if info is not None and played:
        raise SelectionError(
            f"{info.policy} holds out initial states {info.held_out[suite.statistics_key]} of "
            f"{suite.name}: they are played once, by a committed plan (--plan), after everything "
            "was chosen, since a choice made by them spoils them as evidence. Give --trials "
            "without them"
        )


def _source(
    source: PolicySource, suite: Suite, decoding: str | None, info: ServerInfo | None
) -> PolicySource:
    """The policy, asked for a suite's statistics and a decoding method."""
    name = None if decoding is None else decoding.partition(":")[0]  # knobs the server judges
    if name is not None and info is not None and name not in info.decoding_methods:
        known = ", ".join(info.decoding_methods) or "none"
        raise SelectionError(f"the server has no decoding {name!r}; it has: {known}")
    key = choose_statistics_key(source.options.statistics_key, suite, info)
    return replace(source, options=replace(source.options, decoding=decoding, statistics_key=key))


def _moved(metres: float) -> str:
    """How far things were moved; runs of earlier versions moved them alike in every task."""
    return f"{metres:g} by task and trial" if metres else "0"


def _server(source: PolicySource, info: ServerInfo | None) -> Mapping[str, str]:
    if info is None:
        return {}
    is_own_method = not source.options.decoding
    wanted = (*_OF_MODEL, *_OF_METHOD) if is_own_method else _OF_MODEL
    told = {
        name: text
        for name, text in info.details.items()
        if name in wanted or name.startswith("digest of ")
    }
    return {
        "policy": info.policy,
        "image": f"{info.image_height}x{info.image_width}",
        "image_chain": info.image_chain,
        **{f"version of {name}": version for name, version in info.versions.items()},
        **told,
        **({"decoding": info.decoding} if is_own_method else {}),
    }


def _versions(simulator: str) -> Iterator[tuple[str, str]]:
    packages = ("deft-client", *(_SIMULATOR_PACKAGES if simulator == LIBERO else ()))
    for package in packages:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
