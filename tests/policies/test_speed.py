"""No method takes more passes for the golden frames than it did; milliseconds are only told."""

import json
import sys

import pytest
import torch

from tests.policies.speed_table import TABLE, methods, play, policy

KNOWN = json.loads(TABLE.read_text())
SLOWER = 1.5  # times the milliseconds of the table; another machine differs by less


def test_every_method_has_its_row():
    assert sorted(KNOWN) == sorted(methods()), "python -m tests.policies.speed_table"


@pytest.mark.parametrize("method", KNOWN)
def test_a_method_takes_no_more_passes_than_before(method, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_passes, pass_ms = play(method)
    finally:
        torch.set_num_threads(before)
    known = KNOWN[method]
    if pass_ms > SLOWER * known["pass_ms"]:
        with capsys.disabled():
            sys.stderr.write(
                f"\n{method}: {pass_ms:.1f} ms a pass, and {known['pass_ms']} in {TABLE.name}\n"
            )
    assert num_passes <= known["passes"]


def test_plain_decoding_is_told_from_a_method_that_saves_passes():
    """The table would notice if drafts were no longer accepted."""
    plain = KNOWN["autoregressive"]["passes"]
    assert plain == 7 * 24
    assert KNOWN["lossless"]["passes"] < plain
    assert KNOWN["deft"]["passes"] < KNOWN["lossless"]["passes"]
    assert policy().info.decoding == "lossless"
