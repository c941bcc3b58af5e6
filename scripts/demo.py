"""`make demo`: what Deft is for, within three minutes.

All methods answer the same frames in turn, while plain decoding plays: how much faster, and are the
answers the same? Once with a text before every action, where the policy was taught to write one,
and once at once. Then an episode is filmed, with plain decoding and with `lossless`.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from deft_client import ActOptions, PolicyClient, ServerInfo
from deft_core.measures.speed import speed_up
from deft_core.measures.statistics import LEAST_EPISODES
from deft_core.measures.table import markdown_table
from deft_core.reasoning import ACTION, parse_reasoning
from deft_core.types import ActionChunk, Observation
from deft_libero.commands import evaluate as evaluate_command
from deft_libero.commands.report import write_report
from deft_libero.evaluation.episode import EpisodePlayer
from deft_libero.evaluation.runs import RunConfig
from deft_libero.evaluation.selection import parse_numbers, trained_tasks
from deft_libero.policies.source import EpisodePolicy, PolicySource, build_policy
from deft_libero.results.store import load_runs
from deft_libero.simulator.environment import Environment, EnvironmentSettings, open_environment
from deft_libero.simulator.suites import find_suite
from scripts.local_server import ServerDidNotStartError, local_server

FOLDER = Path("results/demo")
METHODS = ("autoregressive", "lossless", "deft")
FILMED = THINKING = ("autoregressive", "lossless")
SUITE, TRIAL = "libero_object", 40  # trials from 40 were never trained on
STEPS, THINKING_STEPS = 20, 6  # of an episode while methods are compared
FILMED_STEPS = 200  # at most: an episode that succeeds has fewer
MOST_LOAD = 1.2  # a core, the demonstration itself included: with more, others were at work

Answers = Mapping[str, Sequence[ActionChunk]]  # of one episode, by method; each with a trace


def main() -> int:
    """Run the demonstration; return its exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    say("starting the server ...")
    try:
        with local_server("--policy", "tiny-libero", "--threads", server_threads()) as url:
            with PolicyClient(url) as client:
                info = client.info()
            say(f"ready: {info.policy}, trained on {info.assets} assets")
            tasks, thinks = choose_tasks(info), info.max_tokens is not None
            found = compare(url, tasks, thinks)
            say(f"\nAn episode, with {' and with '.join(FILMED)}, is filmed")
            code = film(url, tasks[0], *(["--reasoning"] if thinks else []))
    except ServerDidNotStartError as error:
        print(error, file=sys.stderr)
        return 1
    if code == evaluate_command.DONE:
        report()
        say(f"\nEvery method answered the same frames, from {len(tasks)} LIBERO starts:\n{found}")
    return code


def server_threads() -> str:
    """Half of the cores, up to what so small a model is faster with; the rest simulates."""
    return str(max(1, min(4, (os.cpu_count() or 2) // 2)))


def busy() -> list[str]:
    """Why times of this machine tell nothing just now."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < MOST_LOAD * cores:
        return []
    return [f"the machine was busy (a load of {load:.1f} on {cores} cores)"]


def choose_tasks(info: ServerInfo) -> list[int]:
    """As many of the tasks that the policy was trained on as a speed-up needs episodes."""
    suite = find_suite(SUITE)
    known = parse_numbers(trained_tasks(suite, info), len(suite.tasks), "tasks")
    step = max(1, len(known) // LEAST_EPISODES)
    return list(known[::step][:LEAST_EPISODES])


def compare(url: str, tasks: list[int], thinks: bool) -> str:
    """Have all methods answer the same frames of every task; say and return what came of it."""
    aloud, at_once = list[Answers](), list[Answers]()
    say("\nAll methods answer the same frames in turn, and plain decoding acts")
    for number in tasks:
        environment = open_environment(
            find_suite(SUITE).task(number), EnvironmentSettings(fast=True)
        )
        say(f"   {environment.task.instruction}")
        if thinks:
            aloud.append(ask(url, environment, THINKING, THINKING_STEPS, aloud=True))
            text = aloud[-1][THINKING[0]][-1].reasoning or ""
            for part in parse_reasoning(text).parts:
                if part.tag != ACTION:
                    say(f"      {part.tag}: {part.text}")
        at_once.append(ask(url, environment, METHODS, STEPS))
        environment.close()
    doubts = busy()
    kinds = {"Acting at once": at_once}
    if thinks:
        kinds = {"Thinking aloud, a text before every action": aloud, **kinds}
    for kind, episodes in kinds.items():
        say(f"\n{kind}:\n\n{describe(episodes, doubts)}")
    return "".join(f"{kind}:\n{conclude(one, doubts)}" for kind, one in kinds.items())


def ask(
    url: str, environment: Environment, methods: Sequence[str], steps: int, aloud: bool = False
) -> Answers:
    """Every method's answers to the frames that the first one's actions lead to."""
    sources = {
        name: PolicySource(
            url,
            options=ActOptions(decoding=name, want_trace=True, want_reasoning=aloud),
            stream=True,
        )
        for name in methods
    }
    policy = InterleavedPolicy(
        {name: build_policy(one, environment) for name, one in sources.items()}
    )
    player = EpisodePlayer(environment, policy, RunConfig(SUITE, step_limit=steps))
    player.play(TRIAL, f"demo-{aloud}-{environment.task.number}")
    policy.close()
    return policy.answers


class InterleavedPolicy:
    """Asks every method about every frame; the first one's actions are the answer.

    In turn, so that what else the machine does hits all alike. Who is asked first changes from
    frame to frame, because the first may find colder caches.
    """

    def __init__(self, methods: Mapping[str, EpisodePolicy]) -> None:
        self._methods = dict(methods)
        self.answers: dict[str, list[ActionChunk]] = {name: [] for name in methods}

    def start(self, session_id: str) -> None:
        """Begin an episode: every method in a session of its own."""
        for name, policy in self._methods.items():
            policy.start(f"{session_id}-{name}")

    def act(self, observation: Observation) -> ActionChunk:
        """Ask all, answer with the first one's actions."""
        names = list(self._methods)
        turn = len(self.answers[names[0]]) % len(names)
        for name in names[turn:] + names[:turn]:
            self.answers[name].append(self._methods[name].act(observation))
        return self.answers[names[0]][-1]

    def close(self) -> None:
        """Free all connections."""
        for policy in self._methods.values():
            policy.close()


def describe(episodes: Sequence[Answers], doubts: Sequence[str] = ()) -> str:
    """A table of the methods. `doubts` say why times tell nothing; then there are none."""
    plain, *others = episodes[0]
    rows = [
        [
            name,
            "–" if doubts else f"{fmean(_round_trips(episodes, name)):.1f}",
            f"{fmean(chunk.trace.num_passes for chunk in _all(episodes, name) if chunk.trace):.2f}",
            _identical(_all(episodes, name), _all(episodes, plain)),
        ]
        for name in (plain, *others)
    ]
    columns = ["method", "ms an answer", "passes", f"as {plain}"]
    return markdown_table(columns, rows, aligned=True)


def conclude(episodes: Sequence[Answers], doubts: Sequence[str] = ()) -> str:
    """How much faster each method is than the first one, and whether its answers are the same."""
    plain, *others = episodes[0]
    baseline = [_round_trips([one], plain) for one in episodes]
    lines = []
    for name in others:
        own = [_round_trips([one], name) for one in episodes]
        same = _identical(_all(episodes, name), _all(episodes, plain))
        sentence = speed_up(baseline, own, doubts).sentence(name, plain)
        lines.append(f"- {sentence} As {plain}: {same}.\n")
    return "".join(lines)


def _all(episodes: Sequence[Answers], name: str) -> list[ActionChunk]:
    return list(chain.from_iterable(one[name] for one in episodes))


def _round_trips(episodes: Sequence[Answers], name: str) -> list[float]:
    return [chunk.timings.round_trip_ms for chunk in _all(episodes, name)]


def _identical(chunks: Sequence[ActionChunk], plain: Sequence[ActionChunk]) -> str:
    pairs = list(zip(chunks, plain, strict=True))
    same = [
        np.array_equal(own.actions, other.actions) and own.reasoning == other.reasoning
        for own, other in pairs
    ]
    if all(same):
        return "all answers"
    most = max(float(np.abs(own.actions - other.actions).max()) for own, other in pairs)
    return f"{100 * fmean(same):.0f}% of the answers, actions of others by at most {most:.3f}"


def film(url: str, task: int, *flags: str) -> int:
    """Play a trial and film it; return the exit code."""
    return evaluate_command.main(
        [
            *(SUITE, "--tasks", str(task), "--trials", str(TRIAL), "--decoding", *FILMED),
            *("--url", url, "--stream", "--video", "all", "--out", str(FOLDER)),
            *("--step-limit", str(FILMED_STEPS), *flags),
        ]
    )


def report() -> None:
    """Write the page that plots, compares and plays the episodes side by side."""
    page = FOLDER / "report.html"
    write_report(load_runs(FOLDER), page)
    say(f"\nOpen {page.resolve()}: plots, and the videos: both methods side by side at true speed.")
    say("next: `make serve` in one terminal, `make eval-libero` in another")


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
