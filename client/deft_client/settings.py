"""How a client talks to its server: one frozen object, handed down from where it is made."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from deft_client.actions import ActionRules
from deft_core.wire.images import JPEG_QUALITY, ImageEncoding
from deft_core.wire.limits import DEFAULT_LIMITS, WireLimits

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "DEFT_API_KEY"
LOADING_S = 120.0  # for a server that is loading


def check_url(url: str) -> str:
    """Return the base URL of a server without its last slash; ValueError says what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must start with http:// or https:// and name a host, got {url!r}")
    if parts.query or parts.fragment or parts.port == 0:
        raise ValueError(f"url must be that of a server, such as {DEFAULT_URL}, got {url!r}")
    url = url.rstrip("/")
    for path in ("/v1/act", "/v1/stream", "/v1"):
        if url.endswith(path):
            raise ValueError(f"url must be that of a server, without {path}: {url[: -len(path)]}")
    return url


@dataclass(frozen=True)
class Timeouts:
    """Seconds a call may take; a deadline of the observation shortens them."""

    connect_s: float = 5.0  # making one connection
    answer_s: float = 30.0  # all of it: connecting, sending, retries, the last byte of the answer

    def __post_init__(self) -> None:
        if min(vars(self).values()) <= 0:
            raise ValueError(f"timeouts must be above 0 s, got {self}")


@dataclass(frozen=True)
class Retries:
    """When and how often a call is made again: connection errors, 429, 502, 503, nothing else.

    The pause before retry n is drawn between half and all of `first_pause_s` x 2^n. A server that
    says Retry-After is believed, unless it asks for more than `longest_pause_s`: then we give up.
    `only_when_overloaded` leaves 429: after all else the server may be a new one, which has
    forgotten the session, or have counted the frame already.
    A server that says that it is loading is waited for during `loading_s`, however many attempts
    that takes; a call with a deadline ends with it.
    """

    attempts: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    only_when_overloaded: bool = False
    loading_s: float = LOADING_S

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_pause_s, self.longest_pause_s, self.loading_s) < 0:
            raise ValueError(f"retries need at least one attempt and pauses >= 0, got {self}")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for https: whom to trust besides the system's authorities, and who we are."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; ValueError names the one that cannot be used."""
        context = ssl.create_default_context()
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:
            names = ", ".join(str(path) for path in vars(self).values() if path is not None)
            raise ValueError(f"cannot use the TLS files {names}: {error}") from error
        return context


@dataclass(frozen=True)
class ClientSettings:
    """How a client talks to its server."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    image_encoding: ImageEncoding = ImageEncoding.RAW
    jpeg_quality: int = JPEG_QUALITY
    # Where it is None, clients take DEFT_API_KEY, if it is set; "" is none at all.
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    # The environment's proxy variables are not looked at. A WebSocket to a plain http server needs
    # a proxy that lets `Upgrade` pass; to an https server it is tunnelled.
    proxy: str | None = None
    limits: WireLimits = DEFAULT_LIMITS
    action_rules: ActionRules | None = None  # answers that break them are refused

    def __post_init__(self) -> None:
        if not 1 <= self.jpeg_quality <= 100:
            raise ValueError(f"jpeg_quality must be 1 to 100, got {self.jpeg_quality}")
