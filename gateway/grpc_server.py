"""The gRPC port: GenerateService, health that follows readiness, reflection."""

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig
from paceline.gateway.generate_service import GenerateService
from paceline.gateway.http_limits import CUT_S
from paceline.gateway.serving import Serving
from paceline.rpc.channel import make_server
from paceline.rpc.edge import Edge
from paceline.rpc.open_calls import OpenCalls
from paceline.v1 import generate_pb2
from paceline.v1.generate_pb2_grpc import add_GenerateServiceServicer_to_server

LAST_FRAMES_S = 0.5  # to leave, and for calls that are just beginning
_SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name


class GrpcServer:
    """Start, follow readiness, stop. Raises ConfigError naming a port that is taken: when it is
    made, or started if it shares the port, because connections wait for it from then on."""

    def __init__(self, serving: Serving, config: GatewayConfig) -> None:
        self._config = config
        service = GenerateService(serving)
        calls = OpenCalls(config.clients.read_timeout_s)
        self._edge = Edge(None, calls, known=service.known, gate=service.admitted)
        self._server = make_server(
            self._edge, config.clients.max_body_bytes, shares_port=config.shares_ports
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        add_GenerateServiceServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = config.grpc_port if config.shares_ports else self._bind()

    async def start(self) -> None:
        """Once its readiness has been set."""
        if self._config.shares_ports:
            self._bind()
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_ready else status.NOT_SERVING
        for name in ("", _SERVICE):
            await self._health.set(name, value)

    async def stop(self) -> None:
        """Ends calls that only wait, lets those that run end within the drain timeout, then cuts
        all connections: one whose client never reacts would last as long as gRPC is given."""
        await self._edge.stop(self._config.drain_timeout_s + CUT_S)
        await self._server.stop(LAST_FRAMES_S)

    def _bind(self) -> int:
        host, port = self._config.host, self._config.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            reason = f"cannot listen on {host}: is it taken?"
            raise ConfigError("grpc_port", port, reason) from error
