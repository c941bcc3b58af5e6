"""When a policy that was lost is loaded again."""

from deft_server.serving.lifecycle import STEADY_S, Readiness, Reloads, ServerPhase


def test_a_policy_that_is_lost_again_and_again_is_loaded_ever_later():
    reloads = Reloads()
    pauses = []
    for _ in range(8):
        reloads.loaded(0.0)
        pauses.append(reloads.pause_s(1.0))
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_policy_that_lasted_is_replaced_at_once():
    reloads = Reloads()
    for _ in range(3):
        reloads.loaded(0.0)
        reloads.pause_s(1.0)
    reloads.loaded(1.0)
    assert reloads.pause_s(STEADY_S + 2.0) == 0.0


def test_a_policy_that_cannot_be_reloaded_is_tried_ever_later():
    """Once it was tried without a pause, as though each try had lasted."""
    reloads = Reloads()
    reloads.loaded(0.0)
    assert [reloads.pause_s(STEADY_S + 1.0) for _ in range(4)] == [0, 1, 2, 4]


def test_a_server_that_loads_says_what_it_does():
    readiness = Readiness(unready_after=1)
    assert readiness.sentence == "the policy is loading"
    readiness.progress = lambda: "reading the weights, 40%, about 12 s left"
    assert readiness.sentence == (
        "the policy is loading: reading the weights, 40%, about 12 s left"
    )
    readiness.enter(ServerPhase.LOADING, "again, because it did not come back")
    assert readiness.sentence.startswith("the policy is loading: again, because it did not come")
    assert readiness.sentence.endswith("; reading the weights, 40%, about 12 s left")
    readiness.enter(ServerPhase.READY)
    assert readiness.sentence == "ready"
