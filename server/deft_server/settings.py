"""Everything that can be set about the server, in one frozen object. Where values come from is
the business of `settings_sources`.
"""

import math
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deft_core.image_chain import ImageChain
from deft_core.wire.images import ImageEncoding
from deft_core.wire.limits import MAX_DECODABLE_PIXELS, WireLimits

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
OutOfRange = Literal["clamp", "passthrough"]
ActProfile = Literal["openvla", "oft"]


class SettingsError(Exception):
    """A setting has an unknown name or an unusable value; the message says which and why."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(BaseModel):
    """The server's settings; the descriptions are what `deft serve --help` shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=0, le=65535, description="port; 0 picks a free one")

    max_batch: Count = Field(default=8, description="most frames in one batch")
    max_waiting: Count = Field(default=64, description="most frames waiting; beyond it 429")
    patience_ms: Positive = Field(
        default=2000.0, description="a frame without deadline is due this long after it arrived"
    )
    default_deadline_ms: Positive | None = Field(
        default=None, description="deadline of frames that name none; none by default"
    )
    allow_options: bool = Field(
        default=True, description="may a frame choose its own decoding and radius"
    )
    strict_inputs: bool = Field(
        default=False,
        description="refuse a frame with a state that the policy does not look at, and of other "
        "projects' clients one with such a camera; by default the log says so once for each caller",
    )
    ignore_cameras: bool = Field(
        default=False,
        description="answer a frame with a camera that the policy does not look at; by default "
        "it is refused, but for other projects' clients",
    )

    hang_after_s: Positive = Field(default=60.0, description="a batch longer than this is a hang")
    on_hang: Literal["exit", "reload"] = Field(
        default="exit", description="what to do about a policy that hangs"
    )
    unready_after_failures: Count = Field(
        default=5,
        description="batches that fail, or unsafe answers, in a row before /readyz gives 503",
    )
    replicas: Count | None = Field(
        default=None, description="start so many replicas of the policy with Ray Serve"
    )
    most_replicas: Count | None = Field(
        default=None, description="have Ray add replicas while frames wait, up to so many"
    )
    ray: str | None = Field(
        default=None,
        description="address of a Ray cluster; without replicas, serve those already there",
    )
    replica_cpus: Positive = Field(
        default=1.0, description="processor cores that Ray sets aside for a replica"
    )
    replica_gpus: float = Field(
        default=0.0, ge=0, description="GPUs that Ray sets aside for a replica; 0.5 is half of one"
    )
    replica_surge: bool = Field(
        default=False,
        description="in an update start each new replica first; needs room for one more",
    )

    drain_s: Positive = Field(
        default=30.0, description="longest wait for frames in hand when stopping"
    )

    session_ttl_s: Positive = Field(default=1800.0, description="sessions without frames end")
    max_sessions: Count = Field(default=1024, description="most sessions; the oldest goes")

    out_of_range: OutOfRange = Field(
        default="clamp",
        description="actions beyond the statistics, where a policy may exceed them: moved to the "
        "end of the range, or sent as they are",
    )

    keys_file: Path | None = Field(default=None, description="API keys (TOML); re-read on change")
    rate_per_s: Positive | None = Field(
        default=None, description="frames per second of a caller whose key sets no rate"
    )
    open_metrics: bool = Field(default=True, description="serve /metrics without a key")
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="names that lead here, comma-separated, besides localhost and addresses",
    )
    allow_anyone: bool = Field(
        default=False, description="let whoever reaches a public address move the robot, keyless"
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="addresses or networks whose X-Forwarded-For is believed"
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="web origins that may call, comma-separated; none by default"
    )
    tls_certificate: Path | None = Field(default=None, description="TLS certificate chain (PEM)")
    tls_key: Path | None = Field(default=None, description="TLS private key (PEM)")
    tls_client_ca: Path | None = Field(
        default=None, description="demand client certificates signed by this CA (PEM)"
    )

    max_body_bytes: Count = Field(default=16 * 1024 * 1024, description="largest body or message")
    max_total_bytes: Count = Field(
        default=32 * 1024**2,
        description="largest sum of all bodies, messages and decoded pictures in hand",
    )
    max_header_bytes: int = Field(
        default=32 * 1024, ge=1024, description="largest sum of a request's headers and trailers"
    )
    max_image_side: Count = Field(default=4096, description="longest side of an image")
    max_image_pixels: int = Field(
        default=4 * 1024 * 1024,
        ge=1,
        le=MAX_DECODABLE_PIXELS,
        description="most pixels in an image, and in all PNGs and JPEGs of a frame",
    )
    max_instruction_chars: Count = Field(default=4096, description="longest instruction")
    header_timeout_s: Positive = Field(
        default=10.0, description="longest a request's headers may take to arrive"
    )
    body_timeout_s: Positive = Field(default=10.0, description="longest a body may take to arrive")
    keep_alive_s: Positive = Field(default=75.0, description="idle HTTP connections are closed")
    max_connections: Count = Field(default=4096, description="most connections; beyond it 503")
    max_connections_per_address: Count = Field(
        default=1024,
        description="most connections from one address, or of one that a trusted proxy names",
    )

    profile: ActProfile = Field(
        default="openvla", description="whose POST /act to answer: OpenVLA's or OFT's"
    )
    act_image_chain: ImageChain = Field(
        default=ImageChain.NONE, description="what to do to frames of POST /act before the policy"
    )
    socket_image_chain: ImageChain = Field(
        default=ImageChain.NONE, description="the same for openpi's and vla-eval's clients"
    )
    dashboard: bool = Field(default=True, description="serve /dashboard")

    record: Path | None = Field(default=None, description="record episodes in this directory")
    record_frames: ImageEncoding = Field(
        default=ImageEncoding.PNG, description="how recorded frames are kept; jpeg changes pixels"
    )
    record_max_bytes: Count = Field(
        default=20 * 1024**3, description="beyond this the oldest recordings are deleted"
    )
    record_min_free_bytes: int = Field(
        default=512 * 1024**2,
        ge=0,
        description="the oldest recordings go before less than this is free",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="which log lines are written"
    )
    log_batches: bool = Field(
        default=False,
        description="log size and time of every batch",
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto",
        description="how log lines look; auto: text on a terminal, else JSON",
    )

    @field_validator("cors_origins", "allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(word.strip() for word in value.split(",") if word.strip())
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            ip_network(one)  # a ValueError that says what is wrong
        return value

    @model_validator(mode="after")
    def _check_exposure(self) -> "Settings":
        is_guarded = self.keys_file is not None or self.tls_client_ca is not None
        if not (is_guarded or self.allow_anyone or is_loopback(self.host)):
            raise ValueError(
                f"on {self.host} anyone in the network could move the robot: give keys_file "
                "(`deft key` makes keys), or say allow_anyone if that is meant"
            )
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> "Settings":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together; give both or neither")
        if self.tls_client_ca is not None and self.tls_key is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.most_replicas is not None and self.most_replicas < (self.replicas or math.inf):
            raise ValueError("most_replicas goes with replicas, and is not below it")
        return self

    @property
    def wire_limits(self) -> WireLimits:
        """The limits as the wire knows them."""
        return WireLimits(
            max_bytes=self.max_body_bytes,
            max_image_side=self.max_image_side,
            max_image_pixels=self.max_image_pixels,
            max_instruction_chars=self.max_instruction_chars,
        )
