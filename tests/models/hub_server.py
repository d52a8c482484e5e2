"""A server on loopback that answers as the Hugging Face Hub does, as far as huggingface_hub reads it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BERT = b'{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}'


@dataclass
class Repository:
    """What the server has of one."""

    files: dict[str, bytes] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    refused: tuple[int, str] | None = None  # status and X-Error-Code, in place of all answers
    needs_token: str = ""
    seconds: float = 0.0  # before an answer
    size: int | None = None  # that is claimed of files
    is_hub: bool = True  # whether answers have the Hub's headers


@dataclass
class Hub:
    """A running server.

    Attributes:
        url: for HF_ENDPOINT.
        repositories: by their id.
        asked: method, path and token of each request.
    """

    url: str
    home: Path
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to use it, with a home of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1"}

    def run(self, code: str, *words: str, **environment: str) -> tuple[str, str, float]:
        """Run Python code; returns what it printed on stdout and stderr, and how long it took in seconds."""
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            check=False,
            timeout=60,
        )
        return done.stdout.strip(), done.stderr, time.monotonic() - start


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Hub]:
    """A server, until the end of the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            token = self.headers.get("authorization", "").removeprefix("Bearer ")
            hub.asked.append((self.command, self.path, token))
            name, _, rest = self.path.removeprefix("/api/models").strip("/").partition("/resolve/")
            name = name.partition("/revision/")[0]
            revision, _, file = rest.partition("/")
            repository = hub.repositories.get(name)
            if repository is None:
                return self.send(404 if token else 401, "RepoNotFound")
            time.sleep(repository.seconds)
            if repository.refused is not None:
                return self.send(*repository.refused)
            if repository.needs_token and token != repository.needs_token:
                return self.send(403 if token else 401, "GatedRepo")
            if self.path.startswith("/api/"):
                siblings = [{"rfilename": each} for each in repository.files]
                about = {"id": name, "siblings": siblings, "cardData": repository.card}
                return self.send(200, body=json.dumps(about).encode())
            if revision not in ("main", "v2", COMMIT):
                return self.send(404, "RevisionNotFound")
            if file not in repository.files:
                return self.send(404, "EntryNotFound", commit=True)
            return self.send(200, body=repository.files[file], commit=repository.is_hub, size=repository.size)

        do_GET = do_HEAD = answer

        def send(
            self, status: int, error: str = "", body: bytes = b"", commit: bool = False, size: int | None = None
        ) -> None:
            self.send_response(status)
            if error:
                self.send_header("X-Error-Code", error)
            if commit:
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body) if size is None else size))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", home)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
