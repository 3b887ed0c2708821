"""The HTTP server: OpenAI's chat and text completions over one loaded model, on loopback by default.

`create_app` gives the ASGI application (starlette), `serve` runs it with uvicorn. One file per group of endpoints
(`chat`, `completions`, `catalogue`); `json_body`, `fields` and `parameters` read a body strictly, `guard` checks host,
origin and key, `running` ties a request to its client, `failures` turns exceptions into OpenAI's error bodies.
docs/server.md documents every field.
"""

from __future__ import annotations

from kinetic_core.server.app import create_app
from kinetic_core.server.serving import Server, serve
from kinetic_core.server.settings import ServerSettings

__all__ = ["Server", "ServerSettings", "create_app", "serve"]
