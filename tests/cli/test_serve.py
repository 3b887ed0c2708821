"""`kinetic serve` in a process of its own, ended as a person ends it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any


def test_it_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "kinetic_core", "serve", "tiny-hybrid", "--backend", "reference", "--port", "0"]
    with subprocess.Popen([*command, "--name", "tiny", "--api-key", "k"], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = ""
            for line in server.stderr:
                found = re.search(r"served at (http://127\.0\.0\.1:\d+)", line)
                if found:
                    url = found[1]
                    break
            with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                assert answer.status == 200
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=30)
                raise AssertionError("the key was not asked for")
            except urllib.error.HTTPError as error:
                assert error.code == 401
            request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": "Bearer k"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert json.load(answer)["data"][0]["id"] == "tiny"
            server.send_signal(signal.SIGINT)
            server.stderr.read()
            assert server.wait(30) in (0, 130)
        finally:
            server.kill()


def test_an_address_in_use_is_one_line(kinetic: Any) -> None:
    ended = kinetic("serve", "tiny-hybrid", "--backend", "reference", "--host", "203.0.113.1")
    assert ended.status == 7 and ended.err.startswith("error: ") and ended.err.count("\n") == 1


def test_a_key_that_cannot_be_sent_is_refused_before_the_model_is_loaded(kinetic: Any) -> None:
    ended = kinetic("serve", "no-such-model.gguf", "--api-key", " k")
    assert ended.status == 7 and "API key" in ended.err
