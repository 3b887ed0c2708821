"""A local HTTP server with Range, that can cut connections."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Serves `files` (path -> content). `cuts`: for each coming answer, how many bytes to send before hanging up."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.types: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.cuts: list[int] = []
        self.status: int | None = None
        self.status_headers: dict[str, str] = {}
        self.ranges = True
        self.requests: list[tuple[str, str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(False)

            def do_GET(self) -> None:
                self._answer(True)

            def _answer(self, body: bool) -> None:
                wanted = self.headers.get("Range")
                path = self.path.split("?")[0]
                outer.requests.append((self.command, path, wanted))
                content = outer.files.get(path)
                if outer.status is not None or content is None:
                    self.send_response(outer.status or 404)
                    for key, value in outer.status_headers.items():
                        self.send_header(key, value)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and outer.ranges else None
                if start is not None and start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(200 if start is None else 206)
                for key, value in outer.headers.get(path, {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Type", outer.types.get(path, "application/octet-stream"))
                if start is not None:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                rest = content[start or 0 :]
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                if body:
                    cut = outer.cuts.pop(0) if outer.cuts else len(rest)
                    self.wfile.write(rest[:cut])
                    if cut < len(rest):
                        self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
