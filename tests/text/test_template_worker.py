from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kinetic_core.errors import TemplateError
from kinetic_core.text import ChatTemplate, template_process
from kinetic_core.text.template_process import TemplateWorker

HI = [{"role": "user", "content": "Hi"}]
FOR_EVER = (
    "{% for a in range(3000) %}{% for b in range(3000) %}{% for c in range(3000) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker()
    yield worker
    worker.close()


def process_of(worker: TemplateWorker) -> subprocess.Popen[bytes]:
    assert worker.process is not None
    return worker.process


def test_g12_an_endless_template_is_stopped_in_time(worker: TemplateWorker) -> None:
    works = ChatTemplate("{{ messages[0].content }}", worker=worker)
    works.render(HI)
    first = process_of(worker)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"took too long.*at most 0\.5 s"):
        ChatTemplate(FOR_EVER, worker=worker, seconds=0.5).render(HI)
    assert time.monotonic() - start < 3
    assert first.poll() == (-signal.SIGKILL if os.name == "posix" else 1)  # by us, not by its own bound
    assert works.render(HI) == "Hi"
    assert process_of(worker).pid != first.pid


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a bound on address space")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' | center(2000000000) }}",
        "{{ '{:>2000000000}'.format('a') }}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ ('a' * 8000000).replace('a', 'bbbbbbbb' * 100) }}",
    ],
)
def test_memory_is_bounded(worker: TemplateWorker, source: str) -> None:
    with pytest.raises(TemplateError, match="exceeds its bounds"):
        ChatTemplate(source, worker=worker).render(HI)
    assert ChatTemplate("x{{ messages[0].content }}", worker=worker).render(HI) == "xHi"


def test_one_process_serves_many_requests(worker: TemplateWorker) -> None:
    worker.start()
    pid = process_of(worker).pid
    for number in range(20):
        assert ChatTemplate(f"{number}{{{{ messages[0].content }}}}", worker=worker).render(HI) == f"{number}Hi"
    assert process_of(worker).pid == pid


def test_the_bound_on_time_ends_with_the_request(worker: TemplateWorker) -> None:
    template = ChatTemplate("{{ messages[0].content }}", worker=worker, seconds=0.3)
    worker.start()
    ChatTemplate("started", worker=worker).render(HI)
    pid = process_of(worker).pid
    assert template.render(HI) == "Hi"
    time.sleep(2)  # the worker's own bound is one second longer
    assert process_of(worker).poll() is None
    assert template.render(HI) == "Hi" and process_of(worker).pid == pid


def test_an_answer_that_comes_with_the_kill() -> None:
    class Late(TemplateWorker):
        def _exchange(self, process: subprocess.Popen[bytes], data: bytes, seconds: float) -> dict[str, Any] | None:
            answer = super()._exchange(process, data, seconds)
            if data:
                process.kill()
                self._timed_out = True
            return answer

    worker = Late()
    template = ChatTemplate("{{ messages[0].content }}", worker=worker)
    assert template.render(HI) == "Hi"
    assert worker.process is None
    assert template.render(HI) == "Hi"
    worker.close()


def test_threads_share_the_process(worker: TemplateWorker) -> None:
    template = ChatTemplate("{{ messages[0].content }}", worker=worker)
    with ThreadPoolExecutor(8) as pool:
        texts = [str(number) * 1000 for number in range(40)]
        rendered = pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts)
        assert list(rendered) == texts


def test_a_process_that_died_is_replaced(worker: TemplateWorker) -> None:
    template = ChatTemplate("{{ messages[0].content }}", worker=worker)
    template.render(HI)
    process = process_of(worker)
    process.kill()
    process.wait()
    assert template.render(HI) == "Hi"
    # Killed in the middle of a request: that one fails, the next does not.
    endless = ChatTemplate(FOR_EVER, worker=worker, seconds=60)
    threading.Timer(0.3, process_of(worker).kill).start()
    with pytest.raises(TemplateError, match="ended its process"):
        endless.render(HI)
    assert template.render(HI) == "Hi"


def test_a_process_that_cannot_start(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = ChatTemplate("x", worker=worker)
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(template_process, "_WORKER", broken)
    with pytest.raises(TemplateError, match="did not start"):
        template.render(HI)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(TemplateError, match="cannot be started"):
        template.render(HI)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_interrupts_are_for_the_program(worker: TemplateWorker) -> None:
    template = ChatTemplate("{{ messages[0].content }}", worker=worker)
    template.render(HI)
    pid = process_of(worker).pid
    os.kill(pid, signal.SIGINT)
    assert template.render(HI) == "Hi"
    assert process_of(worker).pid == pid


def test_the_process_ends_with_its_parent(worker: TemplateWorker) -> None:
    worker.start()
    process = process_of(worker)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_a_parentless_endless_template_ends_itself() -> None:
    code = (
        "import os, threading\n"
        "from kinetic_core.text import ChatTemplate\n"
        "from kinetic_core.text.template_process import TemplateWorker\n"
        "worker = TemplateWorker()\n"
        "ChatTemplate('{{ messages[0].content }}', worker=worker).render([{'role': 'user', 'content': ''}])\n"
        "print(worker.process.pid, flush=True)\n"
        "threading.Timer(0.3, os._exit, (0,)).start()\n"
        f"ChatTemplate({FOR_EVER!r}, worker=worker, seconds=1).render([{{'role': 'user', 'content': ''}}])\n"
    )
    # The worker inherits the pipe to this test: the end of its file means that both processes are gone.
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.strip().isdigit()
    pid = int(done.stdout)
    while time.monotonic() - started < 30:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its bound")


def test_the_worker_imports_little() -> None:
    code = (
        "import sys\n"
        "import kinetic_core.text.template_worker\n"
        "print(sorted({'numba', 'numpy', 'tokenizers', 'attrs'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
