"""One checkpoint that was taught two prompts: it acts at once, or thinks aloud where asked to."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deft_core.types import ActionChunk, ActOptions, DecodeTrace, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest, Running
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import load_policy, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from deft_server.__main__ import main as deft
from tests import golden_ecot

KEY = "bridge_orig"
SHORT = 40  # tokens of a text: enough for drafts to line up, and to be cut off
FRAMES: Sequence[Any] = golden_ecot.expected()["sessions"][0]["frames"]
INSTRUCTION = golden_ecot.expected()["sessions"][0]["instruction"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ECoT's small checkpoint with a note that says it was taught to act at once, too."""
    made = golden_ecot.write(tmp_path_factory.mktemp("both") / "policy")
    note = {"instructions": ["lift it"], "assets": "", "prompts": ["openvla", "ecot"]}
    (made / "training.json").write_text(json.dumps(note))
    return made


def options_of(folder: Path, **changes: Any) -> ModelOptions:
    plain = ModelOptions(checkpoint=str(folder), device="cpu", precision=Precision.FLOAT32)
    return replace(plain, **changes)


@pytest.fixture(scope="module")
def both(folder: Path) -> VlaPolicy:
    return load_policy(options_of(folder))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[bool, VlaPolicy]:
    """The same weights, asked in one way only; by whether they think."""
    families = {False: "openvla", True: "ecot"}
    return {
        thinks: load_policy(options_of(folder, family=name, decoding="autoregressive"))
        for thinks, name in families.items()
    }


def request(number: int, thinks: bool, memory: SessionMemory | None = None) -> PolicyRequest:
    options = ActOptions(
        statistics_key=KEY,
        want_trace=True,
        want_reasoning=thinks,
        max_tokens=SHORT if thinks else None,
    )
    picture = golden_ecot.picture(FRAMES[number]["image"])
    return PolicyRequest(Observation(picture, INSTRUCTION), memory or SessionMemory(), options)


Said = tuple[list[float], tuple[int, ...], str | None]


def said(answer: PolicyAnswer) -> Said:
    """What an answer is, however it was decoded."""
    chunk: ActionChunk = answer.chunk
    assert chunk.trace is not None
    return chunk.actions.ravel().tolist(), chunk.trace.tokens, chunk.reasoning


def plainly(alone: dict[bool, VlaPolicy], number: int, thinks: bool) -> Said:
    (answer,) = alone[thinks].act([request(number, thinks)])
    return said(answer)


def trace_of(answer: PolicyAnswer) -> DecodeTrace:
    assert answer.chunk.trace is not None
    return answer.chunk.trace


def test_a_session_may_think_in_one_frame_and_act_at_once_in_the_next(
    both: VlaPolicy, alone: dict[bool, VlaPolicy]
) -> None:
    memory = SessionMemory()
    for number, thinks in enumerate([False, True, False, True, True, False]):
        (answer,) = both.act([request(number, thinks, memory)])
        assert said(answer) == plainly(alone, number, thinks)
        assert (answer.chunk.reasoning is not None) == thinks
        memory = answer.memory
    assert len(memory.own) == 3  # actions
    assert memory.answer  # and the last text, each kept for itself


def test_thinking_and_acting_rows_are_answered_in_one_batch(
    both: VlaPolicy, alone: dict[bool, VlaPolicy]
) -> None:
    kinds = [True, False, False, True, False]
    memories = [SessionMemory() for _ in kinds]
    for number in range(3):
        asked = [request(number, *one) for one in zip(kinds, memories, strict=True)]
        answers = both.act(asked)
        for thinks, answer in zip(kinds, answers, strict=True):
            assert said(answer) == plainly(alone, number, thinks)
        memories = [answer.memory for answer in answers]


def test_a_row_that_acts_is_not_held_up_by_a_row_that_thinks(both: VlaPolicy) -> None:
    """It joins while a text is being written, and is answered in as many rounds as by itself."""

    def rounds_until_it_ends(one: Running) -> int:
        rounds = 0
        while not one.has_ended:
            both.step()
            rounds += 1
        return rounds

    (by_itself,) = both.start([request(1, thinks=False)])
    wanted = rounds_until_it_ends(by_itself)
    (thinking,) = both.start([request(0, thinks=True)])
    both.step()
    (acting,) = both.start([request(1, thinks=False)])
    assert rounds_until_it_ends(acting) == wanted
    assert not thinking.has_ended
    rounds_until_it_ends(thinking)


def unguarded(one: PolicyRequest) -> PolicyRequest:
    return replace(one, options=replace(one.options, decoding="lossless:guard=off"))


def test_each_kind_drafts_from_what_the_session_said_in_its_own_way(both: VlaPolicy) -> None:
    memory = SessionMemory()
    for thinks in (True, False, True, False):
        (answer,) = both.act([unguarded(request(0, thinks, memory))])
        memory, last = answer.memory, trace_of(answer)
        assert last.plan == ("previous-answer" if thinks else last.plan)
    (text,) = both.act([unguarded(request(0, True, memory))])
    assert trace_of(text).num_passes == 1  # the same frame: all of the text stands


def test_what_fails_to_begin_leaves_nothing_behind(both: VlaPolicy) -> None:
    with pytest.raises(RequestError, match="must be 1 to 1024"):
        both.act([request(0, False), asked_for(request(0, True), max_tokens=9999)])
    assert not both._running
    (answer,) = both.act([request(0, False)])
    assert answer.error is None


def asked_for(one: PolicyRequest, **changes: Any) -> PolicyRequest:
    return replace(one, options=replace(one.options, **changes))


def test_only_texts_may_be_asked_to_be_short(both: VlaPolicy) -> None:
    one = asked_for(request(0, False), max_tokens=9)
    with pytest.raises(RequestError, match="answers without reasoning have 7 tokens"):
        both.check(one.observation, one.options)


def test_a_policy_that_can_think_and_act_at_once_says_so(
    both: VlaPolicy, alone: dict[bool, VlaPolicy]
) -> None:
    assert both.info.thinks_when_asked
    assert both.info.max_tokens == 1024
    assert both.info.details["prompt"] == "openvla; ecot where reasoning is asked for"
    assert not any(one.info.thinks_when_asked for one in alone.values())
    assert alone[False].info.max_tokens is None


def test_warming_up_tries_both_ways(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(options_of(folder))
    asked = list[bool]()

    def act(batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        asked.extend(one.options.want_reasoning for one in batch)
        return VlaPolicy.act(policy, batch)

    monkeypatch.setattr(policy, "act", act)
    policy.warm_up()
    assert set(asked) == {False, True}


def test_the_command_line_may_say_it_where_no_note_does(folder: Path, tmp_path: Path) -> None:
    copy = golden_ecot.write(tmp_path / "policy")
    at_once = "openvla: one action from one picture"
    assert open_model(options_of(copy)).summary == at_once
    assert open_model(options_of(copy, prompt="vicuna")).summary.startswith("ecot: ")
    told = open_model(options_of(copy, prompt="openvla+in-out")).summary
    assert told == open_model(options_of(folder)).summary
    assert told.startswith("openvla and ecot: an action at once")
    for family, text in (("openvla", at_once), ("ecot", "ecot: up to 1024 tokens")):
        summary = open_model(options_of(folder, family=family)).summary
        assert text in summary
        assert "at once" not in summary


def test_a_note_of_an_unknown_prompt_is_refused(tmp_path: Path) -> None:
    copy = golden_ecot.write(tmp_path / "policy")
    (copy / "training.json").write_text('{"instructions": [], "prompts": ["chatml"]}')
    with pytest.raises(CheckpointError, match="'chatml'; known: openvla, v01, ecot"):
        open_model(options_of(copy))


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> list[str]:
    """Flags that answer lines about one frame in `path`, and put answers beside it."""
    frame = {
        "image": str(golden_ecot.picture_path(FRAMES[0]["image"])),
        "instruction": INSTRUCTION,
        "statistics_key": KEY,
    }
    path.write_text("".join(json.dumps({**frame, **line}) + "\n" for line in lines))
    return ["--input", str(path), "--output", str(path.with_suffix(".out"))]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_suffix(".out").read_text().splitlines()]


def test_each_line_of_deft_act_says_whether_to_think(
    folder: Path, alone: dict[bool, VlaPolicy], tmp_path: Path
) -> None:
    lines: list[dict[str, object]] = [
        {"session_id": "arm"},
        {"session_id": "arm", "reasoning": True, "max_tokens": SHORT},
        {"session_id": "arm", "reasoning": False},
        {"max_tokens": SHORT},
        {"reasoning": True, "max_tokens": 9999},
    ]
    files = write_lines(tmp_path / "in.jsonl", lines)
    assert deft(["act", *flags_of(folder), *files]) == 0
    first, thought, third, refused, too_long = read_lines(tmp_path / "in.jsonl")
    assert first["tokens"] == third["tokens"] == list(plainly(alone, 0, thinks=False)[1])
    assert "text" not in first
    assert thought["tokens"] == list(plainly(alone, 0, thinks=True)[1])
    assert thought["text"]
    for line, problem in ((refused, "without reasoning have 7 tokens"), (too_long, "1 to 1024")):
        assert problem in line["error"]
        assert "action" not in line


def test_a_family_that_is_named_fixes_the_way(
    folder: Path, alone: dict[bool, VlaPolicy], tmp_path: Path
) -> None:
    files = write_lines(tmp_path / "in.jsonl", [{"max_tokens": SHORT}])
    assert deft(["act", *flags_of(folder), "--family", "ecot", *files]) == 0
    (line,) = read_lines(tmp_path / "in.jsonl")
    assert line["tokens"] == list(plainly(alone, 0, thinks=True)[1])


def test_thinking_aloud_is_not_asked_of_what_only_acts(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = write_lines(tmp_path / "in.jsonl", [{}])
    for command in (["act", *files], ["bench", "--frames", "1"]):
        flags = [*flags_of(folder), "--family", "openvla", "--reasoning"]
        assert deft([command[0], *flags, *command[1:]]) == 1
        assert "openvla writes nothing but actions" in capsys.readouterr().err


@pytest.mark.parametrize("reasoning", [[], ["--reasoning"]])
def test_deft_bench_measures_either_way(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, reasoning: list[str]
) -> None:
    files = write_lines(tmp_path / "in.jsonl", [{"session_id": "arm"}] * 2)[:2]
    written = tmp_path / "numbers.json"
    counts = ["--frames", "2", "--warm-ups", "0", "--max-tokens", "20", "--no-guard"]
    assert (
        deft(["bench", *flags_of(folder), *reasoning, *counts, *files, "--json", str(written)]) == 0
    )
    numbers = json.loads(written.read_text())
    assert [one["equal_actions"] for one in numbers["decodings"]] == [1.0, 1.0]
    plain, ours = (one["speculation"] for one in numbers["decodings"])
    assert plain["num_passes"] == plain["num_answers"] * (20 if reasoning else 7)
    assert ours["num_passes"] < plain["num_passes"]


def flags_of(folder: Path) -> list[str]:
    return ["--checkpoint", str(folder), "--dtype", "float32", "--threads", "1", "--device", "cpu"]
