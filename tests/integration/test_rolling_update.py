"""A rolling update on a Ray of its own, to a policy with other statistics, under steady callers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deft_core.types import ActionChunk, ActOptions
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_server.replicas.front import ReplicaHost
from deft_server.replicas.ray_serve import (
    APPLICATION,
    RayCluster,
    build_application,
    import_ray,
)
from deft_server.serving.hosting import RemotePolicy
from deft_server.serving.service import Service
from deft_server.settings import Settings
from tests.standins.policies import CALLER, FileGatedPolicy, LimitedFake, frame

SLOW = "take your time"
OLD, NEW = 0.5, 0.05  # what each version answers; half of its limit
SETTINGS = Settings(replicas=2, replica_cpus=0.1, replica_surge=True, max_batch=4)
WITHIN_S = 120.0


@dataclass(eq=False)
class Version(FileGatedPolicy, LimitedFake):
    """Answers with half of its limit, and slow frames not before a file is there."""

    held: str = ""  # a file: a slow frame is being answered

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        if all(one.observation.instruction != SLOW for one in batch):
            return LimitedFake.act(self, batch)
        Path(self.held).touch()
        return super().act(batch)

    def answer(self, request: PolicyRequest) -> ActionChunk:
        return ActionChunk(np.full((1, 7), self.limit / 2))


async def ask(service: Service, session_id: str, instruction: str = "lift the cup") -> float:
    options = ActOptions(session_id=session_id)
    chunk = await service.act(frame(instruction=instruction), options, CALLER)
    return float(chunk.actions[0, 0])


async def update_under_way(old: partial[Version], new: partial[Version]) -> dict[str, list[float]]:
    """What callers get who ask through an update, and the one who asked before it began."""
    _, serve = import_ray()
    cluster = RayCluster(SETTINGS, old, "1")
    service = Service(RemotePolicy(partial(ReplicaHost, cluster)), SETTINGS)
    service.start()
    answers: dict[str, list[float]] = {f"steady {number}": [] for number in range(6)}
    is_over = asyncio.Event()

    async def steady(name: str) -> None:
        while not is_over.is_set():
            answers[name].append(await ask(service, name))

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                await asyncio.sleep(0.01)

    try:
        await service.scheduler.settled()
        callers = [asyncio.create_task(steady(name)) for name in answers]
        await until(lambda: all(answers.values()))
        # Some steady frames wait behind it in its replica, which has no place for all of them.
        slow = asyncio.create_task(ask(service, "slow", SLOW))
        await until(Path(old.keywords["held"]).exists)
        updating = asyncio.create_task(
            asyncio.to_thread(
                serve.run,
                build_application(new, "2", SETTINGS),
                name=APPLICATION,
                route_prefix=None,
            )
        )
        await until(lambda: any(NEW in one for one in answers.values()))
        limits = service.policy.limits_of(None)
        assert limits is not None
        assert limits.high[0] == 2 * NEW
        Path(old.keywords["gate"]).touch()
        last = await slow
        await updating
        await until(lambda: all(one[-1] == NEW for one in answers.values()))
        is_over.set()
        await asyncio.gather(*callers)
        answers["slow"] = [last]
    finally:
        await service.close()
    return answers


@pytest.mark.timeout(600)  # Ray starts eight processes, and on a busy machine slowly
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_nothing_is_lost_or_judged_by_the_limits_of_another_version(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: make install-ray")
    files = {"gate": str(tmp_path / "gate"), "held": str(tmp_path / "held")}
    old, new = (partial(Version, **files, limit=2 * action) for action in (OLD, NEW))
    answers = asyncio.run(update_under_way(old, new))
    assert answers.pop("slow") == [OLD]
    for seen in answers.values():
        assert set(seen) == {OLD, NEW}
        assert seen[-1] == NEW
