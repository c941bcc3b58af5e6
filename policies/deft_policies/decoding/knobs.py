"""Values of knobs, from text. Texts come with requests: every value has a limit."""

import math
from typing import Any, Literal, get_args, get_origin

LARGEST = 10_000.0  # of any number


def read_value(hint: object, text: str) -> Any:
    """A value of a field, by the field's type: a number, on or off, none, or one of some words."""
    allowed = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        if text not in allowed:
            raise ValueError(f"expected {' or '.join(allowed)}, got {text!r}")
        return text
    if type(None) in allowed and text == "none":
        return None
    if bool in allowed:
        return read_switch(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None
    if not 0 <= number <= LARGEST or (int in allowed and number != math.floor(number)):
        kind = "a whole number" if int in allowed else "a number"
        raise ValueError(f"expected {kind} from 0 to {LARGEST:g}, got {text!r}")
    return int(number) if int in allowed else number


def read_switch(text: str) -> bool:
    """On or off."""
    if text not in ("on", "true", "off", "false"):
        raise ValueError(f"expected on or off, got {text!r}")
    return text in ("on", "true")


def read_share(text: str) -> float:
    """A share that leaves something."""
    share: float = read_value(float, text)
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, got {text!r}")
    return share
