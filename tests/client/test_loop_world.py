"""Whatever a drawn world does, no command is stale, of another period, not finite or too large."""

import pytest

from deft_client import control_loop
from deft_client.actions import ActionQueue, ActionRules
from deft_client.control_loop import ControlLoop
from tests.client.loop_world import World
from tests.draws import draws

pytestmark = pytest.mark.promise


def faults_of(seeds):
    found = {}
    for seed in seeds:
        faults = World(seed).play()
        if faults:
            found[seed] = faults[:3]
    return found


@pytest.mark.parametrize("part", range(3))
def test_no_command_is_stale_or_of_another_period_or_beyond_its_limits(part):
    assert not faults_of(range(part, draws(300), 3))


def test_the_same_seed_is_the_same_play():
    plays = [World(12) for _ in range(2)]
    for one in plays:
        one.play()
    assert plays[0].num_moves == plays[1].num_moves > 0
    assert plays[0].clock.now == plays[1].clock.now


def forget_nothing(patch):
    """What was left before a pause is executed after it."""
    patch.setattr(ControlLoop, "_forget_after_pause", lambda self: None)


def keep_at_reset(patch):
    """A new episode begins with the actions of the old one."""
    patch.setattr(ControlLoop, "reset", lambda self: setattr(self, "_is_new_episode", True))


def take_what_was_cleared(patch):
    """The answer to a question from before a reset or a stall is taken."""
    clear = ActionQueue.clear

    def keeping(self):
        asked = self._asked
        clear(self)
        self._asked = asked

    patch.setattr(ActionQueue, "clear", keeping)


def count_no_periods(patch):
    """An answer's first action is executed, whatever was executed since its frame."""
    ask = ActionQueue.ask

    def counting(self):
        executed = ask(self)
        self._num_executed = 0
        self._asked = (self._num_periods, 0)
        return executed

    patch.setattr(ActionQueue, "ask", counting)
    refill = ActionQueue.refill

    def refilling(self, chunk):
        self._num_executed = 0
        refill(self, chunk)

    patch.setattr(ActionQueue, "refill", refilling)


def repeat_the_last(patch):
    """Where no action is left, the last one is repeated."""
    take = ActionQueue.next

    def taking(self):
        action = take(self)
        self.kept = action if action is not None else getattr(self, "kept", None)
        return self.kept

    patch.setattr(ActionQueue, "next", taking)


def limit_nothing(patch):
    """Commands are as the policy wants them."""
    patch.setattr(ActionRules, "limited", lambda self, action, before: action)


def hold_the_motion(patch):
    """An arm that holds goes on with its last motion."""
    patch.setattr(ActionRules, "hold", lambda self, before: before)


def check_no_answer(patch):
    """Answers that are not finite, too large or of another size are executed."""
    patch.setattr(ActionRules, "check", lambda self, actions: None)


def check_no_age(patch):
    """A frozen camera's frames are used."""
    patch.setattr(ControlLoop, "_check_age", lambda self, observation: None)


def check_no_deadline(patch):
    """An answer after its deadline is executed."""
    patch.setattr(ControlLoop, "_check_in_time", lambda self, took_s: None)


def command_close_together(patch):
    """A hold at a period's end is followed at once by the next period's action."""
    patch.setattr(control_loop, "HALF", 0.01)


def wait_too_long(patch):
    """The loop waits for an answer beyond the period's end."""
    patch.setattr(
        ControlLoop, "_longest_wait_s", property(lambda self: 3 * self._settings.period_s)
    )


def ask_before_the_camera(patch):
    """A frame counts from when it was asked for, not from when it came."""
    answer = ControlLoop._answer

    def asking(self):
        self._queue.ask()
        ask, self._queue.ask = self._queue.ask, lambda: None
        try:
            return answer(self)
        finally:
            self._queue.ask = ask

    patch.setattr(ControlLoop, "_answer", asking)


@pytest.mark.parametrize(
    "mistake",
    [
        *(forget_nothing, keep_at_reset, take_what_was_cleared, count_no_periods, repeat_the_last),
        *(limit_nothing, hold_the_motion, check_no_answer, check_no_age, check_no_deadline),
        *(command_close_together, wait_too_long, ask_before_the_camera),
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    assert any(faults_of([seed]) for seed in range(300))
