"""What stands before several fronts sends a client's frames to one of them."""

import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from deft_server.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = DEPLOY / "nginx/deft.conf"
PINNED_BY = "$http_authorization$remote_addr"
Directives = list[list[object]]  # words, of which the last may be a block

# Those that our file uses, and what they may say; any other directive is an error.
KNOWN = {
    "upstream": {"hash": rf"{re.escape(PINNED_BY)} consistent", "keepalive": r"\d+",
                 "server": r"[\w.-]+:\d+( max_fails=\d+)?( fail_timeout=\d+s)?"},
    "map": {"default": "upgrade", "": ""},
    "server": {"listen": r"\d+", "client_max_body_size": r"\d+m", "location": "/"},
    "location": {"proxy_pass": "http://deft", "proxy_http_version": r"1\.1",
                 "proxy_request_buffering": "off", "proxy_buffering": "off",
                 "proxy_read_timeout": r"\d+h", "proxy_set_header": r"[\w-]+ \$\w+"},
}  # fmt: skip


def parsed(words: list[str]) -> Directives:
    """Read directives up to the end of their block."""
    found: Directives = []
    directive: list[object] = []
    while words:
        word = words.pop(0)
        if word == "}":
            break
        if word == "{":
            directive.append(parsed(words))
        elif word != ";":
            directive.append(word.strip('"'))
            continue
        found.append(directive)
        directive = []
    assert not directive, f"unfinished: {directive}"
    return found


@pytest.fixture
def nginx() -> Directives:
    text = re.sub(r"#.*", "", NGINX.read_text())
    return parsed(re.findall(r'"[^"]*"|[{};]|[^\s{};]+', text))


def block(directives: Directives, *head: str) -> Directives:
    (found,) = [one[-1] for one in directives if one[:-1] == list(head)]
    assert isinstance(found, list)
    return found


def check(name: str, directives: Directives) -> None:
    for word, *rest in directives:
        said = " ".join(str(one) for one in rest if not isinstance(one, list))
        assert re.fullmatch(KNOWN[name][str(word)], said), (name, word, said)
        if isinstance(rest[-1], list):
            check(str(word), rest[-1])


def test_nginx_is_told_nothing_but_what_we_know(nginx: Directives) -> None:
    assert [one[0] for one in nginx] == ["upstream", "map", "server"]
    for name, *_, directives in nginx:
        assert isinstance(directives, list)
        check(str(name), directives)


def test_a_client_is_pinned_by_key_and_address_and_the_stream_gets_through(
    nginx: Directives,
) -> None:
    upstream = block(nginx, "upstream", "deft")
    assert ["hash", PINNED_BY, "consistent"] in upstream
    assert sum(one[0] == "server" for one in upstream) == 2
    location = block(block(nginx, "server"), "location", "/")
    headers = {one[1]: one[2] for one in location if one[0] == "proxy_set_header"}
    assert headers["Upgrade"] == "$http_upgrade"
    assert headers["Connection"] == "$connection_upgrade"
    assert headers["X-Forwarded-For"] == "$remote_addr"


def test_what_a_front_takes_gets_through(nginx: Directives) -> None:
    (limit,) = [one[1] for one in block(nginx, "server") if one[0] == "client_max_body_size"]
    assert int(str(limit).rstrip("m")) * 1024 * 1024 >= Settings().max_body_bytes


@pytest.mark.skipif(which("nginx") is None, reason="needs nginx")
def test_nginx_takes_the_file(tmp_path: Path) -> None:
    text = NGINX.read_text().replace("front-1", "127.0.0.1").replace("front-2", "127.0.0.2")
    (tmp_path / "nginx.conf").write_text(f"events {{}}\nhttp {{\n{text}\n}}\n")
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", "nginx.conf", "-e", "stderr"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "syntax is ok" in run.stderr


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Port(Part):
    name: str


class Backend(Part):
    name: str
    port: Port


class HttpPath(Part):
    path: Literal["/"]
    pathType: Literal["Prefix"]  # noqa: N815
    backend: dict[Literal["service"], Backend]


class Host(Part):
    host: str
    http: dict[Literal["paths"], list[HttpPath]]


class IngressSpec(Part):
    ingressClassName: Literal["nginx"]  # noqa: N815
    rules: list[Host]


Annotation = Annotated[str, Field(pattern=r"^nginx\.ingress\.kubernetes\.io/[a-z-]+$")]


class IngressMetadata(Part):
    name: str
    annotations: dict[Annotation, str]


class Ingress(Part):
    apiVersion: Literal["networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["Ingress"]
    metadata: IngressMetadata
    spec: IngressSpec


def test_the_ingress_pins_as_nginx_does_and_finds_the_service_of_the_fronts() -> None:
    ingress = Ingress.model_validate(
        yaml.safe_load((DEPLOY / "kubernetes/ingress.yaml").read_text())
    )
    named = {name.partition("/")[2]: value for name, value in ingress.metadata.annotations.items()}
    assert named["upstream-hash-by"] == PINNED_BY
    assert int(named["proxy-body-size"].rstrip("m")) * 1024 * 1024 >= Settings().max_body_bytes
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/front.yaml").read_text())
    (service,) = [one for one in documents if one["kind"] == "Service"]
    backend = ingress.spec.rules[0].http["paths"][0].backend["service"]
    assert backend.name == service["metadata"]["name"]
    assert backend.port.name in {port["name"] for port in service["spec"]["ports"]}
