"""What exchanges hold together, and whose it is."""

import pytest

from deft_server.errors import OverloadedError
from deft_server.serving.bounds import ByteBudget, Exchange

ONE, TWO, THREE = "192.0.2.1", "192.0.2.2", "192.0.2.3"


def test_bytes_are_counted_even_when_they_are_too_many():
    budget = ByteBudget(most=10)
    exchange = Exchange(budget, ONE)
    exchange.hold(8)
    with pytest.raises(OverloadedError):
        exchange.hold(3)
    assert budget.now == 11
    exchange.close()
    assert budget.now == 0
    assert not budget.by_owner


def test_the_exchanges_of_a_caller_share_what_it_may_hold():
    budget = ByteBudget(most=10)
    exchanges = [Exchange(budget, ONE, 5) for _ in range(2)]
    with pytest.raises(OverloadedError):
        Exchange(budget, ONE).hold(1)
    exchanges.pop().close()
    Exchange(budget, ONE).hold(1)


def test_nobody_is_refused_for_bytes_that_others_hold():
    budget = ByteBudget(most=10)
    one, two = Exchange(budget, ONE, 10), Exchange(budget, TWO)
    two.hold(5)
    Exchange(budget, THREE).hold(0)
    for exchange in (one, two):
        with pytest.raises(OverloadedError):
            exchange.hold(1)


def test_an_exchange_that_is_closed_holds_nothing_any_more():
    """A picture may still be waiting for its thread when its caller hangs up."""
    budget = ByteBudget(most=10)
    exchange = Exchange(budget, ONE, 5)
    exchange.close()
    with pytest.raises(OverloadedError):
        exchange.hold(3)
    exchange.close()
    assert budget.now == 0
