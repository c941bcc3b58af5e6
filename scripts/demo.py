"""`make demo`: what Deft is for, within three minutes.

All methods answer the same frames in turn, while plain decoding plays: how much faster, and are the
answers the same? First with a text before every action, where the policy was taught to write one,
and an episode of it is filmed with its text; then at once. At last plain decoding and the fastest
play in real time, where the simulator waits for nobody and every millisecond counts.
"""

import os
import shutil
import sys
from pathlib import Path

from deft_client import ActOptions, PolicyClient, ServerInfo
from deft_client.libero.commands import evaluate as evaluate_command
from deft_client.libero.commands.report import write_report
from deft_client.libero.evaluation.episode import EpisodePlayer
from deft_client.libero.evaluation.runs import RunConfig
from deft_client.libero.evaluation.selection import (
    parse_numbers,
    trained_tasks,
)
from deft_client.libero.policies.source import PolicySource, build_policy
from deft_client.libero.results.statistics import LEAST_EPISODES
from deft_client.libero.results.store import load_runs
from deft_client.libero.simulator.environment import open_environment
from deft_client.libero.simulator.suites import find_suite
from scripts.interleaved import Answers, InterleavedPolicy, describe
from scripts.local_server import ServerDidNotStartError, local_server

FOLDER = Path("results/demo")
METHODS = ("autoregressive", "lossless", "deft")
THINKING = ("autoregressive", "lossless")
IN_REAL_TIME, IN_REAL_TIME_EPISODES = ("autoregressive", "deft"), 2
SUITE, TRIAL = "libero_object", 40  # trials from 40 were never trained on
STEPS, THINKING_STEPS = 60, 12  # of an episode while methods are compared
MOST_LOAD = 1.2  # a core, the demonstration itself included: with more, others were at work


def main() -> int:
    """Run the demonstration; return its exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    say("starting the server ...")
    code = evaluate_command.DONE
    try:
        with local_server("--policy", "tiny-libero", "--threads", server_threads()) as url:
            with PolicyClient(url) as client:
                info = client.info()
            say(f"ready: {info.policy}, trained on {info.assets} assets")
            tasks = choose_tasks(info)
            if info.max_tokens is not None:
                say(f"\nIt thinks aloud: {' and '.join(THINKING)} answer the same frames in turn")
                say("\n" + describe(compare(url, tasks, THINKING, aloud=True), busy()))
                flags = ("--decoding", THINKING[-1], "--reasoning")
                code = play(url, tasks[:1], *flags)
            say(f"\nIt acts at once: {', '.join(METHODS)} answer the same frames in turn")
            say("\n" + describe(compare(url, tasks, METHODS), busy()))
            say("In real time: the simulator goes on at 20 steps a second, answer or no answer")
            flags = ("--decoding", *IN_REAL_TIME, "--real-time")
            code = code or play(url, tasks[:IN_REAL_TIME_EPISODES], *flags)
    except ServerDidNotStartError as error:
        print(error, file=sys.stderr)
        return 1
    if code == evaluate_command.DONE:
        report()
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


def compare(
    url: str, tasks: list[int], methods: tuple[str, ...], aloud: bool = False
) -> list[Answers]:
    """Every episode's answers to the frames that the first method's actions lead to."""
    config = RunConfig(SUITE, step_limit=THINKING_STEPS if aloud else STEPS)
    episodes: list[Answers] = []
    for number in tasks:
        environment = open_environment(find_suite(SUITE).task(number), config.environment)
        options = {
            name: ActOptions(decoding=name, want_trace=True, want_reasoning=aloud)
            for name in methods
        }
        policy = InterleavedPolicy(
            {
                name: build_policy(PolicySource(url, options=asked, stream=True), environment)
                for name, asked in options.items()
            }
        )
        log = EpisodePlayer(environment, policy, config).play(TRIAL, f"demo-{aloud}-{number}")
        policy.close()
        environment.close()
        episodes.append(policy.answers)
        say(f"   {environment.task.instruction}: {len(log.actions)} steps")
        if aloud:
            say(f"      {log.answers[-1].reasoning}")
    return episodes


def play(url: str, tasks: list[int], *flags: str) -> int:
    """Play trials of tasks and film them; return the exit code."""
    return evaluate_command.main(
        [
            *(SUITE, "--tasks", ",".join(map(str, tasks)), "--trials", str(TRIAL)),
            *("--url", url, "--stream", "--video", "all", "--out", str(FOLDER), *flags),
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
