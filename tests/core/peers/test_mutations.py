"""Damaged messages raise the one typed error and nothing else.

A few hundred per protocol here; `tests/tools/fuzz_wire.py` sends ten thousand through a server.
"""

import random
from collections.abc import Callable

import pytest

from deft_core.errors import WireError
from deft_core.peers.arrays import unpack
from deft_core.peers.openpi import openpi_request
from deft_core.peers.openvla import decode_act_body, oft_request, openvla_request
from deft_core.wire.limits import ReadContext
from deft_server.compat.vla_eval import read_message, vla_eval_request
from tests.core.peers.captures import act_captures, frames
from tests.core.peers.mutations import mutate


def _openvla(message: bytes) -> None:
    openvla_request(decode_act_body(message).fields, ReadContext())


def _oft(message: bytes) -> None:
    oft_request(decode_act_body(message).fields, ReadContext())


def _openpi(message: bytes) -> None:
    value = unpack(message)
    if isinstance(value, dict):
        openpi_request(value, ReadContext())


def _vla_eval(message: bytes) -> None:
    vla_eval_request(read_message(unpack(message)).payload, ReadContext())


ACT = [one.request for one in act_captures() if one.request]
OFT = [body.replace(b'"image"', b'"full_image"') for body in ACT]
PROTOCOLS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "openvla": (_openvla, ACT),
    "oft": (_oft, OFT),
    "openpi": (_openpi, list(frames("openpi").values())),
    "vla-eval": (_vla_eval, list(frames("vlaeval").values())),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_message_is_read_or_refused_and_nothing_else(protocol: str) -> None:
    read, originals = PROTOCOLS[protocol]
    rng = random.Random(protocol)
    refused = 0
    for _ in range(400):
        message = mutate(rng.choice(originals), rng)
        try:
            read(message)
        except WireError:
            refused += 1
    assert refused > 200
