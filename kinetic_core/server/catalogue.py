"""GET /v1/models, /v1/models/{model} and /health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kinetic_core.server.failures import ApiError, json_response

if TYPE_CHECKING:
    from kinetic_core.server.served import ServedModel


class Catalogue:
    """What is served, and whether it can be."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        return json_response({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        """The model by its name, which may hold slashes."""
        name = request.path_params["model"]
        if name != self._model.name:
            return ApiError(
                404,
                f"no such model: got {name[:200]!r}, expected {self._model.name!r}",
                code="model_not_found",
                param="model",
            ).response()
        return json_response(self._entry())

    async def health(self, request: Request) -> Response:
        """Status 200 while requests can be answered, 503 when the engine has stopped."""
        if self._model.failure is not None:
            return json_response({"status": "failed"}, 503)
        return json_response({"status": "ok"})

    def _entry(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "kinetic",
            "context_length": model.context_tokens,
            "vocab_size": model.vocab_size,
        }
