"""Everything `deft serve` speaks besides its own protocol."""

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute

from deft_client.types import ServerInfo
from deft_server import recording_routes
from deft_server.app import Protocol
from deft_server.compat import act_route, config_route, socket_route
from deft_server.compat.profiles import ACT_PROFILES, OPENPI, VLA_EVAL
from deft_server.dashboard import pages
from deft_server.service import Service


def peer_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the peers' protocols, and have /v1/info tell their conventions."""
    profile = service.settings.profile

    def describe(info: ServerInfo) -> Mapping[str, str]:
        shown = (ACT_PROFILES[profile], OPENPI, VLA_EVAL)
        return {one.name: one.sentence(info.image_chain) for one in shown}

    service.describers.append(describe)
    return [
        *act_route.build_routes(service, profile),
        *socket_route.build_routes(service),
        *config_route.build_routes(service),
    ]


def page_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the dashboard, unless it is switched off."""
    return pages.build_routes(service) if service.settings.dashboard else []


STANDARD_PROTOCOLS: Sequence[Protocol] = (peer_routes, recording_routes.build_routes, page_routes)
