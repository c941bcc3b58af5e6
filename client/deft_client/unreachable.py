"""Why no answer arrived, as an exception that says what to do: httpcore's own say what they met."""

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpcore

from deft_client.errors import (
    AnswerTimeoutError,
    ServerUnreachableError,
    TransportError,
    WrongServerError,
)

_UNKNOWN_NAMES = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_GIVE_CA_FILE = "give --ca-file FILE, in Python ClientSettings(tls=TlsFiles(FILE))"
# OpenSSL's codes of what is wrong with a certificate.
_SELF_SIGNED, _UNKNOWN_AUTHORITY = (18, 19), (2, 20, 21)
_EXPIRED, _OTHER_NAME = 10, (62, 64)
# What is said in plain text where a handshake of TLS is expected looks like a version of TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
# What plain text to a port of TLS ends with, and much else.
_HUNG_UP = (httpcore.RemoteProtocolError, httpcore.ReadError)
# What httpcore raises where no answer arrives.
FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)


def transport_error(error: Exception, url: str) -> TransportError:
    """Return our exception for one of `FAILURES`."""
    if isinstance(error, httpcore.ReadTimeout | httpcore.WriteTimeout | httpcore.PoolTimeout):
        return AnswerTimeoutError(f"{url} took too long to answer ({type(error).__name__})")
    reason = str(error).rstrip(".") or type(error).__name__
    if remedy := _tls_remedy(error, url):
        return WrongServerError(f"cannot reach {url}: {remedy}")
    if _has_unknown_name(error):
        return WrongServerError(f"cannot reach {url}: {reason}")
    hint = "is the server running there?"
    if isinstance(error, _HUNG_UP) and url.startswith("http:"):
        hint += " If that port speaks TLS, write https://"
    return ServerUnreachableError(f"cannot reach {url}: {reason}; {hint}")


def _tls_remedy(error: BaseException, url: str) -> str:
    """What to do about a certificate, or about TLS where the other side has none; else nothing."""
    parts = urlsplit(url)
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_remedy(cause, parts.hostname or "")
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            return f"port {parts.port or 443} speaks no TLS: write http://"
    return ""


def _certificate_remedy(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in _SELF_SIGNED:
        return f"the certificate of {host} is self-signed: {_GIVE_CA_FILE}"
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return f"nobody known here vouches for the certificate of {host}: {_GIVE_CA_FILE}"
    if error.verify_code == _EXPIRED:
        return f"the certificate of {host} has expired: the server needs a new one"
    if error.verify_code in _OTHER_NAME:
        return f"the certificate is not for {host}: call the server by a name that it is for"
    return f"the certificate of {host} is not trusted: {error.verify_message}"


def _has_unknown_name(error: BaseException) -> bool:
    causes = (one for one in _causes(error) if isinstance(one, socket.gaierror))
    return next((one.errno in _UNKNOWN_NAMES for one in causes), False)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
