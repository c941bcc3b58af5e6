"""From the options of an evaluation to its runs: one per suite, decoding method and pacing."""

import platform
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from deft_client.chunks import Seam
from deft_client.libero.errors import ProfileError
from deft_client.libero.evaluation.player import Pacing, VideoChoice, WorkerSettings
from deft_client.libero.evaluation.selection import (
    EXPERT,
    LIBERO,
    TRAINED,
    check_physics,
    check_scenes,
    describe_assets,
    find_suite,
    select_episodes,
    settle_assets,
    trained_tasks,
    untrained_tasks,
)
from deft_client.libero.expert.expert import check_tasks
from deft_client.libero.policies.source import PolicySource
from deft_client.libero.results.records import TrialKey
from deft_client.libero.results.store import RunHeader
from deft_client.libero.simulator.environment import EnvironmentSettings
from deft_client.libero.simulator.mujoco_version import installed_mujoco
from deft_client.libero.simulator.suites import Suite
from deft_client.types import ServerInfo

_SIMULATOR_PACKAGES = ("hf-libero", "libero", "robosuite", "mujoco", "bddl")


@dataclass(frozen=True)
class EvaluationOptions:
    """What was asked for, checked as far as that is possible without a server."""

    suites: Sequence[str]
    folder: Path
    source: PolicySource
    simulator: str = LIBERO
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    tasks: str | None = None
    trials: str | None = None
    num_episodes: int | None = None
    decodings: Sequence[str | None] = (None,)  # None: the server's own choice
    pacings: Sequence[Pacing] = (Pacing.LOCK_STEP,)
    seam: Seam = Seam.FREEZE  # in real time
    step_limit: int | None = None  # None: the suite's
    seed: int = 7
    video: VideoChoice = VideoChoice.NONE
    num_workers: int = 1
    ray: str | None = None  # address of the cluster that has the workers; None: this machine
    patience_s: float = 30.0  # for a server that went away
    any_mujoco: bool = False  # play also what the installed MuJoCo is known to upset


@dataclass(frozen=True)
class PlannedRun:
    """One run that is to be started or continued."""

    header: RunHeader
    settings: WorkerSettings
    keys: tuple[TrialKey, ...]
    warnings: tuple[str, ...]  # what the policy was not trained on


def plan_runs(asked: EvaluationOptions, info: ServerInfo | None) -> list[PlannedRun]:
    """Every run of the evaluation, in the order in which they are played."""
    asked = replace(asked, environment=settle_assets(asked.environment, info))
    suites = [find_suite(asked.simulator, name) for name in asked.suites]
    if not asked.any_mujoco:
        check_physics(asked.simulator, asked.environment, asked.suites, installed_mujoco())
    assets = describe_assets(asked.simulator, asked.environment)
    runs = []
    for suite in suites:
        wanted = trained_tasks(suite, info) if asked.tasks == TRAINED else asked.tasks
        keys = select_episodes(suite, wanted, asked.trials, asked.num_episodes)
        numbers = {key.task for key in keys}
        if asked.source.factory == EXPERT:
            check_tasks(map(suite.task, sorted(numbers)))
        check_scenes(asked.simulator, asked.environment, suite)
        warnings = tuple(_warnings(suite, numbers, assets, info))
        for decoding in asked.decodings:
            for pacing in asked.pacings:
                settings = _settings(asked, suite, decoding, pacing, info)
                header = _header(suite, settings, assets, info)
                settings = replace(settings, folder=asked.folder / _slug(header.name))
                runs.append(PlannedRun(header, settings, keys, warnings))
    return runs


def _warnings(
    suite: Suite, numbers: AbstractSet[int], assets: str, info: ServerInfo | None
) -> Iterator[str]:
    if strange := [str(one) for one in untrained_tasks(suite, info) if one in numbers]:
        yield (
            f"the policy was not trained on tasks {', '.join(strange)} of {suite.name}; "
            f"`--tasks {TRAINED}` leaves them out"
        )
    kinds = {one.partition(" ")[0] for one in (info.assets if info else "").split(", ")}
    if kinds != {""} and assets.partition(" ")[0] not in kinds:
        yield (
            f"the policy was trained on {info.assets if info else ''}, and this is {assets}; "
            f"`--assets {TRAINED}` plays on what it knows"
        )


def choose_statistics_key(asked: str | None, suite: Suite, info: ServerInfo | None) -> str | None:
    """The key to ask for: the one given, else the suite's own if the server has it.

    Checkpoints fine-tuned on LIBERO name their statistics after the suite, some of them with
    `_no_noops`. A server of another project does not tell which it has: it gets the suite's.
    """
    if asked is not None:
        if info is not None and asked not in info.statistics_keys:
            known = ", ".join(info.statistics_keys) or "none"
            raise ProfileError(f"the server has no statistics key {asked!r}; it has: {known}")
        return asked
    if info is None:
        return suite.statistics_key
    for key in (suite.statistics_key, f"{suite.statistics_key}_no_noops"):
        if key in info.statistics_keys:
            return key
    return info.default_statistics_key


def _settings(
    asked: EvaluationOptions,
    suite: Suite,
    decoding: str | None,
    pacing: Pacing,
    info: ServerInfo | None,
) -> WorkerSettings:
    name = None if decoding is None else decoding.partition(":")[0]  # knobs the server judges
    if name is not None and info is not None and name not in info.decoding_methods:
        known = ", ".join(info.decoding_methods) or "none"
        raise ProfileError(f"the server has no decoding {name!r}; it has: {known}")
    source, profile = asked.source, asked.source.profile
    key = choose_statistics_key(source.options.statistics_key, suite, info)
    options = replace(source.options, decoding=decoding, statistics_key=key)
    return WorkerSettings(
        folder=asked.folder,
        source=replace(source, options=options),
        simulator=asked.simulator,
        environment=replace(asked.environment, wrist_camera=profile.wrist_camera),
        pacing=pacing,
        step_limit=asked.step_limit or suite.step_limit,
        executed_steps=profile.executed_steps,
        seam=asked.seam,
        seed=asked.seed,
        video=asked.video,
    )


def _header(
    suite: Suite, settings: WorkerSettings, assets: str, info: ServerInfo | None
) -> RunHeader:
    now = datetime.now(timezone.utc)
    return RunHeader(
        run=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",
        created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        name=" ".join([suite.name, *_name_parts(settings, info)]),
        suite=suite.name,
        assets=assets,
        options=_options(settings),
        versions=dict(_versions(settings.simulator)),
        server=_server(settings, info),
        notes={
            "url": "" if settings.source.factory else settings.source.url,
            "machine": f"{platform.machine()} {platform.system()}, Python "
            f"{platform.python_version()}",
        },
    )


def _name_parts(settings: WorkerSettings, info: ServerInfo | None) -> Iterator[str]:
    source = settings.source
    if source.factory:
        yield source.name
    else:
        if source.profile.name != "deft":
            yield source.profile.name
        decoding = source.options.decoding or (info.decoding if info else "")
        if decoding:
            yield decoding
        if source.options.radius is not None:
            yield f"r{source.options.radius}"
    if source.stream:
        yield "stream"
    if settings.environment.widen_metres > 0:
        yield f"widened-{100 * settings.environment.widen_metres:g}cm"
    if settings.pacing is Pacing.REAL_TIME:
        yield "real-time"
        if settings.seam is not Seam.FREEZE:
            yield settings.seam.value
    if source.network_delay_ms > 0:
        yield f"delay{source.network_delay_ms:g}ms"


def _options(settings: WorkerSettings) -> dict[str, str]:
    """Everything that was decided on this side and that changes what a result means."""
    source = settings.source
    return {
        "decoding": source.options.decoding or "",
        "environment": settings.simulator,
        "environment_seed": str(settings.environment.seed),
        "executed_steps": str(settings.executed_steps or "all"),
        "frame_size": str(settings.environment.frame_size),
        "gripper": source.profile.gripper.value,
        "image_chain_of_client": source.profile.client_chain.value,
        "network_delay_ms": f"{source.network_delay_ms:g}",
        "pacing": settings.pacing.value,
        "policy": source.name or "server",
        "policy_factory": source.factory,
        "profile": source.profile.name,
        "radius": "" if source.options.radius is None else str(source.options.radius),
        **({"seam": settings.seam.value} if settings.pacing is Pacing.REAL_TIME else {}),
        "seed": str(settings.seed),
        "statistics_key": source.options.statistics_key or "",
        "step_limit": str(settings.step_limit),
        "transport": "websocket" if source.stream else "request",
        "widen_metres": f"{settings.environment.widen_metres:g}",
    }


def _server(settings: WorkerSettings, info: ServerInfo | None) -> Mapping[str, str]:
    if info is None:
        return {}
    described = {
        "policy": info.policy,
        "image": f"{info.image_height}x{info.image_width}",
        "image_chain": info.image_chain,
        **{f"version of {name}": version for name, version in info.versions.items()},
    }
    if not settings.source.options.decoding:
        described["decoding"] = info.decoding
    return described


def _versions(simulator: str) -> Iterator[tuple[str, str]]:
    packages = ("deft-client", *(_SIMULATOR_PACKAGES if simulator == LIBERO else ()))
    for package in packages:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
