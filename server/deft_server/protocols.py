"""Everything `deft serve` speaks besides its own protocol."""

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute

from deft_client.image_chain import ImageChain
from deft_client.types import ServerInfo
from deft_server import recording_routes
from deft_server.app import Protocol
from deft_server.compat import act_route, config_route, socket_route
from deft_server.compat.groot_socket import GrootSocket
from deft_server.compat.profiles import ACT_PROFILES, GROOT, OPENPI, VLA_EVAL
from deft_server.dashboard import pages
from deft_server.service import Service


def peer_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the peers' protocols, and have /v1/info tell their conventions."""
    settings = service.settings
    chains = {
        ACT_PROFILES[settings.profile]: settings.act_image_chain,
        OPENPI: settings.socket_image_chain,
        VLA_EVAL: settings.socket_image_chain,
    }

    def describe(info: ServerInfo) -> Mapping[str, str]:
        return {
            profile.name: profile.sentence(chain, info.image_chain)
            for profile, chain in chains.items()
        }

    service.describers.append(describe)
    return [
        *act_route.build_routes(service),
        *socket_route.build_routes(service),
        *config_route.build_routes(service),
    ]


def groot_socket(service: Service) -> Sequence[BaseRoute]:
    """Have GR00T's clients answered on their own port, if there is one; there are no routes."""
    settings = service.settings
    if settings.groot_port is not None:
        socket = GrootSocket(service, settings.host, settings.groot_port)
        service.on_start.append(socket.start)
        service.on_close.append(socket.stop)
        service.describers.append(
            lambda info: {GROOT.name: GROOT.sentence(ImageChain.NONE, info.image_chain)}
        )
    return []


def page_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the dashboard, unless it is switched off."""
    return pages.build_routes(service) if service.settings.dashboard else []


STANDARD_PROTOCOLS: Sequence[Protocol] = (
    peer_routes,
    groot_socket,
    recording_routes.build_routes,
    page_routes,
)
