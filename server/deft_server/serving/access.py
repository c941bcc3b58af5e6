"""Who is calling, and may they: request ids, API keys from a file, rates, origins of web pages.

The file is TOML, one table per caller, and is read again when it changes:

    [arm-1]
    sha256 = "9f86d0..."   # of the key; or `key = "..."` in the clear
    rate_per_s = 60        # frames per second; optional
    burst = 120            # how many may come at once; optional
    admin = false          # may use /v1/admin; optional
    revoked = false        # with true nobody is let in by it, and no key is needed; optional
"""

import hashlib
import hmac
import logging
import os
import re
import time
import tomllib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

from deft_core.files import read_file
from deft_server.errors import ForbiddenError, MissingKeyError, OverloadedError, WrongHostError

RECHECK_S = 1.0
MAX_BUCKETS = 4096
_SCHEMES = ("bearer", "api-key")

logger = logging.getLogger(__name__)


REQUEST_ID_HEADER = b"x-request-id"
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

# The id of the request that is being answered; on its answer and in every log line about it.
current_request_id: ContextVar[str] = ContextVar("deft_request_id", default="")


def request_id_from(header: bytes | None) -> str:
    """Return the caller's id if it is harmless to repeat, else a fresh one."""
    if header is not None and _ACCEPTABLE.fullmatch(header):
        return header.decode("ascii")
    return os.urandom(8).hex()


@dataclass(frozen=True)
class Caller:
    """Who sends a request: the name of an API key, or `anonymous` where none are asked for."""

    name: str = "anonymous"
    is_admin: bool = False
    address: str = ""
    rate_per_s: float | None = None
    burst: float | None = None
    overfills_s: float = 0.0  # how long its frames wait where others are told to try again
    fingerprint: str = ""  # of the key, so that a key taken out of the file stops working at once

    @property
    def owner(self) -> str:
        """Who shares are counted for: a key, or an address where there are none."""
        return self.name if self.fingerprint else f"{self.name}@{self.address}"


class KeyFileError(Exception):
    """The file of API keys cannot be used; the message says why."""


def read_keys(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """Return the SHA-256 of every key in a file and its caller, or raise `KeyFileError`."""
    try:
        table = tomllib.loads(read_file(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KeyFileError(f"cannot use the key file {path}: {error}") from error
    if not table:  # it may be about to be written
        raise KeyFileError(
            f"cannot use the key file {path}: it holds no key; to take the last one away, write "
            "`revoked = true` in its table"
        )
    entries = [_entry(name, row, path) for name, row in table.items()]
    return tuple(one for one in entries if one is not None)


def _entry(name: str, row: object, path: Path) -> tuple[bytes, Caller] | None:
    """Return the digest and the caller of a table, or None if its key is revoked."""
    if not isinstance(row, dict):
        raise KeyFileError(f"{path}: [{name}] must be a table")
    unknown = set(row) - {"key", "sha256", "rate_per_s", "burst", "admin", "revoked"}
    if unknown:
        raise KeyFileError(f"{path}: [{name}] has an unknown entry {sorted(unknown)[0]!r}")
    is_admin = _flag(row, "admin", name, path)
    if _flag(row, "revoked", name, path):
        return None
    digest = _digest(row, name, path)
    caller = Caller(
        name,
        is_admin=is_admin,
        fingerprint=hashlib.sha256(digest).hexdigest()[:16],
        rate_per_s=_number(row, "rate_per_s", name, path),
        burst=_number(row, "burst", name, path),
    )
    return digest, caller


def _flag(row: Mapping[str, object], entry: str, name: str, path: Path) -> bool:
    value = row.get(entry, False)
    if not isinstance(value, bool):
        raise KeyFileError(f"{path}: [{name}] {entry} must be true or false, got {value!r}")
    return value


def _number(row: Mapping[str, object], entry: str, name: str, path: Path) -> float | None:
    value = row.get(entry)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise KeyFileError(f"{path}: [{name}] {entry} must be a number above 0, got {value!r}")
    return float(value)


def _digest(row: Mapping[str, object], name: str, path: Path) -> bytes:
    key, sha256 = row.get("key"), row.get("sha256")
    if isinstance(key, str) and sha256 is None and len(key) >= 16:
        return hashlib.sha256(key.encode()).digest()
    if isinstance(sha256, str) and key is None and len(sha256) == 64:
        try:
            return bytes.fromhex(sha256)
        except ValueError:
            pass
    raise KeyFileError(
        f"{path}: [{name}] needs either key (16 characters or more) or sha256 (64 hex digits)"
    )


class TokenBucket:
    """Allows `rate_per_s` on average, and `burst` at once. Tokens may be taken ahead of time."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._filled_s: float | None = None

    def take(self, now_s: float, most_wait_s: float = 0.0) -> float:
        """Return the seconds until there is a token, which is taken if that is not too long."""
        if self._filled_s is not None:
            gained = max(0.0, now_s - self._filled_s) * self._rate_per_s
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_s = now_s
        wait_s = max(0.0, (1 - self._tokens) / self._rate_per_s)
        if wait_s <= most_wait_s:
            self._tokens -= 1
        return wait_s


class Access:
    """Finds out who calls and how often they may. Without a key file everybody is anonymous."""

    def __init__(
        self,
        keys_file: Path | None = None,
        default_rate_per_s: float | None = None,
        origins: tuple[str, ...] = (),
        hosts: tuple[str, ...] = (),
    ) -> None:
        self._path = keys_file
        self._default_rate_per_s = default_rate_per_s
        self._origins = frozenset(origins)
        self._hosts = ("localhost", "*.localhost", *(one.lower() for one in hosts))
        self._buckets: OrderedDict[tuple[str, float], TokenBucket] = OrderedDict()
        self._entries: tuple[tuple[bytes, Caller], ...] = ()
        self._checked_s = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._problem = ""  # why the key file cannot be used, while it cannot
        if keys_file is not None:
            self._entries = read_keys(keys_file)

    @property
    def needs_key(self) -> bool:
        """Are API keys asked for?"""
        return self._path is not None

    def has_usable_keys(self) -> bool:
        """Whether the keys in use are those of the file; true where no keys are asked for."""
        if self._path is not None:
            self._reload_if_changed(self._path)
        return not self._problem

    def identify(self, authorization: str, address: str) -> Caller:
        """Return who an `Authorization` header belongs to, or raise `MissingKeyError`."""
        if self._path is None:
            return Caller(address=address)
        self._reload_if_changed(self._path)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() not in _SCHEMES or not key:
            raise MissingKeyError("send your API key as `Authorization: Bearer KEY`")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        match = None
        for known, caller in self._entries:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(known, digest):
                match = caller
        if match is None:
            raise MissingKeyError("this API key is not known here")
        return replace(match, address=address)

    def require_admin(self, caller: Caller) -> None:
        """Raise `ForbiddenError` unless the caller's key is an administrator's."""
        if not caller.is_admin:
            raise ForbiddenError(
                "needs a key marked `admin = true` in the server's key file; without a key file it "
                "works on the server's own machine alone, where --host is a loopback address"
            )

    def admit_frame(self, caller: Caller, now_s: float) -> float:
        """Count one frame of a caller, and return the seconds it must wait for its turn.

        Raises `OverloadedError` if that is longer than the caller's frames stay, and
        `MissingKeyError` if the caller's key was taken out of the file since it connected.
        """
        if self._path is not None:
            caller = replace(self.require_known(caller), overfills_s=caller.overfills_s)
        rate_per_s = caller.rate_per_s or self._default_rate_per_s
        if rate_per_s is None:
            return 0.0
        owner = (caller.owner, rate_per_s)
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = TokenBucket(rate_per_s, caller.burst or rate_per_s)
            self._buckets[owner] = bucket
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(owner)
        wait_s = bucket.take(now_s, caller.overfills_s)
        if wait_s > caller.overfills_s:
            raise OverloadedError(
                f"{caller.name} may send {rate_per_s:g} frames per second", wait_s
            )
        return wait_s

    def require_known(self, caller: Caller) -> Caller:
        """Return a caller as the key file has it now, or raise `MissingKeyError`."""
        if self._path is None:
            return caller
        self._reload_if_changed(self._path)
        for _, known in self._entries:
            if (known.name, known.fingerprint) == (caller.name, caller.fingerprint):
                return known  # with the rates that the file gives now
        raise MissingKeyError("this API key is not known here any more")

    def check_host(self, hosts: Sequence[str]) -> None:
        """Raise `WrongHostError` for a name that we do not answer to.

        A web page can have its own name lead to our address, and would then be one of ours; so
        only names count that nobody else can give: this machine's own, and those of the settings.
        """
        if len(hosts) != 1:
            raise WrongHostError(f"send one Host header; got {len(hosts)}")
        name = _name_of(hosts[0])
        if not (_is_address(name) or any(fnmatchcase(name, one) for one in self._hosts)):
            raise WrongHostError(
                f"this server does not answer to {name[:100]!r}; use its address, or list the "
                "name in its setting allowed_hosts"
            )

    def check_origin(self, origin: str, host: str) -> None:
        """Raise `ForbiddenError` for a web page of another site; robots send no origin."""
        if origin and origin not in self._origins and origin.partition("://")[2] != host:
            raise ForbiddenError(f"web pages of {origin[:200]} may not call; see cors_origins")

    def _reload_if_changed(self, path: Path) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s < RECHECK_S:
            return
        self._checked_s = now_s
        try:
            stamp = _stamp(path)
            if stamp == self._stamp and not self._problem:
                return
            self._stamp = stamp
            self._entries = read_keys(path)
        except (OSError, KeyFileError) as error:
            if str(error) != self._problem:
                logger.error("the old API keys stay in use: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        logger.info("%d API keys read from %s", len(self._entries), path)


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


@lru_cache(maxsize=64)  # a robot says the same with every request
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes whenever a file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
