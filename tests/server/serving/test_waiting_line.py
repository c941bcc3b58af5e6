"""The waiting line: each rule alone; `test_random_traffic` has all of them at once."""

import itertools
import math
from collections import Counter

from deft_server.serving.waiting_frames import Ticket
from deft_server.serving.waiting_line import Admission, LineRules, Offer, WaitingLine

RULES = LineRules(max_batch=2, max_wait_s=0.01, max_waiting=6, newcomer_batches=2, patience_s=0.2)


def line_with(*tickets: Ticket, rules: LineRules = RULES) -> WaitingLine:
    line = WaitingLine(rules)
    for ticket in tickets:
        assert line.offer(ticket, ticket.arrived_s).admission is Admission.WAITS
    return line


def numbers(tickets: tuple[Ticket, ...]) -> list[int]:
    return [ticket.number for ticket in tickets]


def busy_line(service_s: float = 0.02, at_s: float = 0.0) -> WaitingLine:
    """Return a line with one frame in flight, whose policy is known to take `service_s`."""
    line = line_with(Ticket(1000, "first", at_s))
    line.decide(at_s)
    line.finish(at_s, service_s)
    line.offer(Ticket(1001, "busy", at_s), at_s)
    assert numbers(line.decide(at_s).batch) == [1001]
    return line


def test_frames_are_answered_in_the_order_they_came():
    line = line_with(*(Ticket(n, f"s{n}", n / 1000) for n in range(4)))
    assert numbers(line.decide(0.1).batch) == [0, 1]
    line.finish(0.1)
    assert numbers(line.decide(0.1).batch) == [2, 3]


def test_an_earlier_deadline_goes_first_and_any_before_none():
    line = line_with(
        Ticket(1, "a", 0.0, deadline_s=0.9),
        Ticket(2, "b", 0.0, deadline_s=0.5),
        Ticket(3, "c", 0.0),
    )
    assert numbers(line.decide(0.1).batch) == [2, 1]


def test_deadlines_without_end_leave_a_place_in_eight_to_the_frame_that_is_overdue():
    line = line_with(Ticket(1, "patient", 0.0))
    places = []
    for number in range(2, 22, 2):
        for one in (number, number + 1):
            line.offer(Ticket(one, f"s{one}", 0.3, deadline_s=9.0), 0.3)
        places += numbers(line.decide(0.3).batch)
        line.finish(0.3, 0.01)
    assert places.index(1) == 8


def test_robots_with_deadlines_lose_none_while_a_hundred_sessions_without_never_stop():
    """Once 118 of 192 such frames were refused or late: a frame without a deadline that was due
    went before them, and there were always enough of those."""
    rules = LineRules(max_batch=8)
    line, fates = WaitingLine(rules), Counter[str]()
    robots = {f"robot{n}" for n in range(4)}
    number = itertools.count()
    for turn in range(200):
        at_s = turn * 0.05  # a batch takes 50 ms
        crowd = [Ticket(next(number), f"s{n}", at_s, is_running=True) for n in range(100)]
        if turn % 4 == 0:
            crowd += [
                Ticket(next(number), one, at_s, at_s + 0.3, is_running=True) for one in robots
            ]
        for ticket in crowd:
            offer = line.offer(ticket, at_s)
            if ticket.has_deadline:
                fates[offer.admission.value] += 1
            assert offer.displaced is None or not offer.displaced.has_deadline
        decision = line.decide(at_s)
        fates["expired"] += len(decision.expired)
        fates["answered"] += sum(one.has_deadline for one in decision.batch)
        fates["others"] += sum(not one.has_deadline for one in decision.batch)
        line.finish(at_s + 0.05, 0.05)
    assert fates == {"waits": 200, "answered": 200, "expired": 0, "others": 1400}


def test_an_owner_that_asks_for_more_than_its_share_does_not_push_another_out():
    line, answered = WaitingLine(LineRules(max_batch=2)), Counter[str]()
    number = itertools.count()
    for turn in range(200):
        at_s = turn * 0.02
        for n in range(10):  # with deadlines, which do not help it to the share of others
            line.offer(
                Ticket(next(number), f"g{n}", at_s, at_s + 0.2, is_running=True, owner="greedy"),
                at_s,
            )
        line.offer(Ticket(next(number), "one", at_s, is_running=True, owner="modest"), at_s)
        answered.update(one.owner for one in line.decide(at_s).batch)
        line.finish(at_s + 0.02, 0.02)
    assert answered["modest"] >= 180
    assert answered["greedy"] >= 180


def test_a_full_line_takes_a_place_from_the_owner_with_most_frames():
    line = line_with(*(Ticket(n, f"s{n}", 0.0, is_running=True, owner="greedy") for n in range(6)))
    offer = line.offer(Ticket(10, "one", 0.0, owner="modest"), 0.0)
    assert offer.displaced is not None
    assert offer.displaced.number == 5


def test_a_full_line_takes_a_place_from_a_frame_without_deadline_for_one_with():
    line = line_with(*(Ticket(n, f"s{n}", 0.0, is_running=True) for n in range(6)))
    offer = line.offer(Ticket(10, "one", 0.0, deadline_s=0.5), 0.0)
    assert offer.displaced is not None
    assert offer.displaced.number == 5
    assert line.offer(Ticket(11, "two", 0.0), 0.0).admission is Admission.FULL


def test_a_newer_frame_of_a_session_takes_the_place_of_the_one_that_waits():
    line = line_with(Ticket(1, "a", 0.0), Ticket(2, "b", 0.0), Ticket(3, "c", 0.0))
    offer = line.offer(Ticket(4, "a", 0.05), 0.05)
    assert offer.superseded == Ticket(1, "a", 0.0)
    assert numbers(line.decide(0.1).batch) == [4, 2]  # and keeps its turn


def test_frames_that_name_no_session_do_not_supersede_each_other():
    line = line_with(*(Ticket(n, "caller", 0.0, is_session=False) for n in range(2)))
    assert len(line) == 2


def test_nothing_starts_while_a_batch_is_with_the_policy():
    line = busy_line()
    line.offer(Ticket(1, "a", 0.0), 0.0)
    assert line.decide(0.0).batch == ()
    line.finish(0.02, 0.02)
    assert numbers(line.decide(0.02).batch) == [1]


def test_newcomers_are_refused_before_running_sessions_are():
    line = line_with(*(Ticket(n, f"s{n}", 0.0) for n in range(4)))
    assert line.offer(Ticket(10, "new", 0.0), 0.0).admission is Admission.FULL
    running = Ticket(11, "old", 0.0, is_running=True)
    assert line.offer(running, 0.0).admission is Admission.WAITS


def test_a_full_line_takes_a_place_from_the_flow_with_most_frames():
    line = line_with(*(Ticket(n, "greedy", 0.0, is_session=False) for n in range(4)))
    offer = line.offer(Ticket(10, "modest", 0.0), 0.0)
    assert offer.admission is Admission.WAITS
    assert offer.displaced is not None
    assert offer.displaced.number == 3
    assert line.offer(Ticket(11, "greedy", 0.0, is_session=False), 0.0).admission is Admission.FULL


def test_a_frame_that_stays_joins_a_full_line_and_takes_no_place_from_other_flows():
    line = line_with(*(Ticket(n, f"s{n}", 0.0) for n in range(4)))
    stays = [Ticket(10 + n, "old client", 0.0, is_session=False, stays_until_s=9.0) for n in (0, 1)]
    for ticket in stays:
        assert line.offer(ticket, 0.0) == Offer(Admission.WAITS)
    assert numbers(line.decide(0.0).batch) == [0, 1]
    for number in (20, 21):
        assert line.offer(Ticket(number, f"s{number}", 0.0), 0.0) == Offer(Admission.WAITS)
    assert line.offer(Ticket(22, "s22", 0.0), 0.0).admission is Admission.FULL
    assert len(line) == 6


def test_a_flow_whose_frames_stay_has_no_room_for_one_that_does_not():
    line = line_with(
        *(Ticket(n, "one", 0.0, is_session=False, stays_until_s=9.0) for n in range(4))
    )
    offer = line.offer(Ticket(10, "one", 0.0, is_session=False), 0.0)
    assert offer.admission is Admission.FULL


def test_a_caller_with_many_frames_does_not_delay_a_caller_with_one():
    line = busy_line(service_s=0.02)
    for number in range(3):
        line.offer(Ticket(number, "greedy", 0.0, is_session=False), 0.0)
    line.offer(Ticket(10, "modest", 0.001, is_session=False), 0.001)
    line.finish(0.02)
    assert numbers(line.decide(0.02).batch) == [0, 10]


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    line = busy_line(service_s=0.02)
    assert line.offer(Ticket(1, "a", 0.0, deadline_s=0.03), 0.0).admission is Admission.TOO_LATE
    assert line.offer(Ticket(2, "a", 0.0, deadline_s=0.05), 0.0).admission is Admission.WAITS


def test_a_deadline_that_has_passed_is_refused_even_before_anything_was_measured():
    line = WaitingLine(RULES)
    assert line.offer(Ticket(1, "a", 0.0, deadline_s=0.01), 0.02).admission is Admission.TOO_LATE


def test_a_frame_that_waited_too_long_is_dropped_before_its_batch_starts():
    line = busy_line(service_s=0.02)
    line.offer(Ticket(1, "a", 0.0, deadline_s=0.05), 0.0)
    line.finish(0.04, 0.02)
    decision = line.decide(0.04)
    assert numbers(decision.expired) == [1]
    assert decision.batch == ()


def test_one_slow_batch_does_not_lock_everybody_out():
    """A first batch of 5 s (a compilation, say) must not make the server refuse all deadlines of
    200 ms for ever: with nothing measured lately, the next frame is tried."""
    line = line_with(Ticket(1, "a", 0.0))
    line.decide(0.0)
    line.finish(5.0, 5.0)
    late = Ticket(2, "a", 5.5, deadline_s=5.7)
    assert line.offer(late, 5.5).admission is Admission.TOO_LATE
    later = Ticket(3, "a", 6.5, deadline_s=6.7)
    assert line.offer(later, 6.5).admission is Admission.WAITS
    assert numbers(line.decide(6.5).batch) == [3]


def test_a_batch_waits_for_a_session_that_is_about_to_send():
    line = WaitingLine(RULES)
    for turn in range(4):  # both robots send 50 ms after each answer
        at_s = turn * 0.06
        line.offer(Ticket(2 * turn, "a", at_s), at_s)
        line.offer(Ticket(2 * turn + 1, "b", at_s), at_s)
        assert len(line.decide(at_s).batch) == 2
        line.finish(at_s + 0.01, 0.01)
    line.offer(Ticket(100, "a", 0.238), 0.238)
    decision = line.decide(0.238)
    assert decision.batch == ()
    assert decision.wake_s is not None
    assert 0 < decision.wake_s < RULES.max_wait_s + 1e-9
    line.offer(Ticket(101, "b", 0.241), 0.241)
    assert numbers(line.decide(0.241).batch) == [100, 101]


def test_a_batch_never_waits_longer_than_it_takes():
    line = WaitingLine(RULES)
    for turn in range(4):
        at_s = turn * 0.06
        line.offer(Ticket(2 * turn, "a", at_s), at_s)
        line.offer(Ticket(2 * turn + 1, "b", at_s), at_s)
        assert len(line.decide(at_s).batch) == 2
        line.finish(at_s + 0.01, 0.001)
    line.offer(Ticket(100, "a", 0.2395), 0.2395)
    wake_s = line.decide(0.2395).wake_s
    assert wake_s is not None
    assert 0 < wake_s < 0.0011


def test_a_lone_session_never_waits_for_company():
    line = WaitingLine(RULES)
    for turn in range(5):
        at_s = turn * 0.06
        line.offer(Ticket(turn, "only", at_s), at_s)
        assert numbers(line.decide(at_s).batch) == [turn]
        line.finish(at_s + 0.01, 0.01)


def test_a_reset_takes_the_waiting_frame_out():
    line = line_with(Ticket(1, "a", 0.0), Ticket(2, "b", 0.0))
    assert line.forget("a") == Ticket(1, "a", 0.0)
    assert numbers(line.decide(0.0).batch) == [2]
    assert line.forget("a") is None


def test_the_time_until_there_is_room_follows_the_measured_service_time():
    line = busy_line(service_s=0.02)
    for number in range(3):
        line.offer(Ticket(number, f"s{number}", 0.0), 0.0)
    assert math.isclose(line.clears_in_s(0.005), 0.015 + 2 * 0.02)
