"""The guard against worlds whose true costs the test knows and the guard has to find out."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_policies.decoding import kinds
from deft_policies.decoding.clock import Stage
from deft_policies.decoding.guard import EXPLORE_SHARE, MIN_INTERVAL, Choice, Guard
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.plan import Plan
from deft_policies.memory import Average, SessionMemory
from tests.policies.decoding.scripts import Decoding, Session, clock, tokens_of
from tests.tiny_target import fast_target, greedy, random_prompts, tiny_decoder

PLAIN_PASSES = 6
LENGTH = 1 + PLAIN_PASSES


@dataclass
class PlanTruth:
    """What a plan really costs, and how many passes it really needs."""

    prefill_ms: float
    pass_ms: float
    passes: float
    only_in_prefill: bool = False

    def plan(self, name: str) -> Plan:
        """With a draft source of its own, whose cost it shares with nobody."""
        return Plan(name, (name,), () if self.only_in_prefill else (name,))


@dataclass
class World:
    """Plays actions: asks the guard, charges the true cost, tells the guard what happened."""

    truths: dict[str, PlanTruth]
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.guard = Guard([one.plan(name) for name, one in self.truths.items() if name != "plain"])
        self.rng = random.Random(self.seed)
        self.sessions: list[dict[str, Average]] = [{}]
        self.spent_ms = 0.0
        self.choices: list[Choice] = []

    def act(self) -> Choice:
        choice = self.guard.choose(self.sessions, LENGTH)
        truth = self.truths[choice.plan]
        passes = self._passes(choice.plan, truth)
        prefill = truth.prefill_ms * self._jitter()
        later = passes * truth.pass_ms * self._jitter()
        self.spent_ms += prefill + later
        self.guard.learn(choice, len(self.sessions), costs(prefill, later, passes))
        for session in self.sessions:
            self.guard.learn_passes(choice.plan, passes, session)
        self.choices.append(choice)
        return choice

    def _passes(self, plan: str, truth: PlanTruth) -> int:
        if plan == "plain":
            return PLAIN_PASSES
        whole = int(truth.passes)
        return min(PLAIN_PASSES, whole + (self.rng.random() < truth.passes - whole))

    def _jitter(self) -> float:
        return 1.0 + self.noise * (2 * self.rng.random() - 1)

    def true_ms(self, plan: str) -> float:
        truth = self.truths[plan]
        passes = PLAIN_PASSES if plan == "plain" else truth.passes
        return truth.prefill_ms + passes * truth.pass_ms


def costs(
    prefill_ms: float, later_ms: float, num_later: int, width: int = 7
) -> list[tuple[int, float]]:
    """Passes as a guard is told of them, `num_later` behind the prefill."""
    return [(width, prefill_ms), *[(width, later_ms / max(num_later, 1))] * num_later]


def world(**plans: tuple[float, float, float]) -> World:
    truths = {"plain": PlanTruth(10.0, 2.0, PLAIN_PASSES)}
    return World(truths | {name: PlanTruth(*numbers) for name, numbers in plans.items()})


def test_the_first_thing_measured_is_plain_decoding() -> None:
    assert world(head=(10.0, 3.0, 2.0)).act() == Choice(
        "plain", "measuring plain decoding", is_trial=True
    )


def test_a_good_plan_is_found_and_kept() -> None:
    one = world(head=(10.5, 3.0, 2.0), useless=(10.5, 4.0, 6.0))
    plans = [one.act().plan for _ in range(300)]
    assert plans[-200:].count("head") > 190


def test_useless_drafts_cost_next_to_nothing_in_the_long_run() -> None:
    one = world(tree=(11.0, 5.0, 6.0), chain=(10.5, 3.0, 6.0), memory=(10.6, 2.2, 6.0))
    for _ in range(400):
        one.act()
    start = one.spent_ms
    for _ in range(2000):
        one.act()
    assert one.spent_ms - start < 2000 * one.true_ms("plain") * 1.02


def test_a_hopeless_plan_is_not_tried_again() -> None:
    one = world(heavy=(30.0, 9.0, 1.0))
    plans = [one.act().plan for _ in range(3000)]
    assert plans.count("heavy") == 2  # once to warm it up, once to measure it


def test_a_good_plan_that_was_slow_the_first_time_is_found_all_the_same() -> None:
    one = world(head=(30.0, 12.0, 2.0))
    while one.act().plan != "head":
        pass
    one.truths["head"] = PlanTruth(10.5, 3.0, 2.0)
    plans = [one.act().plan for _ in range(60)]
    assert plans[-40:].count("head") > 35


def test_every_plan_is_tried_after_warming_up() -> None:
    """At first a plan is taken to need a quarter of plain's passes, whatever it is worth."""
    plans = {f"plan-{index}": (12.0, 4.0, 6.0) for index in range(4)}
    one = world(**plans, memory=(12.0, 4.0, 1.0))
    for name, truth in one.truths.items():
        for _ in range(2):
            one.guard.learn(Choice(name, ""), 1, costs(truth.prefill_ms, truth.pass_ms * 6, 6))
    chosen = [one.act().plan for _ in range(60)]
    assert set(chosen) == set(one.truths)
    assert chosen[-10:].count("memory") == 10


def test_the_start_of_an_episode_teaches_nothing_about_drafts() -> None:
    one = world(head=(10.5, 3.0, 2.0))
    for name in ("plain", "plain", "head", "head"):
        one.guard.learn(Choice(name, ""), 1, costs(10.5, 18.0, 6))
    for _ in range(40):
        choice = one.guard.choose(one.sessions, LENGTH, may_try=False)
        assert not choice.is_trial
        one.guard.learn(choice, 1, costs(10.5, 18.0, 6))
    assert one.sessions[0] == {}


def test_acceptance_that_improves_is_noticed() -> None:
    one = world(head=(10.5, 3.0, 6.0))
    for _ in range(300):
        one.act()
    one.truths["head"].passes = 1.0
    plans = [one.act().plan for _ in range(2000)]
    assert plans[-100:].count("head") > 90


def test_collapsed_acceptance_soon_turns_speculation_off() -> None:
    one = world(head=(10.5, 3.0, 1.0))
    for _ in range(300):
        one.act()
    assert one.act().plan == "head"
    one.truths["head"].passes = 6.0
    later = [one.act() for _ in range(40)][10:]
    assert all(choice.plan == "plain" or choice.is_trial for choice in later)
    assert sum(choice.is_trial for choice in later) <= 4


def test_one_slow_measurement_does_not_change_the_plan() -> None:
    one = world(head=(10.5, 3.0, 2.0))
    for _ in range(100):
        one.act()
    one.guard.learn(Choice("head", ""), 1, costs(400.0, 900.0, 2))
    head, plain = (one.guard.expected_ms(plan, one.sessions, LENGTH) for plan in ("head", "plain"))
    assert head < 0.95 * plain


def test_each_session_gets_the_plan_that_suits_it() -> None:
    one = world(head=(10.5, 3.0, 3.0))
    for _ in range(100):
        one.act()
    lucky, unlucky = {}, {}
    for _ in range(20):
        one.guard.learn_passes("head", 1, lucky)
        one.guard.learn_passes("head", 6, unlucky)
    one.guard.choose([lucky], LENGTH)  # a trial may be due
    assert one.guard.expected_ms("head", [lucky], LENGTH) < one.guard.expected_ms(
        "plain", [lucky], LENGTH
    )
    assert one.guard.expected_ms("head", [unlucky], LENGTH) > one.guard.expected_ms(
        "plain", [unlucky], LENGTH
    )


def test_a_batch_waits_for_its_slowest_row() -> None:
    one = world(head=(10.5, 3.0, 3.0))
    one.sessions = [{}, {}]
    for _ in range(60):
        one.act()
    lucky, unlucky = one.sessions
    for _ in range(20):
        one.guard.learn_passes("head", 1, lucky)
        one.guard.learn_passes("head", 6, unlucky)
    alone = one.guard.expected_ms("head", [unlucky, unlucky], LENGTH)
    assert one.guard.expected_ms("head", [lucky, unlucky], LENGTH) == alone


def warmed_up_beside_others(one: World, slow_down: Mapping[str, float]) -> None:
    """Every plan is measured while other work makes some of them slower, and not afterwards."""
    for name, truth in one.truths.items():
        for _ in range(3):
            prefill, later = truth.prefill_ms, truth.pass_ms * PLAIN_PASSES
            factor = slow_down.get(name, 1.0)
            measured = costs(prefill * factor, later * factor, PLAIN_PASSES)
            one.guard.learn(Choice(name, ""), 1, measured)


@pytest.mark.parametrize("slow_down", [1.15, 1.3, 1.6, 2.0])
def test_plain_decoding_that_was_measured_beside_other_work_is_soon_used(slow_down: float) -> None:
    """As seen on a loaded machine: a plan of 50.6 ms was kept where plain decoding takes 45.8."""
    others = {f"plan-{index}": (24.0, 8.0 + index, 3.5) for index in range(5)}
    one = world(kept=(24.0, 7.6, 3.5), **others)
    one.truths["plain"] = PlanTruth(25.8, 3.33, PLAIN_PASSES)
    warmed_up_beside_others(one, {"plain": slow_down})
    plans = [one.act().plan for _ in range(120)]
    assert plans[-40:].count("plain") >= 34


@pytest.mark.parametrize("slow_down", [1.1, 1.3])
def test_plan_that_was_measured_beside_other_work_is_soon_used(slow_down: float) -> None:
    one = world(best=(10.5, 2.5, 2.0), kept=(10.5, 3.0, 2.0), other=(10.5, 3.4, 2.0))
    warmed_up_beside_others(one, {"best": slow_down})
    plans = [one.act().plan for _ in range(240)]
    assert plans[-40:].count("best") >= 34


def test_what_prefill_drafts_alone_save_is_known_from_plain_passes() -> None:
    """Passes without drafts cost the same whichever plan makes them."""
    one = world(once=(10.5, 2.0, 3.0))
    one.truths["once"].only_in_prefill = True
    one.guard = Guard([one.truths["once"].plan("once")])
    for name in ("plain", "plain", "once", "once"):
        one.guard.learn(Choice(name, ""), 1, costs(10.0, 2.0 * 3, 3, width=1))
    for _ in range(30):
        one.guard.learn(Choice("once", ""), 1, costs(10.0, 1.0 * 3, 3, width=1))
    assert one.guard.expected_ms("plain", [{}], LENGTH) == pytest.approx(10.0 + 6 * 1.0, rel=0.05)


@pytest.mark.parametrize("plain_ms", [2.5, 4.0, 20.0])
def test_looking_at_other_plans_costs_at_most_its_share(plain_ms: float) -> None:
    one = world(best=(10.5, 2.0, 3.0), rare=(10.5, 5.0, 3.0), poor=(10.5, 3.0, 3.0))
    one.truths["plain"].pass_ms, one.noise = plain_ms, 0.0
    for _ in range(200):
        one.act()
    start = one.spent_ms
    plans = [one.act().plan for _ in range(4000)]
    assert {"plain", "rare", "poor"} < set(plans)
    assert one.spent_ms - start < 4000 * one.true_ms("best") * (1 + 1.1 * EXPLORE_SHARE)


def test_batch_sizes_are_measured_apart() -> None:
    one = world(head=(10.5, 3.0, 2.0))
    for _ in range(60):
        one.act()
    assert one.guard.choose([{}] * 4, LENGTH).plan == "plain"
    assert "measuring" in one.guard.choose([{}] * 4, LENGTH).reason


def test_a_plan_is_priced_by_how_long_answers_are_and_how_wide_passes() -> None:
    guard = Guard([Plan("draft", ("draft",), ("draft",))])
    for _ in range(2):
        guard.learn(Choice("plain", ""), 1, costs(10.0, 20.0, 10, width=1))
        guard.learn(Choice("draft", ""), 1, costs(20.0, 12.0, 3, width=60))
        guard.learn(Choice("draft", ""), 1, costs(90.0, 12.0, 3, width=500))
        guard.learn_passes("draft", 3, {})
    assert guard.expected_ms("plain", [{}], 60) == 10.0 + 59 * 2.0
    assert guard.expected_ms("draft", [{}], 60) == 20.0 + 3 * 4.0
    assert guard.expected_ms("draft", [{}], 400) == 90.0 + 3 * 4.0


def test_the_reason_names_both_prices() -> None:
    one = world(head=(10.5, 3.0, 2.0))
    choices = [one.act() for _ in range(100)]
    used = next(choice for choice in reversed(choices) if not choice.is_trial)
    assert re.fullmatch(r"expects [\d.]+ ms with head, [\d.]+ ms with plain", used.reason)


def test_plain_decoding_is_compared_with_the_best_of_the_others() -> None:
    one = world(head=(10.5, 9.0, 6.0), tree=(10.5, 9.0, 4.0))
    choices = [one.act() for _ in range(100)]
    used = next(choice for choice in reversed(choices) if not choice.is_trial)
    assert re.fullmatch(r"expects [\d.]+ ms with plain, [\d.]+ ms with tree", used.reason)


COSTS = st.tuples(st.floats(1, 50), st.floats(0.5, 20), st.floats(0, 6))


@settings(max_examples=150, deadline=None)
@given(
    plain=COSTS,
    plans=st.lists(COSTS, min_size=1, max_size=5),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 999),
)
def test_speculation_is_off_where_plain_looks_faster(
    plain: tuple[float, float, float],
    plans: list[tuple[float, float, float]],
    noise: float,
    seed: int,
) -> None:
    truths = {f"plan-{index}": PlanTruth(*one) for index, one in enumerate(plans)}
    one = World({"plain": PlanTruth(*plain)} | truths, noise, seed)
    for _ in range(120):
        choice = one.guard.choose(one.sessions, LENGTH)
        if not choice.is_trial and choice.plan != "plain":
            expected = one.guard.expected_ms(choice.plan, one.sessions, LENGTH)
            assert expected < one.guard.expected_ms("plain", one.sessions, LENGTH)
        one.act()
    trials = [number for number, choice in enumerate(one.choices) if choice.is_trial]
    gaps = [later - earlier for earlier, later in zip(trials[1:], trials[2:], strict=False)]
    assert all(gap >= MIN_INTERVAL for gap in gaps)


@settings(max_examples=40, deadline=None)
@given(plans=st.lists(COSTS, min_size=1, max_size=5), seed=st.integers(0, 999))
def test_at_any_prices_the_long_run_is_nearly_plains_or_better(
    plans: list[tuple[float, float, float]], seed: int
) -> None:
    truths = {f"plan-{index}": PlanTruth(*one) for index, one in enumerate(plans)}
    one = World({"plain": PlanTruth(10.0, 2.0, PLAIN_PASSES)} | truths, 0.1, seed)
    for _ in range(200):
        one.act()
    start = one.spent_ms
    for _ in range(600):
        one.act()
    assert one.spent_ms - start < 600 * one.true_ms("plain") * 1.05


def test_an_average_of_times_believes_no_outlier() -> None:
    average = Average()
    for sample in (500.0, 10.0):
        average = average.with_time(sample, 0.1)
    assert average.value == 10.0
    for sample in (*(10.0,) * 50, 1000.0):
        average = average.with_time(sample, 0.1)
    assert average.value == pytest.approx(11.0, abs=0.2)


def test_an_average_follows_what_changes() -> None:
    average = Average()
    for sample in (1.0, 3.0):
        average = average.with_sample(sample, weight=0.25)
    assert average.value == 2.0
    for _ in range(20):
        average = average.with_sample(6.0, weight=0.25)
    assert average.value == pytest.approx(6.0, abs=0.05)


# In the decoder.


def passes_needed(session: Session) -> Mapping[str, Average]:
    return session.memories[0].passes_needed


def test_a_guarded_decoder_stays_lossless_and_says_why_it_chose() -> None:
    decoder = tiny_decoder()
    guarded = Decoding(fast_target(decoder), find_method("lossless"))
    session = Session.of(2)
    reasons = set()
    for step in range(40):
        prompts = random_prompts(decoder, [2, 5], seed=step // 8)
        traces = guarded.decode(prompts, session)
        assert tokens_of(traces) == greedy(decoder, prompts)
        reasons |= {trace.guard.split()[0] for trace in traces}
    assert "measuring" in reasons
    assert "trying" in reasons


def test_repeating_the_last_action_is_judged_without_being_tried() -> None:
    """Its passes can be counted afterwards, so the guard needs no trial to see it pay."""
    decoder = tiny_decoder()
    method = find_method("lossless")
    plan = Plan("memory", (kinds.PREVIOUS,), (kinds.PREVIOUS,))
    guarded = Decoding(fast_target(decoder), replace(method, plans=(plan,)))
    session = Session.of(1)
    prompts = random_prompts(decoder, [3])
    for _ in range(3):  # plain is measured first, so these are plain
        guarded.decode(prompts, session)
    learnt = passes_needed(session)["memory"]
    assert learnt.value == 0.0


def test_what_happened_before_decoding_is_charged_to_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that ticks once a lap. Seeing took a thousand ticks, whichever plan came after it."""
    ticks = iter(range(1_000_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    decoder = tiny_decoder()
    guarded = Decoding(fast_target(decoder), find_method("lossless"))
    session, prompts = Session.of(1), random_prompts(decoder, [3])
    for _ in range(40):
        timer = clock()
        for _ in range(1000):
            timer.lap(Stage.VISION)
        trace = guarded.decode(prompts, session, timer)[0]
    assert trace.plan == "memory"


def test_warming_up_measures_every_plan_and_leaves_sessions_alone() -> None:
    decoder = tiny_decoder()
    guarded = Decoding(fast_target(decoder), find_method("lossless"))
    session = Session.of(1)
    prompts = random_prompts(decoder, [3])
    guarded.engine.warm_up(prompts, guarded.method, session.form)
    trace = guarded.decode(prompts, session)[0]
    assert "measuring" not in trace.guard
    assert "trying" not in trace.guard
    assert session.memories[0].num_draws == 1


def test_no_plan_is_judged_by_an_action_that_has_none_before_it() -> None:
    decoder = tiny_decoder()
    plan = Plan("memory", (kinds.PREVIOUS,), (kinds.PREVIOUS,))
    method = replace(find_method("within-bins"), plans=(plan,), is_guarded=True)
    guarded = Decoding(fast_target(decoder), method)
    session = Session.of(1)
    prompts = random_prompts(decoder, [3])
    for _ in range(12):
        guarded.decode(prompts, session)
        (memory,) = session.memories
        session.memories = [SessionMemory(passes_needed=memory.passes_needed)]
    assert passes_needed(session) == {}
    for _ in range(24):
        guarded.decode(prompts, session)
    assert passes_needed(session)["memory"].value < 1.0


def test_a_batch_whose_rows_end_together_is_one_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[int] = []
    monkeypatch.setattr(Guard, "learn", lambda self, choice, num_rows, *_: learnt.append(num_rows))
    decoder = tiny_decoder()
    guarded = Decoding(fast_target(decoder), find_method("lossless"))
    guarded.decode(random_prompts(decoder, [2, 5, 3]), Session.of(3))
    assert learnt == [3]


def test_an_unguarded_decoder_says_nothing() -> None:
    decoder = tiny_decoder()
    method = replace(find_method("lossless"), is_guarded=False)
    one = Decoding(fast_target(decoder), method)
    trace = one.decode(random_prompts(decoder, [3]), Session.of(1))[0]
    assert trace.guard == ""


def test_a_plan_that_is_hardly_cheaper_is_not_taken() -> None:
    """1% is within what clocks disagree about; 3% is not."""
    for saved, expected in ((0.01, "plain"), (0.03, "head")):
        truths = {"plain": PlanTruth(10.0, 2.0, PLAIN_PASSES)}
        truths["head"] = PlanTruth(22.0 * (1 - saved) - 6.0, 2.0, 3.0)
        one = World(truths, noise=0.0)
        plans = [one.act().plan for _ in range(200)]
        assert plans[-50:].count(expected) > 40, saved
