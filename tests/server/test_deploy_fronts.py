"""What stands before several fronts sends a client's frames to one of them."""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import WebSocketRoute

from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from deft_server.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = DEPLOY / "nginx"
PINNED_BY = "$http_authorization$remote_addr"
Directives = list[list[object]]  # words, of which the last may be a block


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


def nginx(file: str) -> Directives:
    text = re.sub(r"#.*", "", (NGINX / file).read_text())
    return parsed(re.findall(r'"[^"]*"|[{};]|[^\s{};]+', text))


def block(directives: Directives, *head: str) -> Directives:
    (found,) = [one[-1] for one in directives if one[:-1] == list(head)]
    assert isinstance(found, list)
    return found


def test_a_client_is_pinned_by_key_and_address() -> None:
    upstream = block(nginx("upstream.conf"), "upstream", "deft")
    assert ["hash", PINNED_BY, "consistent"] in upstream
    assert sum(one[0] == "server" for one in upstream) == 2


def test_what_a_front_takes_gets_through() -> None:
    (limit,) = [one[1] for one in block(nginx("deft.conf"), "server")
                if one[0] == "client_max_body_size"]  # fmt: skip
    assert int(str(limit).rstrip("m")) * 1024 * 1024 >= Settings().max_body_bytes


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Port(Part):
    name: str


class Backend(Part):
    name: str
    port: Port


class HttpPath(Part):
    path: Annotated[str, Field(pattern=r"^/[a-z0-9/]*$")]
    pathType: Literal["Prefix", "Exact"]
    backend: dict[Literal["service"], Backend]


class Host(Part):
    host: str
    http: dict[Literal["paths"], list[HttpPath]]


class IngressSpec(Part):
    ingressClassName: Literal["nginx"]
    rules: list[Host]


Annotation = Annotated[str, Field(pattern=r"^nginx\.ingress\.kubernetes\.io/[a-z-]+$")]


class IngressMetadata(Part):
    name: str
    annotations: dict[Annotation, str]


class Ingress(Part):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["Ingress"]
    metadata: IngressMetadata
    spec: IngressSpec


def ingresses() -> list[tuple[dict[str, str], list[HttpPath]]]:
    """The annotations and the paths of each ingress."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/ingress.yaml").read_text())
    found = [Ingress.model_validate(one) for one in documents]
    assert len({one.metadata.name for one in found}) == len(found)
    assert len({one.spec.rules[0].host for one in found}) == 1
    return [
        (
            {name.partition("/")[2]: value for name, value in one.metadata.annotations.items()},
            one.spec.rules[0].http["paths"],
        )
        for one in found
    ]


def test_the_ingress_pins_sessions_and_finds_the_fronts() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/front.yaml").read_text())
    (service,) = [one for one in documents if one["kind"] == "Service"]
    (frames, _), _ = ingresses()
    assert int(frames["proxy-body-size"].rstrip("m")) * 1024 * 1024 >= Settings().max_body_bytes
    for annotations, paths in ingresses():
        assert annotations["upstream-hash-by"] == PINNED_BY
        for path in paths:
            backend = path.backend["service"]
            assert backend.name == service["metadata"]["name"]
            assert backend.port.name in {port["name"] for port in service["spec"]["ports"]}


def test_the_ingress_hands_on_offers_of_protocols_to_websockets_alone() -> None:
    """Its connections to the fronts are shared: what one made of a body moved all answers."""
    (frames, everything), (sockets, paths) = ingresses()
    assert frames["connection-proxy-header"] == "keep-alive"
    assert [(one.path, one.pathType) for one in everything] == [("/", "Prefix")]
    assert "connection-proxy-header" not in sockets
    assert {one.pathType for one in paths} == {"Exact"}
    served = [one.path for one in create_app(ConstantPolicy()).routes
              if isinstance(one, WebSocketRoute)]  # fmt: skip
    assert sorted(one.path for one in paths) == sorted(served)
