"""`deft bench` as its user calls it, and the arithmetic behind its tables."""

import json
import signal
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deft_core.measures.speculation import Speculation
from deft_core.measures.statistics import percentiles
from deft_core.recordings import EpisodeHeader, RecordedStep, encode_header, encode_step
from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Observation,
    PassTrace,
    StageTimings,
)
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.benchmark.audit import (
    audit,
    check_equal,
    describe,
    describe_equality,
    last_place,
)
from deft_policies.benchmark.replay import (
    Contender,
    MeasuredAnswer,
    Replay,
    ReplayFrame,
    generate_frames,
    read_stored,
    replay,
)
from deft_policies.benchmark.roofline import DeviceRates, WeightBytes, decoder_cost, vision_cost
from deft_policies.benchmark.run import measure, next_command
from deft_policies.benchmark.shipped import read_shipped
from deft_policies.benchmark.summary import (
    Decoding,
    Speed,
    summarise_decoding,
    summarise_speed,
)
from deft_policies.benchmark.tables import Report, first_table, length_table, plans_used, render
from deft_policies.benchmark.transformers_loops import (
    BaselineLoop,
    TransformersPolicy,
    baselines_of,
)
from deft_policies.constant import ConstantPolicy
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.plan import ACTION_PLANS, NUMBER_PLANS, PLAIN, TEXT_PLANS
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from deft_policies.model.random_weights import openvla_7b
from deft_policies.model.sizes import TokenRange
from deft_server.__main__ import main as deft
from scripts.bench.decoding import main as bench
from tests import golden, golden_pi0fast, golden_qwenfast
from tests.golden_vla0 import GOLDEN, cameras, variant

BF16 = WeightBytes(2.0, 2.0)


def golden_options() -> ModelOptions:
    return ModelOptions(
        checkpoint=str(golden.TINY_OPENVLA),
        precision=Precision.FLOAT32,
        device="cpu",
        decoding="autoregressive",
        num_threads=1,
    )


def golden_frames(count: int) -> list[ReplayFrame]:
    return [
        ReplayFrame(
            Observation(case.image(), case.instruction), str(case.number), case.statistics_key
        )
        for case in golden.cases_with_image()[:count]
    ]


def one_pass(tokens: int, accepted: int) -> PassTrace:
    return PassTrace(
        is_prefill=False,
        tokens=(0,) * tokens,
        parents=(-1,) * tokens,
        sources=("",) * tokens,
        predictions=(0,) * tokens,
        path=tuple(range(1, accepted + 1)),
        bonus=0,
    )


def compared(*rows: tuple[Contender, float, float]) -> tuple[list[Contender], Report]:
    """Contenders with milliseconds of an answer and shares of equal actions, over ten episodes."""
    speeds, decodings = [], []
    for one, milliseconds, share in rows:
        episodes = tuple((milliseconds, milliseconds) for _ in range(10))
        total = percentiles([milliseconds])
        speeds.append(Speed(one.name, one.batch_size, 20, total, {}, episodes_ms=episodes))
        decodings.append(summary_with(one.name, share))
    report = Report({}, tuple(speeds), "autoregressive", tuple(decodings))
    return [one for one, _, _ in rows], report


def summary_with(name: str, equal_actions: float) -> Decoding:
    return Decoding(name, None, 0.0, equal_actions, 0.0, 0, 0.0, 0.0)


def test_the_last_line_serves_the_fastest_method_with_equal_answers() -> None:
    policy, given = ConstantPolicy(), Namespace(policy="model", checkpoint="m", statistics_key=None)
    plain = (Contender("autoregressive", policy, "autoregressive"), 9.0, 1.0)
    relaxed = (Contender("within-bins r9", policy, "within-bins", 9), 5.0, 0.4)
    batched = (Contender("lossless x4", policy, "lossless", batch_size=4), 2.0, 1.0)
    scripted = (Contender("prefill drafts 100% right", policy), 1.0, 1.0)
    exact = (Contender("pld", policy, "pld"), 6.0, 1.0)
    typed = next_command(*compared(plain, relaxed, batched, scripted, exact), given)
    play, serve = typed.splitlines()
    assert serve == "next: deft serve --checkpoint m --decoding pld"
    assert play.startswith("within-bins r9 was faster, with other answers in 60.0%")
    assert play.endswith("deft-client eval SUITE --decoding within-bins --radius 9")
    assert next_command(*compared(plain, relaxed), given).endswith("m --decoding autoregressive")


def test_the_last_line_names_no_method_where_no_speed_up_can_be_told() -> None:
    policy, given = ConstantPolicy(), Namespace(policy="model", checkpoint="m", statistics_key=None)
    plain = (Contender("autoregressive", policy, "autoregressive"), 9.0, 1.0)
    exact = (Contender("pld", policy, "pld"), 6.0, 1.0)
    contenders, report = compared(plain, exact)
    few = tuple(replace(one, episodes_ms=one.episodes_ms[:2]) for one in report.speeds)
    again = "next: deft bench --checkpoint m --decoding pld"
    said, command = next_command(contenders, replace(report, speeds=few), given).splitlines()
    assert said.startswith("Measure again with frames of 5 episodes or more, ")
    assert command == again
    shared = tuple(replace(one, worked_ms=20 * 1.0) for one in report.speeds)
    given = Namespace(**vars(given), frames=60, recording=Path("my data"))
    said, command = next_command(contenders, replace(report, speeds=shared), given).splitlines()
    assert said.startswith("Measure again on an idle machine, ")
    assert command == (
        "next: deft bench --checkpoint m --recording 'my data' --frames 60 --decoding pld"
    )


def test_the_last_line_serves_a_variant_of_a_method_that_was_faster_than_the_method() -> None:
    policy, given = ConstantPolicy(), Namespace(policy="model", checkpoint="m", statistics_key=None)
    rows = [
        (Contender(name, policy, name), milliseconds, 1.0)
        for name, milliseconds in (
            ("autoregressive", 9.0),
            ("lossless", 12.0),
            ("lossless:drafts=extrapolation", 8.5),
            ("deft", 8.0),  # relaxed, and equal on these frames by chance
        )
    ]
    serve = "next: deft serve --checkpoint m --decoding"
    said = next_command(*compared(*rows), given).splitlines()
    assert said[-1] == f"{serve} lossless:drafts=extrapolation"
    assert next_command(*compared(*rows[:2]), given) == f"{serve} autoregressive"


def test_a_head_with_which_nothing_was_faster_is_not_served() -> None:
    policy = ConstantPolicy()
    given = Namespace(
        policy="model", checkpoint="m", statistics_key=None, draft_heads=[Path("my-head")]
    )
    plain = (Contender("autoregressive", policy, "autoregressive"), 186.0, 1.0)
    head = (Contender("lossless", policy, "lossless"), 338.0, 1.0)
    said, serve = next_command(*compared(plain, head), given).splitlines()
    assert said == "Nothing was faster than plain decoding with my-head: do not serve it."
    assert serve == "next: deft serve --checkpoint m --decoding autoregressive"
    slow = (Contender("within-bins", policy, "within-bins"), 200.0, 0.5)
    assert "within-bins" not in next_command(*compared(plain, slow), given)
    quick = (Contender("lossless", policy, "lossless"), 90.0, 1.0)
    assert next_command(*compared(plain, quick), given) == (
        "next: deft serve --checkpoint m --draft-head my-head --decoding lossless"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_keeps_the_frames_that_all_have_answered(
    number: signal.Signals,
) -> None:
    class Stopped(ConstantPolicy):
        def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
            if batch[0].observation.instruction == "stop":
                if number is signal.SIGINT:  # which is ignored where pytest runs in the background
                    raise KeyboardInterrupt
                signal.raise_signal(number)
            return super().act(batch)

    frames = generate_frames(5)
    stop = replace(frames[3], observation=replace(frames[3].observation, instruction="stop"))
    shown = [*frames[:3], stop, frames[4]]
    contenders = [Contender("first", ConstantPolicy()), Contender("second", Stopped())]
    report = measure(ConstantPolicy(), contenders, shown, 0)
    assert [one.num_answers for one in report.speeds] == [3, 3]
    assert report.is_interrupted
    assert "Interrupted: 3 of 5 frames." in report.render()
    with pytest.raises(KeyboardInterrupt):  # nothing is kept of nothing
        measure(ConstantPolicy(), contenders, [stop], 0)
    if number is signal.SIGINT:  # others than a bench keep nothing of a part
        with pytest.raises(KeyboardInterrupt):
            replay(contenders, shown, 0)


def test_plans_are_named_with_how_often_and_what_they_are() -> None:
    meanings = {plan.name: plan.meaning for plan in (*ACTION_PLANS, PLAIN)}
    assert meanings["memory-once"] == "prefill: the last action; later passes: nothing"
    assert meanings["memory"] == "every pass: the last action"
    assert meanings["head-chain"] == (
        "prefill: nothing; later passes: the draft head (a chain of up to 5)"
    )
    assert meanings["plain"] == "no drafts: a pass for every token"
    found = replace(
        summary_with("lossless", 1.0), rule="ExactMatch()", plans={"memory": 3, "plain": 1},
        plan_meanings={name: meanings[name] for name in ("memory", "plain")},
    )  # fmt: skip
    assert plans_used([summary_with("autoregressive", 1.0), found]).splitlines() == [
        "lossless drafted by: memory 75%, plain 25%",
        "- memory = every pass: the last action",
        "- plain = no drafts: a pass for every token",
    ]


def test_the_page_about_plans_says_what_the_table_says() -> None:
    page = Path("docs/guard.md").read_text()
    for plan in (*ACTION_PLANS, *TEXT_PLANS, *NUMBER_PLANS, PLAIN):
        assert f"| `{plan.name}` | {plan.meaning} |\n" in page


def test_tiny_libero_answers_frames_that_ship_in_five_episodes() -> None:
    assert len(read_shipped()) == 100
    some = read_shipped(50)
    assert [len({one.episode for one in some}), len(some)] == [5, 50]
    assert some[0].observation.image.shape == (256, 256, 3)
    assert len({one.observation.instruction for one in some}) == 5
    assert some[0].statistics_key == "libero_object"
    assert len(read_shipped(2)) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decoding", "losless"], "losless"),
        (["--recording", "nowhere"], "nowhere: no such file or folder"),
        (["--input", "nowhere"], "--input nowhere: no such file"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deft(["bench", "--checkpoint", "/is/not/even/looked/at", *flags]) == 1
    said = capsys.readouterr().err
    assert told in said
    assert "even" not in said


def passes_of(decoding: dict[str, Any]) -> float:
    """Of an answer, as `--json` has them."""
    found = decoding["speculation"]
    return float(found["num_passes"] / found["num_answers"])


def run_of(name: str, traces: list[DecodeTrace]) -> Replay:
    run = Replay(Contender(name, ConstantPolicy()))
    for index, trace in enumerate(traces):
        timings = StageTimings(vision_ms=10.0 + index, verify_ms=1.0)
        chunk = ActionChunk(np.zeros((1, 7)), timings, trace)
        run.answers.append(MeasuredAnswer(20.0 + index, chunk))
    return run


def test_limits_of_the_7b_on_an_h200_are_those_of_the_arithmetic() -> None:
    """At 4.3 TB/s and 790 TFLOP/s: vision 0.53 ms, prefill 4.62 ms, a decode pass 3.05 ms."""
    config, rates = openvla_7b(), DeviceRates(4.3e12, 790e12, "an H200")
    vision = vision_cost(config, 1, BF16)
    assert vision.num_flops == pytest.approx(0.40e12, rel=0.05)
    assert vision.floor_ms(rates) == pytest.approx(0.53, rel=0.06)
    prefill = decoder_cost(config.llm, 1, BF16, 0, 280, 1, 32064, is_causal=True)
    assert prefill.num_flops == pytest.approx(3.65e12, rel=0.01)
    assert prefill.floor_ms(rates) == pytest.approx(4.62, rel=0.01)
    decode = decoder_cost(config.llm, 1, BF16, 280, 1, 1, 256)
    assert decode.num_bytes == pytest.approx(13.1e9, rel=0.01)
    assert decode.floor_ms(rates) == pytest.approx(3.05, rel=0.01)
    wide = decoder_cost(config.llm, 1, BF16, 280, 51, 51, 256)
    assert wide.floor_ms(rates) == pytest.approx(decode.floor_ms(rates), rel=0.01)


def test_percentiles_and_rates_come_from_the_whole_call() -> None:
    speed = summarise_speed(run_of("one", [DecodeTrace("one", (), (), (), ())] * 3))
    assert speed.total == percentiles([20.0, 21.0, 22.0])
    assert speed.total.p50 == 21.0
    assert speed.stages["vision"].p50 == 11.0
    assert speed.stages["decode"].p99 == 1.0
    assert speed.actions_per_s == pytest.approx(1000.0 / 21.0)


def timed_run(name: str, *mean_ms: float) -> Speed:
    """Two answers to each of so many episodes, each as long."""
    answers = [MeasuredAnswer(spent, chunk_of(name)) for spent in mean_ms for _ in range(2)]
    frames = [
        ReplayFrame(Observation(np.zeros((1, 1, 3), np.uint8), "lift"), f"episode {number}")
        for number in range(len(mean_ms))
        for _ in range(2)
    ]
    return summarise_speed(Replay(Contender(name, ConstantPolicy()), answers), frames)


def chunk_of(name: str) -> ActionChunk:
    return run_of(name, [DecodeTrace(name, (), (), (), ())]).answers[0].chunk


def test_a_speed_up_is_a_ratio_of_sums_over_at_least_five_episodes() -> None:
    plain = timed_run("plain", 60.0, 60.0, 60.0, 60.0, 60.0)
    fast = timed_run("fast", 20.0, 20.0, 30.0, 40.0, 40.0)
    lines = first_table(Report({}, (plain, fast), "plain")).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        *("method", "ms", "times as fast (95%)"),
    ]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        *("fast", "30.0", "2.00 (1.58 to 2.73)"),
    ]
    few = (timed_run("plain", 60.0, 60.0), timed_run("fast", 20.0, 20.0))
    text = first_table(Report({}, few, "plain"))
    assert text.splitlines()[3].split("|")[3].strip() == "3.00 ?"
    assert text.endswith(
        "?: of these frames alone, and no speed-up to quote: times of 2 episodes, 5 are needed."
    )


def test_the_first_table_measures_other_answers_of_relaxed_methods() -> None:
    contenders = (Contender("autoregressive", ConstantPolicy()), 60.0, 1.0)
    _, exact = compared(contenders)
    assert "relaxed" not in first_table(exact)
    _, report = compared(contenders, (Contender("deft", ConstantPolicy()), 30.0, 0.25))
    passes = Speculation(2, 6, 14, 7, {1: 2, 2: 2}, {}, (), ())
    deft = replace(report.decodings[1], speculation=passes, relaxed_share=0.5, max_bins=4)
    headings, _, _, cells, *_ = first_table(
        replace(report, decodings=(report.decodings[0], deft))
    ).splitlines()
    found = dict(zip(headings.split("|"), cells.split("|"), strict=True))
    shown = {heading.strip(): cell.strip() for heading, cell in found.items()}
    assert (shown["passes"], shown["committed"], shown["equal answers"]) == (
        "3.00",
        "2.50",
        "25.0%",
    )
    assert (shown["relaxed"], shown["bins: mean, most"]) == ("50.0%", "0.00, 4")


def test_transformers_that_is_not_installed_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deft_policies.benchmark.command.find_spec", lambda name: None)
    assert deft(["bench", "--against", "transformers"]) == 1
    assert "pip install ./client '.[transformers]'" in capsys.readouterr().err


def test_decoding_is_summed_up_against_plain_decoding_of_the_same_frames() -> None:
    plain = [DecodeTrace("autoregressive", (10, 20, 30), (10, 20, 30), (), (one_pass(1, 0),) * 3)]
    passes = (one_pass(4, 1), one_pass(2, 0))
    relaxed = [DecodeTrace("deft", (12, 20, 29), (10, 20, 29), (), passes)]
    space = ActionSpace(
        groups=(DimensionGroup.MOVE, DimensionGroup.TURN, DimensionGroup.GRIP),
        unit_per_bin=(0.5, 2.0, 0.0),
        class_boundary=(None, None, None),
    )
    found = summarise_decoding(run_of("deft", relaxed), run_of("plain", plain), [space])
    assert found.speculation is not None
    assert (found.speculation.passes_per_action, found.speculation.committed_length) == (2.0, 1.5)
    assert found.relaxed_share == pytest.approx(1 / 3)
    assert found.equal_actions == 0.0
    assert (found.mean_bins, found.max_bins) == (1.0, 2)
    assert (found.mean_mm, found.mean_deg) == (1.0, 0.0)
    assert found.speculation.drafted_by_token == (1.0, 0.0, 0.0)
    beyond = replace(relaxed[0], tokens=(2, 20, 30))  # no action token; the robot gets the nearest
    found = summarise_decoding(
        run_of("deft", [beyond]), run_of("plain", plain), [space], TokenRange(7, 262)
    )
    assert found.max_bins == 2  # from 10 to 8: the lowest id, 7, decodes like its neighbour
    same = summarise_decoding(run_of("plain", plain), run_of("plain", plain), [space])
    assert (same.equal_actions, same.max_bins) == (1.0, 0)
    assert same.speculation is not None
    assert same.speculation.num_checked == 0  # nothing was guessed
    lines = length_table({"deft": found.speculation, "plain": same.speculation}).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        *("deft", "50.0", "50.0", "2.00", "", "1.00"),
    ]


def test_tables_are_markdown_with_numbers_to_the_right() -> None:
    text = render([{"name": "plain", "ms": "12.5"}, {"name": "deft", "ms": "3.1"}])
    assert text.splitlines() == [
        "| name  |   ms |",
        "| ----- | ---: |",
        "| plain | 12.5 |",
        "| deft  |  3.1 |",
    ]


def test_contenders_take_turns_and_frames_of_one_episode_share_a_session() -> None:
    seen: list[tuple[str, int, int]] = []

    class Noting(ConstantPolicy):
        name = ""

        def act(self, batch: object) -> list[PolicyAnswer]:
            assert isinstance(batch, list)
            seen.append((self.name, len(batch), batch[0].memory.num_steps))
            answers = super().act(batch)
            memories = [replace(one.memory, num_steps=one.memory.num_steps + 1) for one in answers]
            return [replace(one, memory=new) for one, new in zip(answers, memories, strict=True)]

    first, second = Noting(), Noting()
    object.__setattr__(first, "name", "first")
    object.__setattr__(second, "name", "second")
    frames = generate_frames(12)
    contenders = [Contender("first", first), Contender("second", second, batch_size=2)]
    runs = replay(contenders, frames, 0)
    assert [name for name, _, _ in seen] == ["first", "second"] * 12
    assert {size for name, size, _ in seen if name == "second"} == {2}
    sessions = [session for name, _, session in seen if name == "first"]
    assert sessions[:10] == list(range(10))
    assert [len(run.answers) for run in runs] == [12, 12]


def test_generated_frames_repeat_themselves_and_move() -> None:
    first, again = generate_frames(3), generate_frames(3)
    for one, other in zip(first, again, strict=True):
        assert (one.observation.image == other.observation.image).all()
    assert (first[0].observation.image != first[2].observation.image).any()


def test_recorded_episodes_are_replayed_in_order(tmp_path: Path) -> None:
    steps = [
        RecordedStep(
            index,
            0.1 * index,
            Observation(np.full((8, 8, 3), index, np.uint8), "lift"),
            ActOptions(statistics_key="libero_goal"),
            ActionChunk(np.zeros((1, 7))),
        )
        for index in range(3)
    ]
    recorded = encode_header(EpisodeHeader("arm", 0.0)) + b"".join(map(encode_step, steps))
    (tmp_path / "one.deftrec").write_bytes(recorded)
    frames = read_stored(tmp_path, limit=2)
    assert [int(frame.observation.image[0, 0, 0]) for frame in frames] == [0, 1]
    assert frames[0].statistics_key == "libero_goal"


@pytest.mark.parametrize("loop", list(BaselineLoop))
def test_transformers_on_the_same_weights_answers_the_same_tokens(loop: BaselineLoop) -> None:
    policy = load_policy(golden_options())
    baseline = TransformersPolicy(policy, loop)
    frames = golden_frames(3)
    runs = replay([Contender(loop.value, baseline)], frames, 0)
    for case, answer in zip(golden.cases_with_image(), runs[0].answers, strict=False):
        assert answer.chunk.trace is not None
        assert answer.chunk.trace.tokens == case.tokens
        assert answer.chunk.actions.tobytes() == case.action.tobytes()
        assert answer.chunk.timings.prefill_ms > 0.0
        assert answer.chunk.timings.verify_ms > 0.0


VLA0 = ModelOptions(
    checkpoint=str(GOLDEN / "untied"), precision=Precision.FLOAT32, is_guarded=False
)


def vla0_frames() -> list[ReplayFrame]:
    session = variant("untied")["sessions"][0]
    return [
        ReplayFrame(Observation(image, session["instruction"], {"wrist": wrist}), "session")
        for image, wrist in map(cameras, session["frames"][:2])
    ]


def test_answers_of_numbers_are_measured_beside_transformers() -> None:
    """As the original decodes, and with lookup; without its constraint no number may be written."""
    policy = load_policy(VLA0)
    ours = [Contender(name, policy, name) for name in ("autoregressive", "lossless")]
    theirs = [Contender(one.name, one) for one in baselines_of(policy)]
    report = measure(policy, ours + theirs, vla0_frames(), 0, theirs[0].name)
    equal = {one.name: one.equal_actions for one in report.decodings}
    assert equal["lossless"] == equal["transformers"] == equal["transformers-lookup"] == 1.0
    plain, lossless = (one.speculation for one in report.decodings[:2])
    assert plain is not None
    assert lossless is not None
    assert lossless.num_passes < plain.num_passes


@pytest.mark.parametrize(
    "options", [golden_qwenfast.options_of("nora"), golden_pi0fast.options_of("quantile")]
)
def test_families_that_transformers_has_no_loop_for_are_refused(options: ModelOptions) -> None:
    with pytest.raises(PolicyError, match="not of (nora|pi0fast).*deft doctor --against PYTHON"):
        baselines_of(load_policy(options))


def test_the_command_measures_answers_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--frames", "2", "--warm-ups", "0", "--max-tokens", "9", "--stages"]
    assert deft(["bench", "--checkpoint", str(GOLDEN / "tied"), *flags]) == 0
    found = capsys.readouterr().out
    assert "| autoregressive |" in found
    assert "| vision" in found


def test_the_last_place_of_bfloat16_is_2_to_the_minus_7() -> None:
    for value in (1.0, 1.99, 10.0, 0.3):
        number = torch.tensor(value, dtype=torch.bfloat16)
        above = torch.nextafter(number, torch.tensor(99.0, dtype=torch.bfloat16))
        assert last_place(float(number)) == float(above - number)


def test_bfloat16_flips_only_near_ties_of_the_golden_model() -> None:
    reference = load_policy(golden_options())
    audited = load_policy(replace(golden_options(), precision=Precision.BFLOAT16))
    report = audit(reference, audited, golden_frames(12))
    assert report.num_tokens == 84
    assert report.faults == ()
    assert all(flip.reference_margin <= report.threshold for flip in report.flips)
    assert report.num_outside_actions
    assert "0 of them" in describe(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_that_ships_can_be_audited(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--frames", "2", "--warm-ups", "0", "--device", "cpu", "--dtype", dtype]
    # Without the guard few plans are timed, which takes minutes in bfloat16 on some processors.
    assert deft(["bench", "--audit", "--decoding", "deft", *asked, "--no-guard"]) == 0
    told = capsys.readouterr().out
    assert f"lossless gives 2 of 2 answers of plain decoding in {dtype}" in told
    assert "deft gives" not in told  # it is not exact
    assert "Measure again with frames of 5 episodes or more" in told
    assert "next: deft bench --policy tiny-libero --device cpu" in told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_audit_finds_an_exact_method_that_answers_otherwise(dtype: str) -> None:
    options = replace(golden_options(), precision=Precision(dtype), is_guarded=False)
    policy, frames = load_policy(options), golden_frames(2)
    methods = (Contender("plain", policy, "autoregressive"), Contender("other", policy, "lossless"))
    plain, other = replay(methods, frames, 0)
    assert check_equal(other, plain, frames).partings == ()
    answer = other.answers[1]
    trace = answer.chunk.trace
    assert trace is not None
    wrong = [*trace.tokens[:3], trace.tokens[3] + 1, *trace.tokens[4:]]
    chunk = replace(answer.chunk, trace=replace(trace, tokens=wrong))
    other.answers[1] = replace(answer, chunk=chunk)
    check = check_equal(other, plain, frames)
    (parting,) = check.partings
    assert (parting.frame, parting.position) == (1, 3)
    assert (parting.reference, parting.audited) == (trace.tokens[3], trace.tokens[3] + 1)
    assert parting.reference_margin > 0.0
    assert check.is_broken == (dtype == "bfloat16")  # float32 promises no near tie
    told = describe_equality(check)
    assert "1 of 2 answers" in told
    assert ("FAULT" in told) == check.is_broken


def test_an_audit_calls_a_wrong_weight_a_fault() -> None:
    reference = load_policy(golden_options())
    audited = load_policy(golden_options())
    spoil_head(audited, golden.cases_with_image()[0].tokens[0])
    report = audit(reference, audited, golden_frames(2))
    assert report.faults
    assert "FAULT" in describe(report)


def spoil_head(policy: VlaPolicy, token: int) -> None:
    """Make the best answer to the first golden case impossible."""
    with torch.no_grad():
        policy.model.network.decoder.head.weight[token] = 0.0


def test_bench_prints_stages_limits_methods_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    arguments = ["--random-weights", str(golden.TINY_OPENVLA)]
    chosen = ["--decoding", "lossless", "--decoding", "within-bins"]
    chosen += ["--radius", "5", "--radius", "9"]
    sizes = ["--frames", "4", "--warm-ups", "1", "--threads", "1", "--dtype", "float32"]
    against = ["--against", "transformers", "--batch", "1,2", "--stages"]
    assert bench([*arguments, *chosen, *sizes, *against, "--json", str(target)]) == 0
    text = capsys.readouterr().out
    for stage in ("preprocess", "vision", "prefill", "draft", "judge", "commit", "post", "total"):
        assert f"| {stage} " in text
    assert "% of limit" in text
    assert "no speed-up to quote: times of 1 episode, 5 are needed" in text
    report = json.loads(target.read_text())
    names = [speed["name"] for speed in report["speeds"]]
    assert names == [
        *("autoregressive", "lossless", "within-bins r5", "within-bins r9"),
        *("autoregressive x2", "lossless x2", "within-bins r5 x2", "within-bins r9 x2"),
        *(one.value for one in BaselineLoop),
    ]
    decodings = {one["name"]: one for one in report["decodings"]}
    assert passes_of(decodings["autoregressive"]) == 7.0
    assert decodings["lossless"]["equal_actions"] == 1.0
    assert decodings["transformers"]["equal_actions"] == 1.0
    assert decodings["lossless"]["speculation"]["committed_by_pass"]
    assert decodings["within-bins r9"]["rule"].startswith("WithinBins(radius=9)")
    assert sum(decodings["within-bins r9"]["plans"].values()) == 4
    assert "lossless: ExactMatch()" in text
    for plan in decodings["lossless"]["plans"]:  # each of them is explained where it is named
        assert f"\n- {plan} = " in text
    assert text.startswith("Frames: 4 in 1 episode, generated, of a camera that hardly moves.")
    assert report["frames"] in text
    assert report["rates"]["bytes_per_s"] > 0.0


def test_bench_warms_up_as_a_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = []
    monkeypatch.setattr(VlaPolicy, "warm_up", lambda policy, _: warmed.append(policy.info.decoding))
    few = ["--frames", "1", "--warm-ups", "0", "--threads", "1", "--dtype", "float32"]
    assert deft(["bench", "--random-weights", str(golden.TINY_OPENVLA), *few]) == 0
    assert warmed == ["lossless"]


def test_bench_runs_drafts_that_are_right_to_order(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    arguments = ["--checkpoint", str(golden.TINY_OPENVLA), "--statistics-key", "libero_spatial"]
    scripted = ["--scripted-drafts", "0,1", "--no-guard", "--json", str(target)]
    sizes = ["--frames", "3", "--warm-ups", "0", "--threads", "1", "--dtype", "float32"]
    assert bench([*arguments, *scripted, *sizes]) == 0
    decodings = {one["name"]: one for one in json.loads(target.read_text())["decodings"]}
    passes = {name: passes_of(one) for name, one in decodings.items()}
    assert passes == {
        "autoregressive": 7.0,
        "lossless": passes["lossless"],
        "prefill drafts 0% right": 7.0,
        "head drafts 0% right": 7.0,
        "prefill drafts 100% right": 1.0,
        "head drafts 100% right": 2.0,
    }
    assert all(one["equal_actions"] == 1.0 for one in decodings.values())


def test_bench_measures_policies_it_knows_nothing_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert deft(["bench", "--policy", "constant", "--frames", "3"]) == 0
    assert "| constant " in capsys.readouterr().out


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deft(["bench", "--policy", "constant", "--frames", "0"])
    assert "--frames and --batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench(["--policy", "constant", "--scripted-drafts", "2"])
    assert "--scripted-drafts: shares are from 0 to 1" in capsys.readouterr().err
