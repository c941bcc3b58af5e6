"""Everything that can be set about the server, in one frozen object.

A value comes from a flag, else from the environment (DEFT_SERVER_PORT=8000), else from a TOML file,
else it is the default below. A name that is not below is refused wherever it comes from.
"""

from enum import Enum
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from deft_client.wire_limits import WireLimits

ENVIRONMENT_PREFIX = "DEFT_SERVER_"

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class SettingsError(Exception):
    """A setting has an unknown name or an unusable value; the message says which."""


class Fallback(Enum):
    """What a robot gets in place of an answer that cannot be had."""

    ERROR = "error"
    HOLD = "hold"  # zero motion, the gripper as it was


class OnHang(Enum):
    """What to do about a policy that does not come back."""

    EXIT = "exit"
    RELOAD = "reload"


class LogFormat(Enum):
    """How log lines look."""

    JSON = "json"
    TEXT = "text"


class Settings(BaseSettings):
    """The server's settings; the descriptions are what `deft serve --help` shows."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True
    )

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=0, le=65535, description="port; 0 picks a free one")

    max_batch: Count = Field(default=8, description="most frames in one batch")
    max_wait_ms: float = Field(
        default=4.0, ge=0, description="longest a batch waits for a session that is about to send"
    )
    max_waiting: Count = Field(default=64, description="most frames waiting; beyond it 429")
    newcomer_batches: Count = Field(
        default=2,
        description="batches that may wait before a new session gets 429",
    )
    patience_ms: Positive = Field(
        default=200.0, description="a frame without deadline is due this long after it arrived"
    )
    default_deadline_ms: Positive | None = Field(
        default=None, description="deadline of frames that name none; none by default"
    )

    hang_after_s: Positive = Field(default=60.0, description="a batch longer than this is a hang")
    on_hang: OnHang = Field(default=OnHang.EXIT, description="what to do about a policy that hangs")
    unready_after_failures: Count = Field(
        default=5, description="batches that fail in a row before /readyz answers 503"
    )
    drain_s: Positive = Field(
        default=30.0, description="longest wait for frames in hand when stopping"
    )

    session_ttl_s: Positive = Field(default=1800.0, description="sessions without frames end")
    max_sessions: Count = Field(default=1024, description="most sessions; the oldest goes")

    on_deadline_miss: Fallback = Field(
        default=Fallback.ERROR, description="answer to a missed deadline: error (504) or hold"
    )

    max_body_bytes: Count = Field(default=16 * 1024 * 1024, description="largest body or message")
    max_image_side: Count = Field(default=4096, description="longest side of an image")
    max_image_pixels: Count = Field(default=4 * 1024 * 1024, description="most pixels in an image")
    max_instruction_chars: Count = Field(default=4096, description="longest instruction")
    body_timeout_s: Positive = Field(default=10.0, description="longest a body may take to arrive")

    @property
    def wire_limits(self) -> WireLimits:
        """The limits as the wire knows them."""
        return WireLimits(
            max_bytes=self.max_body_bytes,
            max_image_side=self.max_image_side,
            max_image_pixels=self.max_image_pixels,
            max_instruction_chars=self.max_instruction_chars,
        )
