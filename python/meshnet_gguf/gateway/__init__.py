"""The gateway: OpenAI's HTTP API over routes of shard workers.

source = KeptRouteSource(["127.0.0.1:7001", "127.0.0.1:7002"])
async with TemplateRenderer() as renderer:
    serving = Serving([ServedModel("smollm2", source)], Admission(max_active=8), renderer)
    with Listener("127.0.0.1:8080") as listener:
        async with GatewayServer(make_app(serving), listener) as server:
            await server.wait()
"""

from meshnet_gguf.gateway._failures import http_statuses
from meshnet_gguf.gateway._serving import Serving
from meshnet_gguf.gateway.admission import Admission, KeyLimits, follow_capacity
from meshnet_gguf.gateway.api_keys import ApiKey, ApiKeys
from meshnet_gguf.gateway.app import GatewayOptions, make_app
from meshnet_gguf.gateway.host_check import AllowedHosts
from meshnet_gguf.gateway.kept_sessions import KeptSessions
from meshnet_gguf.gateway.routes import (
    KeptRouteSource,
    ServedModel,
    TrackedModelSource,
    WatchedRouteSource,
)
from meshnet_gguf.gateway.server import GatewayServer, Listener
from meshnet_gguf.gateway.template_process import TemplateRenderer

__all__ = [
    "Admission",
    "AllowedHosts",
    "ApiKey",
    "ApiKeys",
    "GatewayOptions",
    "GatewayServer",
    "KeptRouteSource",
    "KeptSessions",
    "KeyLimits",
    "Listener",
    "ServedModel",
    "Serving",
    "TemplateRenderer",
    "TrackedModelSource",
    "WatchedRouteSource",
    "follow_capacity",
    "http_statuses",
    "make_app",
]
