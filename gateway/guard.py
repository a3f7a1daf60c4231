"""Stands before the route table: every path needs a key but those that are named here.

Also paths that no route answers: who has no key learns nothing about what there is.
"""

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import InvalidApiKey
from paceline.gateway.errors import http_error
from paceline.gateway.serving import Serving

PUBLIC = frozenset({"/livez", "/readyz", "/metrics"})  # probes; no tenant is named in them


class Guard:
    """Puts the caller's tenant into the state of what it lets through."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                tenant = self._serving.authentication.tenant_of(given[0] if given else None)
            except InvalidApiKey as error:
                await self._refuse(error)(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)

    def _refuse(self, error: InvalidApiKey) -> Response:
        self._serving.metrics.errors.labels(error.code.value).inc()
        answer = http_error(error)
        return Response(answer.body, answer.status, answer.headers, "application/json")
