"""The ASGI application: routes behind the log and the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from kinetic_core.server.catalogue import Catalogue
from kinetic_core.server.chat import ChatCompletions
from kinetic_core.server.completions import Completions
from kinetic_core.server.failures import http_error
from kinetic_core.server.guard import OPEN_ROUTE, Guard
from kinetic_core.server.request_log import RequestLog
from kinetic_core.server.running import Workshop
from kinetic_core.server.served import ServedModel
from kinetic_core.server.settings import ServerSettings

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model


def create_app(model: Model, settings: ServerSettings | None = None) -> Starlette:
    """The application that serves a loaded model.

    The model stays the caller's, who closes it after the application has ended. `app.state.workshop` tells how many
    requests are in flight.
    """
    settings = settings or ServerSettings()
    served = ServedModel(model, settings.model_name)
    workshop = Workshop(settings)
    catalogue = Catalogue(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        served.start()
        try:
            yield
        finally:
            workshop.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(served, settings, workshop), methods=["POST"]),
            Route("/v1/completions", Completions(served, settings, workshop), methods=["POST"]),
            Route("/v1/models", catalogue.models, methods=["GET"]),
            Route("/v1/models/{model:path}", catalogue.model, methods=["GET"]),
            Route(OPEN_ROUTE, catalogue.health, methods=["GET"]),
        ],
        # The log first, so that it sees refusals; the guard before any route, so that an unknown one tells nothing.
        middleware=[Middleware(RequestLog), Middleware(Guard, settings=settings)],
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.workshop = workshop
    return app
