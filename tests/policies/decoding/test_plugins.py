"""Rules and sources of an installed package are asked for by name, from server to report."""

import importlib
import json
import operator
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from websockets.sync.client import connect

from deft_client.client import PolicyClient
from deft_core.errors import UsageError
from deft_core.methods import read_method, tomllib, with_knobs
from deft_core.types import ActOptions, DecodeTrace, Observation
from deft_policies.base import PolicyRequest, Verdict
from deft_policies.decoding.acceptance import rule as rule_module
from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionSpace,
    DeviceRule,
    ScoredNodes,
)
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import DraftSource
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.kinds import source_kinds
from deft_policies.decoding.methods import find_method, method_names, presets
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.plugins import broken_plugins, find_plugins, load_rule
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.trace import PassRecord
from deft_policies.errors import PolicyError, RequestError
from deft_policies.families.loading import examine, load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_server.app import create_app
from tests.policies.decoding.captures import Captured, plain_engine, play
from tests.policies.decoding.scripts import Decoding, Session, answer_of
from tests.policies.decoding.trees import ACTIONS, random_case, steps_to
from tests.repository import ROOT
from tests.server.running import client_of, running
from tests.standins.policies import MSGPACK, packed
from tests.tiny_target import CPU, LENGTH, fast_target, greedy, random_prompts, tiny_decoder

PLUGINS = ROOT / "docs" / "plugins"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which packages are imported, and nothing is left of them afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_plugins()
    modules = set(sys.modules)
    yield tmp_path
    forget_plugins()
    for name in set(sys.modules) - modules:
        if name.endswith(("_rule", "_source")):
            del sys.modules[name]


def forget_plugins() -> None:
    for cache in (find_plugins, source_kinds, load_rule):
        cache.cache_clear()


@pytest.fixture
def installed(place: Path) -> Path:
    """The package of docs/plugins, as an installer would leave it."""
    install(place)
    return place


def install(folder: Path) -> None:
    for module in PLUGINS.glob("*.py"):
        (folder / module.name).write_text(module.read_text())
    project = tomllib.loads((PLUGINS / "pyproject.toml").read_text())["project"]
    register(folder, project["name"], project["entry-points"])


def register(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """What an installer writes about a package."""
    about = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    about.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n"
    (about / "METADATA").write_text(metadata)
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    forget_plugins()


def test_each_plugin_is_short() -> None:
    for module in PLUGINS.glob("*.py"):
        assert len(module.read_text().splitlines()) <= 30, module.name


def test_a_rule_and_a_source_of_another_package_decode(installed: Path) -> None:
    assert "steady" in method_names()
    method = find_method("steady:limit=7,drafts=middle+previous")
    assert str(method.rule) == "SteadyRule(limit=7, steps=40)"
    decoder = tiny_decoder()
    session, seen = Session.of(2), set()
    drafted = Decoding(fast_target(decoder), method)
    for step in range(3):
        for trace in drafted.decode(random_prompts(decoder, [2, 5], step), session):
            assert trace.method == "steady:limit=7,drafts=middle+previous"
            assert trace.rule == "SteadyRule(limit=7, steps=40)"
            seen |= {name for one in trace.passes for name in one.sources}
    assert seen == {"", "middle", "previous"}


def test_the_page_names_what_rules_and_sources_are_given() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    case = random_case(0)
    zeros = torch.zeros(case.tree.num_nodes, dtype=torch.int64)
    scored = ScoredNodes(zeros, zeros, zeros, case.logits, case.hidden, ACTIONS)
    answer = answer_of(SessionMemory(), [30, 31])
    answer.last = PassRecord(False, case.tree, case.predictions, [0], 0, [])
    checked = 0
    for heading, value in (("| of `scored` |", scored), ("| of `sequence` |", answer)):
        for line in page.split(heading)[1].split("\n\n")[0].splitlines()[2:]:
            for name in re.findall(r"`([\w.]+)`", line.split("|")[1]):
                operator.attrgetter(name)(value)
                checked += 1
    assert checked >= 18
    of_last = page.split("| `last` |")[1].split("\n")[0]
    for name in re.findall(r"`(\w+)`", of_last):
        getattr(answer.last, name)
    for line in (
        page.split("| kind | what `accepts` is given |")[1].split("\n\n")[0].splitlines()[2:]
    ):
        assert hasattr(rule_module, re.findall(r"`(\w+)`", line)[0])


@pytest.mark.parametrize("seed", range(10))
def test_a_probability_rule_judges_nodes_at_their_parents(installed: Path, seed: int) -> None:
    """Against plain Python, one node at a time."""
    rule, case = find_method("likely:share=0.4").rule, random_case(seed)
    accepted = case.accepts(rule)
    for node in range(case.tree.num_nodes):
        fine = True
        for step in steps_to(case, node):
            odds = case.logits[step.parent, 20:60].softmax(dim=0)
            is_likely = step.is_action and odds[step.drafted - 20] >= 0.4 * odds.max()
            fine = fine and bool(step.is_equal or is_likely)
        assert bool(accepted[node]) == fine


@pytest.mark.parametrize(
    ("heading", "module"),
    [("A path rule, from", "steady_rule.py"), ("A device rule, from", "likely_rule.py")],
)
def test_the_page_shows_the_rules_that_the_package_holds(heading: str, module: str) -> None:
    shown = (ROOT / "docs" / "plugins.md").read_text().split(heading)[1]
    lines = [line.strip() for line in shown.split("```")[1].splitlines()[1:]]
    assert all(line in (PLUGINS / module).read_text() for line in lines)
    assert len(lines) >= 3


@pytest.mark.parametrize(
    ("heading", "module", "most"),
    [
        ("A rule, complete", "near_rule.py", 5),
        ("A source, complete", "middle_source.py", 8),
        ("A source that reads `past`, complete", "trend_source.py", 13),
    ],
)
def test_the_page_begins_with_what_a_stranger_writes_in_a_minute(
    heading: str, module: str, most: int
) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    code = page.split(heading)[1].split("```python\n")[1].split("```")[0]
    assert code == (PLUGINS / module).read_text()
    assert sum(bool(line) for line in code.splitlines()) <= most


EVERY_KIND = (
    "near:drafts=middle+previous",
    "steady:limit=9,drafts=previous+middle",
    "likely:share=0.1,drafts=previous",
    "lossless:drafts=middle+previous",
)


def test_a_server_serves_every_kind_of_plugin(installed: Path) -> None:
    """Two frames of each session: the second has an action of the first to draft."""
    policy = load_policy(ModelOptions(random_weights="small"))
    with running(create_app(policy)) as address, PolicyClient(f"http://{address}") as client:

        def traces(method: str) -> list[DecodeTrace]:
            options = ActOptions(method, decoding=method, want_trace=True)
            chunks = [client.act(asked(number).observation, options) for number in range(2)]
            return [one.trace for one in chunks if one.trace is not None]

        plain = [one.tokens for one in traces("autoregressive")]
        for method in EVERY_KIND:
            found = traces(method)
            assert [one.method for one in found] == [method] * 2
            drafted = {name for one in found for a_pass in one.passes for name in a_pass.sources}
            assert drafted - {""} <= {"middle", "previous"}
            assert "previous" in drafted
            if method.startswith("lossless"):
                assert [one.tokens for one in found] == plain


def test_plugins_run_beside_captured_passes(installed: Path) -> None:
    """On the stand-in of a GPU: the same answers, and nothing is captured for them."""
    captured, plain = Captured(), plain_engine()
    methods = [find_method(name) for name in EVERY_KIND]
    assert play(captured.engine, methods) == play(plain, methods)
    captured.check_nothing_was_captured_since()


def test_the_page_names_all_that_a_source_defines() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    section = page.split("## A source")[1].split("## A rule")[0]
    named = set(re.findall(r"^- `(\w+)", section, flags=re.MULTILINE))
    defined = {*vars(DraftSource), *DraftSource.__annotations__}
    assert named == {name for name in defined if not name.startswith("_")}


def test_the_code_of_the_page_compares_a_source_with_plain_decoding(installed: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    code = page.split("## How to test one")[1].split("```python")[1].split("```")[0]
    known: dict[str, Any] = {}
    exec(code, known)
    used = {name for one in known["drafted"] for a_pass in one.passes for name in a_pass.sources}
    assert used == {"", "middle", "trend"}


def test_a_source_that_reads_past_actions_drafts_from_the_third_frame_on(installed: Path) -> None:
    decoder = tiny_decoder()
    plain_session, session = Session.of(1), Session.of(1)
    plain = Decoding(fast_target(decoder), find_method("autoregressive"))
    drafted = Decoding(fast_target(decoder), find_method("lossless:drafts=trend"))
    for step in range(4):
        prompts = random_prompts(decoder, [2], step)
        (own,) = drafted.decode(prompts, session)
        (expected,) = plain.decode(prompts, plain_session)
        assert own.tokens == expected.tokens
        assert any("trend" in one.sources for one in own.passes) == (step >= 2)


RULE = """
from dataclasses import dataclass
from deft_policies.decoding.acceptance.rule import DeviceRule, PathRule, TreeRule

@dataclass(frozen=True)
class Rule({kind}):
    {field}
    def accepts(self, *given):
        return {answer}
"""


def add_rule(
    place: Path, answer: str = "False", field: str = "", kind: str = "PathRule"
) -> AcceptanceRule:
    (place / "mass_rule.py").write_text(RULE.format(answer=answer, field=field, kind=kind))
    register(place, "mass-robot", {"deft.acceptance_rules": {"mass": "mass_rule:Rule"}})
    return find_method("mass").rule


def test_a_rule_that_cannot_be_made_is_refused_by_the_name_of_its_plugin(place: Path) -> None:
    message = r"plugin mass-robot \(mass_rule:Rule\): TypeError: .*missing 1 required .*'tau'"
    with pytest.raises(RequestError, match=message):
        add_rule(place, field="tau: float")
    assert find_method("lossless").name == "lossless"
    assert [one for one in broken_plugins() if "mass-robot" in one]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("given[0].drafted > 0)[1:]", r"accepts must answer bool .*got"),
        ("given[0].entropy)", r"accepts must answer bool .*float32"),
        ("given[0].no_such)", "AttributeError: .*no_such"),
    ],
)
def test_a_broken_device_rule_is_named(place: Path, answer: str, message: str) -> None:
    rule, case = add_rule(place, f"({answer}", kind="DeviceRule"), random_case(0)
    assert isinstance(rule, DeviceRule)
    with pytest.raises(PolicyError, match=rf"plugin mass-robot \(mass_rule:Rule\): {message}"):
        case.accepts(rule)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mass_rule:Nope", "AttributeError: .*Nope"),
        ("no_such_module:Rule", "ModuleNotFoundError: .*no_such_module"),
        ("json:dumps", "TypeError"),
        ("builtins:dict", "must make a LocalRule, .*got dict"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_stops_nobody_else(
    place: Path, value: str, message: str
) -> None:
    add_rule(place)
    register(place, "other-robot", {"deft.acceptance_rules": {"other": value}})
    with pytest.raises(RequestError, match=rf"plugin other-robot \({value}\): {message}"):
        find_method("other")
    assert find_method("mass:guard=off").name == "mass:guard=off"
    options = ModelOptions(random_weights="small")
    policy = load_policy(options)
    assert "mass" in policy.info.decoding_methods
    assert "other" not in policy.info.decoding_methods
    found = [one for one in examine(options) if one.subject == "plugins"]
    assert [one.verdict for one in found] == [Verdict.DOUBTFUL]
    assert "other-robot" in found[0].text


def test_a_rule_that_fails_while_it_runs_is_named(place: Path) -> None:
    rule = add_rule(place, "1 / 0")
    with pytest.raises(PolicyError, match=r"plugin mass-robot .*ZeroDivisionError"):
        random_case(0).committed(rule)


SOURCE = """
from deft_policies.decoding.drafts import Branches, DraftSource

class Source(DraftSource):
    kind = "{kind}"

    def __init__(self, target):
        self.target = target

    def draft(self, sequence, depth):
        return {answer}
"""


def add_source(place: Path, answer: str, kind: str = "odd") -> Decoding:
    (place / "odd_source.py").write_text(SOURCE.format(answer=answer, kind=kind))
    register(place, "odd-robot", {"deft.draft_sources": {"odd": "odd_source:Source"}})
    return Decoding(fast_target(tiny_decoder()), find_method("lossless:drafts=odd"))


def test_a_source_with_another_name_is_refused(place: Path) -> None:
    drafted = add_source(place, "[[0] * depth]", kind="even")
    with pytest.raises(RequestError, match=r"plugin odd-robot .*whose kind is 'odd'"):
        drafted.decode(random_prompts(tiny_decoder(), [2, 5], 0), Session.of(2))


MODEL_SOURCE = """
from deft_policies.decoding.drafts import ModelSource

class Source(ModelSource):
    kind = "odd"
    reads_prompts = True

    def __init__(self, target):
        self.target = target

    def observe_prompt(self, sequence, prompt, hidden):
        assert hidden.shape == prompt.embeds.shape

    def observe(self, sequence, hidden, logits):
        sequence.notes[self.kind] = int(logits[sequence.last.path[-1]].argmax())

    def draft_all(self, sequences):
        return [[[one.notes[self.kind]]] for one in sequences]
"""


def test_a_model_of_a_package_is_shown_what_the_target_computes(place: Path) -> None:
    """It drafts the token of the logits that it was shown last: the bonus of the pass before."""
    (place / "odd_source.py").write_text(MODEL_SOURCE)
    register(place, "odd-robot", {"deft.draft_sources": {"odd": "odd_source:Source"}})
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [2, 5], 0)
    drafted = Decoding(fast_target(decoder), find_method("lossless:drafts=odd"))
    traces = drafted.decode(prompts, Session.of(2))
    assert [one.tokens for one in traces] == greedy(decoder, prompts)
    for trace in traces:
        for before, one in zip(trace.passes, trace.passes[1:], strict=False):
            both = zip(one.tokens, one.sources, strict=True)
            guesses = [token for token, source in both if source]
            assert guesses == [before.bonus][: len(guesses)]
        assert any("odd" in one.sources for one in trace.passes)


SLOW_SOURCE = """
import threading
import torch
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import DraftSource
from deft_policies.decoding.engine import Engine

MADE = []
BEGUN, GOES_ON = threading.Event(), threading.Event()

class Source(DraftSource):
    kind = "slow"

    def __init__(self, target):
        MADE.append((threading.current_thread().name, torch.is_inference_mode_enabled()))
        BEGUN.set()
        assert GOES_ON.wait(120), "nobody let it go on"
        if FAILS:
            raise RuntimeError("no weights today")

    def draft(self, sequence, depth):
        return [[0] * depth]
"""


def add_slow_source(place: Path, fails: bool = False) -> Any:
    """A source that is made only when it is let; returns its module."""
    (place / "slow_source.py").write_text(SLOW_SOURCE.replace("FAILS", str(fails)))
    register(place, "slow-robot", {"deft.draft_sources": {"slow": "slow_source:Source"}})
    return importlib.import_module("slow_source")


SLOW = ActOptions(decoding="lossless:drafts=slow+previous")
PLAIN = ActOptions(decoding="autoregressive")


def asked(number: int = 0, options: ActOptions = SLOW) -> PolicyRequest:
    image = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    return PolicyRequest(Observation(image, "lift it"), options=options)


def test_a_source_is_made_once_by_whoever_decodes_and_not_by_a_check(place: Path) -> None:
    slow, policy = add_slow_source(place), load_policy(ModelOptions(random_weights="small"))
    slow.GOES_ON.set()
    policy.check(asked().observation, SLOW)
    assert slow.MADE == []
    with ThreadPoolExecutor(1, "policy") as thread:

        def actions(size: int, options: ActOptions) -> list[list[list[float]]]:
            requests = [asked(number, options) for number in range(size)]
            answers = thread.submit(policy.act, requests).result()
            return [one.chunk.actions.tolist() for one in answers]

        for size in (1, 3, 9):
            assert actions(size, SLOW) == actions(size, PLAIN)
    assert slow.MADE == [("policy_0", True)]


def test_a_source_that_cannot_be_made_is_tried_once_and_then_refused_by_a_check(
    place: Path,
) -> None:
    slow = add_slow_source(place, fails=True)
    policy = load_policy(ModelOptions(random_weights="small"))
    slow.GOES_ON.set()
    policy.check(asked().observation, SLOW)
    message = r"plugin slow-robot \(slow_source:Source\): RuntimeError: no weights today"
    with pytest.raises(RequestError, match=message):
        policy.act([asked()])
    with pytest.raises(RequestError, match=message):
        policy.check(asked().observation, SLOW)
    assert len(slow.MADE) == 1
    policy.act([asked(options=PLAIN)])


def test_a_server_answers_others_while_a_source_is_made(place: Path) -> None:
    slow, policy = add_slow_source(place), load_policy(ModelOptions(random_weights="small"))
    with client_of(create_app(policy)) as client, ThreadPoolExecutor(1) as caller:
        body = packed(SLOW, asked().observation)
        answer = caller.submit(client.post, "/v1/act", content=body, headers=MSGPACK)
        assert slow.BEGUN.wait(120)
        assert client.get("/healthz").status_code == 200
        slow.GOES_ON.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[[10**6]]", "guessed token 1000000"),
        ("[5, 6]", "must return a list of chains"),
        ("[[5.0]]", "guessed 5.0, which is no int"),
        ("Branches([5, 6], [0])", "as many parents as tokens"),
        ("Branches([5, 6], [0, 2])", "guess 2 hangs on 2"),
        ("None", "must return a list of chains"),
        ("self.target.no_such", "AttributeError"),
    ],
)
def test_a_source_that_guesses_what_nobody_can_read_is_named(
    place: Path, answer: str, message: str
) -> None:
    drafted = add_source(place, answer)
    prompts = random_prompts(tiny_decoder(), [2, 5], 0)
    with pytest.raises(PolicyError, match=rf"plugin odd-robot \(odd_source:Source\): .*{message}"):
        drafted.decode(prompts, Session.of(2))


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("", "1 / 0", "ZeroDivisionError"),
        ("PathRule", "1 / 0", "ZeroDivisionError"),
        ("DeviceRule", "1 / 0", "ZeroDivisionError"),
        ("TreeRule", "[True]", r"accepts must answer bool \[node\], here \[\d+\], got \[True\]"),
        ("TreeRule", "None", r"accepts must answer bool \[node\], here \[\d+\], got None"),
    ],
)
def test_a_broken_plugin_fails_who_names_it_and_no_neighbour(
    place: Path, kind: str, answer: str, message: str
) -> None:
    if kind:
        add_rule(place, answer, kind=kind)
    else:
        add_source(place, answer)
    error = fails_alone("mass:drafts=previous" if kind else "lossless:drafts=odd")
    assert re.search(rf"plugin \w+-robot .*{message}", error)


@pytest.mark.parametrize("path", ["[]", "[0] * 60", "None"])
def test_a_plugin_cannot_commit_what_is_no_path_of_the_answer(place: Path, path: str) -> None:
    add_rule(place, field=f"best_path = lambda self, judged, accepted: {path}")
    assert "plugin mass-robot (mass_rule:Rule): " in fails_alone("mass:drafts=previous")


def test_a_rule_of_a_method_file_that_fails_takes_away_its_own_answers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deft_policies.methods.within_bins.WithinBins.accepts", lambda *_: 1 / 0)
    error = fails_alone("within-bins:drafts=previous")
    assert error.startswith("a rule of deft_policies.methods.within_bins: ZeroDivisionError")


def fails_alone(method: str) -> str:
    """The error of an answer by this method. The others of its batch go on in the same passes."""
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [2, 5, 3], 0)
    wanted, spec = greedy(decoder, prompts), AnswerSpec.action(ActionSpace.in_bins(LENGTH))
    engine, memory = Engine(fast_target(decoder)), SessionMemory(own=(tuple(range(24, 31)),))
    names = ("lossless:plan=memory", method, "autoregressive")
    rows = [Answer(find_method(name), spec, replace(memory)) for name in names]
    engine.start(prompts, rows)
    while engine.unfinished:
        engine.step(StageClock(CPU))
    assert [row.error is not None for row in rows] == [False, True, False]
    assert [tuple(rows[index].tokens) for index in (0, 2)] == [wanted[0], wanted[2]]
    assert rows[1].trace is None
    assert rows[1].memory is not None
    return str(rows[1].error)


def test_without_the_package_its_names_are_unknown() -> None:
    with pytest.raises(RequestError, match="unknown decoding 'steady'; known: .*lossless"):
        find_method("steady")
    with pytest.raises(RequestError, match="unknown source 'middle'; known: head"):
        find_method("lossless:drafts=middle")


def test_a_file_says_what_a_line_says(tmp_path: Path) -> None:
    text = read_method(PLUGINS / "steady.toml")
    assert text == "steady:limit=6,drafts=previous+middle"
    path = tmp_path / "mine.toml"
    path.write_text('method = "fly"\ntheta = 0.5\ngate = false\ntree = "dynamic:3,2,8"\n')
    assert read_method(path) == "fly:theta=0.5,gate=off,tree=dynamic:3+2+8"
    assert find_method(read_method(path)).plans[0].shape == TreeShape(3, 2, 8)
    path.write_text("theta = 0.5\n")
    with pytest.raises(UsageError, match='expected method = "NAME"'):
        read_method(path)


def test_knobs_reach_the_rule_and_the_method() -> None:
    fly = find_method("fly:theta=0.5,window=3,gate=off").rule
    assert (fly.theta, fly.window, fly.gate) == (0.5, 3, False)  # type: ignore[attr-defined]
    lvspec = find_method("lvspec:share=0.4,num_patches=5,shift_tolerant=off,tree=branches:2+6")
    assert str(lvspec.rule).startswith("VisualRelevance(num_patches=5, share=0.4, shift_tolerant=F")
    assert lvspec.plans[0].shape == TreeShape.branches(2, 6)
    assert find_method("lvspec:shift_cap=none").rule.shift_cap is None  # type: ignore[attr-defined]
    deft = find_method("deft:rule.move=1.5,cap=12").rule
    assert (deft.rule.move, deft.cap) == (1.5, 12)  # type: ignore[attr-defined]
    spec_vla = find_method("spec-vla:radius=5,loop=published")
    assert (spec_vla.rule.radius, spec_vla.rule.loop) == (5, "published")  # type: ignore[attr-defined]
    assert str(find_method("spec-vla:rule=top-k,k=3").rule) == "TopK(k=3)"
    assert find_method("lossless:plan=memory").plans[0].name == "memory"
    assert not find_method("lossless:plan=memory").is_guarded
    specvlm = find_method("specvlm:patch_share=0.2,multi_level=on")
    assert dict(specvlm.options) == {"patch_share": 0.2, "multi_level": True}
    assert specvlm.described()["options"] == "patch_share=0.2, multi_level=1"


def test_the_tree_of_eagle_has_25_guesses_on_5_levels() -> None:
    template = find_method("lossless:tree=eagle").plans[0].shape
    assert template == find_method("specvlm").plans[0].shape
    assert [len(template.level(depth)) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert template.num_open == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fly:thetta=0.5", "'fly' has no knob 'thetta'; it has: theta, window"),
        ("fly:theta=-1", "knob 'theta': expected a number from 0 to 10000, got '-1'"),
        ("fly:theta=nan", "knob 'theta': expected a number from 0"),
        ("fly:window=1.5", "expected a whole number from 0"),
        ("top-k:k=0", "k must be 1 or more, got 0"),
        ("lvspec:num_patches=0", "num_patches must be 1 or more"),
        ("lvspec:shift_tolerant=maybe", "expected on or off"),
        ("entropy-radius:full=0", "full must be above 0"),
        ("lossless:plan=nothing", "expected one of its plans, memory\\+tree"),
        ("lossless:tree=dynamic+99+8+9", "dynamic takes numbers up to 16, 32, 256"),
        ("lossless:tree=bush", "expected dynamic:LEVELS"),
        ("deft:temperature=1", "cannot sample"),
        ("specvlm:patch_share=0", "expected a share above 0 and up to 1, got '0'"),
        ("specvlm:patch_share=all", "expected a number, got 'all'"),
        ("fly:multi_level=2", "expected on or off, got '2'"),
        ("spec-vla:ties=last", "expected first-row or closest, got 'last'"),
        ("lossless:ties=closest", "has no knob 'ties'"),
        ("lossless:limit", "has no knob 'limit'"),
        ("nobody:x=1", "unknown decoding 'nobody'"),
    ],
)
def test_a_wrong_knob_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_method(text)


def test_report_and_dashboard_show_a_plugin_with_its_parameters(tmp_path: Path) -> None:
    """The product as it is installed: a server, its dashboard, `deft-client eval`, the report."""
    install(tmp_path)
    paths = [str(tmp_path), *(str(ROOT / one) for one in ("client", "server", "policies"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    server = subprocess.Popen(
        [sys.executable, "-m", "deft_server", "serve", "--policy", "openvla", "--port", "0"]
        + ["--checkpoint", str(ROOT / "tests/golden/tiny_openvla")]
        + ["--statistics-key", "libero_spatial", "--threads", "1"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = listening(server)
        methods = [str(PLUGINS / "steady.toml"), "lossless:plan=memory"]
        with watching(url) as seen:
            played = subprocess.run(
                [sys.executable, "-m", "deft_client", "eval", "point_world"]
                + ["--environment", "point_world", "--url", url, "--trials", "40", "--tasks", "0"]
                + ["--step-limit", "3", "--statistics-key", "libero_spatial", "--out"]
                + [str(tmp_path / "out"), "--decoding", *methods],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert played.returncode == 0, played.stderr + played.stdout
            info = httpx.get(url + "/v1/info").json()
    finally:
        server.terminate()
        server.communicate(timeout=120)
    text = "steady:limit=6,drafts=previous+middle"
    assert text in played.stdout
    runs = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/run.json")]
    assert {run["options"]["decoding"] for run in runs} == {text, "lossless:plan=memory"}
    page = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-m", "deft_client", "report", str(tmp_path / "out"), "--out", str(page)],
        env=environment,
        check=True,
        timeout=120,
    )
    assert text in page.read_text()
    assert "steady" in info["decoding_methods"]
    assert (text, "SteadyRule(limit=6, steps=40)") in seen


@contextmanager
def watching(url: str) -> Iterator[set[tuple[str, str]]]:
    """The method and the rule of every trace that the dashboard is sent in the meantime."""
    seen: set[tuple[str, str]] = set()
    with connect(url.replace("http", "ws") + "/dashboard/feed") as feed:
        feed.send("{}")
        feed.recv(timeout=120)  # from now on the dashboard listens

        def follow() -> None:
            for news in feed:
                trace = json.loads(news).get("watched", {}).get("trace")
                if trace:
                    seen.add((trace["method"], trace["rule"]))

        thread = threading.Thread(target=follow)
        thread.start()
        yield seen
        feed.close()
        thread.join()


def listening(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            wait_until_ready(found[0])
            return found[0]
    raise AssertionError("".join(said))


def wait_until_ready(url: str) -> None:
    pause = threading.Event()
    for _ in range(600):
        if httpx.get(url + "/readyz").status_code == 200:
            return
        pause.wait(0.1)
    raise AssertionError(f"{url} did not get ready")


@pytest.mark.parametrize("tree", ["template:16+16", "template:16+12", "template:9+16"])
def test_a_tree_of_too_many_paths_is_refused_before_it_is_built(tree):
    """Callers write it: 128 characters held the event loop for seconds."""
    with pytest.raises(RequestError, match="256"):
        find_method(f"lossless:tree={tree}")
    with pytest.raises(ValueError, match="256"):
        TreeShape.template(10**6, 10**6)
    with pytest.raises(ValueError, match="256"):
        TreeShape.branches(10**6, 10**6)


def test_a_preset_is_parsed_once() -> None:
    assert all(find_method(name) is find_method(name) for name in presets())


def test_a_knob_that_is_given_twice_is_refused():
    with pytest.raises(RequestError, match="'tree' is given twice"):
        find_method("lossless:tree=chain:3,guard=off,tree=chain:4")


def test_a_further_knob_takes_the_place_of_an_earlier_one() -> None:
    text = with_knobs("lossless:guard=off,drafts=head+previous", {"guard": "on"})
    assert text == "lossless:guard=on,drafts=head+previous"
    assert with_knobs("lossless", {"guard": "on"}) == "lossless:guard=on"
    assert find_method(text).name == text
