"""What stands before several fronts sends a client's frames to one of them."""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

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
    path: Literal["/"]
    pathType: Literal["Prefix"]
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


def test_the_ingress_pins_sessions_and_finds_the_fronts() -> None:
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
