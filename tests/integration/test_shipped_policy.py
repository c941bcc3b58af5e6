"""The policy that ships, behind queue, batch, replica and recording: the same bits as alone."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_client import DeftError, Observation, PolicyClient
from deft_core.recordings import EpisodeHeader, RecordedStep, encode_end, encode_header, encode_step
from deft_core.types import ActOptions
from deft_policies import tiny_libero
from deft_policies.base import Policy, PolicyAnswer, PolicyRequest
from deft_policies.benchmark.replay import ReplayFrame, generate_frames, with_statistics_key
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_server.app import create_app
from deft_server.commands.replay import read_steps, replay
from deft_server.serving.service import Service
from deft_server.settings import Settings
from tests import golden
from tests.server.replicas.test_replicas import replica_of, travelled
from tests.server.running import running
from tests.standins.policies import CALLER


def shipped() -> Policy:
    options = ModelOptions(device="cpu", num_threads=1, is_guarded=False)
    return load_policy(tiny_libero.complete(options))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return shipped()


def test_rounds_of_one_row_leave_the_other_row_as_it_is(policy):
    (shown,) = with_statistics_key(generate_frames(1), policy)
    batch = [
        PolicyRequest(
            shown.observation, options=ActOptions(statistics_key="libero_object", decoding=one)
        )
        for one in ("autoregressive", "lossless")
    ]
    alone = [policy.act([one])[0].chunk.actions.tobytes() for one in batch]
    waits, goes = policy.start(batch)
    while not goes.has_ended:
        assert policy.step([goes]) in ([], [goes])
    assert not waits.has_ended
    while not waits.has_ended:
        policy.step()
    assert [one.answer.chunk.actions.tobytes() for one in (waits, goes)] == alone


@pytest.mark.promise
def test_three_robots_on_one_service_are_answered_as_each_alone(policy):
    shown = with_statistics_key(generate_frames(6), policy)
    alone = []
    for turn in range(3):
        memory = SessionMemory()
        for one in shown[turn:]:
            asked = ActOptions(statistics_key=one.statistics_key)
            (answer,) = policy.act([PolicyRequest(one.observation, memory, asked)])
            alone.append(answer.chunk.actions.tobytes())
            memory = answer.memory
    served = asyncio.run(served_actions(policy, [shown[turn:] for turn in range(3)]))
    assert [one for answers in served for one in answers] == alone


async def served_actions(policy: Policy, asked_for: list[list[ReplayFrame]]) -> list[list[bytes]]:
    """The actions that robots get, each with its own frames, all at once."""
    service = Service(lambda: policy, Settings(max_batch=3))
    service.start()
    await service.scheduler.settled()

    async def robot(name: str, frames: list[ReplayFrame]) -> list[bytes]:
        answers = []
        for one in frames:
            asked = ActOptions(session_id=name, statistics_key=one.statistics_key)
            chunk = await service.act(one.observation, asked, CALLER)
            answers.append(chunk.actions.tobytes())
        return answers

    served = await asyncio.gather(*(robot(str(turn), one) for turn, one in enumerate(asked_for)))
    await service.close()
    return served


def test_two_replicas_answer_to_the_bit_as_one_thread_does(policy):
    replicas = [replica_of(one) for one in (policy, shipped())]
    memories = [SessionMemory(), SessionMemory()]
    for step, shown in enumerate(with_statistics_key(generate_frames(8), policy)):
        options = ActOptions(statistics_key=shown.statistics_key)
        requests = [PolicyRequest(shown.observation, one, options) for one in memories]
        (here,) = policy.act(requests[:1])
        (there,) = travelled(replicas[step % 2], requests[1])
        assert isinstance(there, PolicyAnswer)
        assert there.chunk.actions.tobytes() == here.chunk.actions.tobytes()
        memories = [here.memory, there.memory]
        assert memories[0].own == memories[1].own


def test_several_observations_in_one_message_are_answered_as_one_by_one(policy):
    generator = np.random.default_rng(7)
    instruction = policy.info.instructions[0]
    with running(create_app(policy)) as address, PolicyClient(f"http://{address}") as client:
        for _ in range(3):
            seen = {
                f"arm-{one}": Observation(
                    generator.integers(0, 256, (64, 64, 3), np.uint8), instruction
                )
                for one in range(4)
            }
            alone = {
                name: client.act(one, ActOptions(session_id=f"{name} alone"))
                for name, one in seen.items()
            }
            for name, answer in client.act_all(seen).items():
                assert not isinstance(answer, DeftError)
                np.testing.assert_array_equal(answer.actions, alone[name].actions)


def test_a_recorded_run_of_relaxed_methods_is_replayed_to_the_bit(tmp_path: Path):
    """Which plan a guard takes depends on timing; the trace tells the replay which it was."""
    options = ModelOptions(
        checkpoint=str(golden.TINY_OPENVLA), statistics_key="libero_spatial", device="cpu"
    )
    policy, memory, cases = load_policy(options), SessionMemory(), golden.cases_with_image()
    methods = ("deft", "within-bins:radius=255,guard=off", "lossless", "deft:rule.turn=9")
    parts, relaxed = [encode_header(EpisodeHeader("arm", 1000.0))], 0.0
    for index in range(24):
        case = cases[(index + 1) // 2 % len(cases)]
        seen = Observation(case.image(), case.instruction)
        asked = ActOptions(session_id="arm", decoding=methods[index % len(methods)])
        (answer,) = policy.act([PolicyRequest(seen, memory, replace(asked, want_trace=True))])
        memory, chunk = answer.memory, answer.chunk
        assert chunk.trace is not None
        relaxed += chunk.trace.relaxed_share
        parts.append(encode_step(RecordedStep(index, 0.1 * index, seen, asked, chunk)))
    (tmp_path / "episode-0.deftrec").write_bytes(b"".join([*parts, encode_end("reset")]))
    assert relaxed > 0
    again = list(replay(load_policy(options), read_steps(tmp_path), with_recorded_options=True))
    assert len(again) == 24
    assert all(one.largest == 0 and one.same_tokens for one in again)
