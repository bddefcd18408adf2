"""Editors find their way: a language server is asked over LSP, as VS Code asks, with pyproject.toml alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (
    "from zerofit.train.loop import Loop\nfrom zerofit.models.build import build\nimport zerofit\n\nbuild.\nzerofit.\n"
)


class LanguageServer:
    """pyright's language server on the project, in which one unsaved file is open."""

    def __init__(self, root: Path, text: str):
        command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._number = 0
        self._file = (root / "toolkit" / "zerofit" / "unsaved.py").as_uri()
        folder = {"uri": root.as_uri(), "name": root.name}
        capabilities = {"workspace": {"configuration": True, "workspaceFolders": True}}
        where = {"rootUri": folder["uri"], "workspaceFolders": [folder]}
        self.ask("initialize", processId=None, capabilities=capabilities, **where)
        self._send({"method": "initialized", "params": {}})
        document = {"uri": self._file, "languageId": "python", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def ask(self, method: str, **params):
        """The result of a request; what the server asks meanwhile is answered with nothing."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                items = message["params"].get("items", []) if message["params"] else []
                self._send({"id": message["id"], "result": [{} for _ in items] or None})
            elif message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def at(self, feature: str, line: int, character: int):
        position = {"line": line, "character": character}
        return self.ask(f"textDocument/{feature}", textDocument={"uri": self._file}, position=position)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _receive(self) -> dict:
        length = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name == b"Content-Length" else length
        assert length, "the language server has ended"
        return json.loads(self._process.stdout.read(length))


@pytest.fixture(scope="module")
def server():
    server = LanguageServer(ROOT, TEXT)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("line", "name", "file"),
    [
        (0, "loop", "toolkit/zerofit/train/loop.py"),
        (0, "Loop", "toolkit/zerofit/train/loop.py"),
        (1, "build import", "models/build.py"),
        (1, "build\n", "models/build.py"),
    ],
)
def test_a_definition_is_found(server, line, name, file):
    found = server.at("definition", line, TEXT.splitlines(keepends=True)[line].index(name))
    assert [Path(url2pathname(urlparse(place["uri"]).path)).resolve() for place in found] == [ROOT / file]


@pytest.mark.parametrize(("line", "name"), [(4, "__name__"), (5, "Run"), (5, "check")])
def test_a_completion_is_offered(server, line, name):
    offered = server.at("completion", line, len(TEXT.splitlines()[line]))
    assert name in {item["label"] for item in offered["items"]}
