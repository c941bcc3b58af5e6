import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deft_policies.checkpoint.config import load_config
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.families.action_tokens import ActionCodec, normalise
from deft_policies.model.sizes import find_action_tokens
from deft_policies.model.statistics import ActionStatistics
from tests import golden

CODEC = ActionCodec(find_action_tokens(text_vocab_size=32000))
LIBERO = load_config(golden.TINY_OPENVLA).statistics["libero_spatial"]


def slow_digit(value: float) -> int:
    """Bins whose lower edge the value has reached, one comparison at a time."""
    return sum(value >= -1.0 + 2.0 * step / 255 for step in range(256))


def test_every_id_of_the_vocabulary_has_the_original_value() -> None:
    table = golden.action_table()
    assert np.array_equal(CODEC.normalised(table["ids"]), table["normalised"])
    assert CODEC.normalised(table["ids"]).dtype == np.float64


@pytest.mark.parametrize("number", [0, 1, 2])
def test_unnormalised_actions_are_bit_equal(number: int) -> None:
    table = golden.action_table()
    statistics = ActionStatistics(
        table[f"unnorm_{number}_q01"],
        table[f"unnorm_{number}_q99"],
        table[f"unnorm_{number}_mask"].astype(np.bool_),
    )
    actions = CODEC.decode(table[f"unnorm_{number}_tokens"], statistics)
    assert actions.tobytes() == table[f"unnorm_{number}_actions"].tobytes()


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: str(case.number))
def test_golden_tokens_become_the_golden_action(case: golden.GoldenCase) -> None:
    statistics = load_config(golden.TINY_OPENVLA).statistics[case.statistics_key]
    action = CODEC.decode(np.array(case.tokens), statistics)
    assert action.tobytes() == case.action.tobytes()


@pytest.mark.parametrize(("value", "token"), [(0.0, 31872), (1.0, 31744), (-1.0, 31999)])
def test_training_ids_of_known_values(value: float, token: int) -> None:
    unmasked = ActionStatistics(np.zeros(1), np.ones(1), np.array([False]))
    assert CODEC.encode(np.array([value]), unmasked) == token


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float64, (5, 7), elements=st.floats(-2, 2)))
def test_encoding_equals_counting_edges(actions: np.ndarray) -> None:
    clipped = np.clip(normalise(actions, LIBERO), -1, 1)
    slow = np.array([[32000 - slow_digit(value) for value in row] for row in clipped])
    # An edge that is not exact in binary may be met from either side.
    assert np.abs(CODEC.encode(actions, LIBERO) - slow).max() <= 1
    edges = np.linspace(-1, 1, 256)
    away = np.abs(clipped[..., None] - edges).min(axis=-1) > 1e-12
    assert np.array_equal(CODEC.encode(actions, LIBERO)[away], slow[away])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(31745, 31999), min_size=7, max_size=7))
def test_decoding_then_encoding_returns_the_tokens(tokens: list[int]) -> None:
    actions = CODEC.decode(np.array(tokens), LIBERO)
    assert CODEC.encode(actions, LIBERO).tolist() == tokens


def test_the_maximum_decodes_like_its_neighbour() -> None:
    both = CODEC.normalised(np.array([31744, 31745]))
    assert both[0] == both[1]


def test_actions_beyond_the_range_are_clipped_to_its_ends() -> None:
    far = CODEC.encode(np.full(7, 99.0), LIBERO)
    assert far.tolist() == [31744] * 7
    assert CODEC.encode(np.full(7, -99.0), LIBERO).tolist() == [31999] * 7


def test_a_dimension_that_never_changes_survives_the_round_trip() -> None:
    still = ActionStatistics(np.full(7, 0.3), np.full(7, 0.3), np.ones(7, np.bool_))
    tokens = CODEC.encode(np.full(7, 0.3), still)
    assert tokens.tolist() == [31872] * 7
    assert np.allclose(CODEC.decode(tokens, still), 0.3)
    assert CODEC.bin_widths(still).tolist() == [0.0] * 7


def test_bin_widths_are_the_distance_of_neighbouring_actions() -> None:
    tokens = np.full(7, 31850)
    distance = CODEC.decode(tokens - 1, LIBERO) - CODEC.decode(tokens, LIBERO)
    assert np.allclose(CODEC.bin_widths(LIBERO), distance, rtol=1e-9)


def test_libero_bins_are_measured_in_millimetres_and_degrees() -> None:
    """A unit of LIBERO's controller is 5 cm or half a radian."""
    space = CODEC.action_space(LIBERO, "libero_spatial_no_noops")
    assert space.groups == (DimensionGroup.MOVE,) * 3 + (DimensionGroup.TURN,) * 3 + (
        DimensionGroup.GRIP,
    )
    x_range = 0.9375 + 0.7454732114076613
    assert space.unit_per_bin[0] == pytest.approx(x_range / 255 * 50)
    yaw_range = 0.14571428298950195 + 0.1842857152223587
    assert space.unit_per_bin[5] == pytest.approx(np.degrees(yaw_range / 255 * 0.5))
    assert space.unit_per_bin[6] == 0.0


def test_the_gripper_changes_class_where_its_value_passes_one_half() -> None:
    boundary = CODEC.action_space(LIBERO, "libero_goal").class_boundary[6]
    assert boundary is not None
    values = CODEC.normalised(np.array([boundary - 1, boundary]))
    assert values[0] > 0.5 >= values[1]


def test_limits_count_in_bins_when_the_robot_is_unknown() -> None:
    assert CODEC.action_space(LIBERO, "my_robot") == ActionSpace.in_bins(7)
    two_fingers = ActionStatistics(np.zeros(2), np.ones(2), np.ones(2, np.bool_))
    assert CODEC.action_space(two_fingers, "libero_goal") == ActionSpace.in_bins(2)


def test_a_small_vocabulary_has_its_action_tokens_at_its_end() -> None:
    small = find_action_tokens(text_vocab_size=1024)
    assert (small.first, small.last) == (768, 1023)
    tokens = np.arange(769, 1024)
    assert np.array_equal(
        ActionCodec(small).normalised(tokens), CODEC.normalised(tokens + 32000 - 1024)
    )
