"""A stand-in for the Hugging Face Hub on this machine: what huggingface_hub asks, from a dictionary."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Hub(ThreadingHTTPServer):
    """Repositories with their commits; counts what is asked for.

    Attributes
    ----------
    repos
        Name -> commits, the last one being main: (sha, {file: content}).
    downloads
        How often each file's content was sent.
    down
        Answers 503 to everything, where it is set.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.downloads: Counter[str] = Counter()
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def leave(self) -> None:
        """Answer nothing any more."""
        from huggingface_hub.utils import _http

        self.shutdown()
        self.server_close()
        for name in ("close_session", "reset_sessions"):  # a connection that is kept would be answered still
            getattr(_http, name, lambda: None)()

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        commits = self.repos.setdefault(repo, [])
        files = {**(commits[-1][1] if commits else {}), **files}
        sha = hashlib.sha1(repr((len(commits), sorted(files.items()))).encode()).hexdigest()
        commits.append((sha, files))
        return sha

    def put(self, repo: str, folder) -> str:
        return self.commit(repo, {path.name: path.read_bytes() for path in folder.iterdir()})

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repos.get(repo, [])
        return next((c for c in reversed(commits) if revision in ("main", c[0])), None)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, status=200, body=b"", headers=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code=""):
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def find_commit(self, repo, revision):
        """The commit, or None with the refusal sent."""
        if repo not in self.server.repos or (repo in self.server.private and "Authorization" not in self.headers):
            return self.refuse(401, "RepoNotFound")
        commit = self.server.files(repo, revision)
        return commit or self.refuse(404, "RevisionNotFound")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if self.server.down:
            return self.refuse(503)
        if parts[:2] == ["api", "models"]:
            repo, kind, revision = "/".join(parts[2:4]), *([*parts[4:6], "", "main"])[:2]
            commit = self.find_commit(repo, revision or "main")
            if commit is None:
                return None
            sha, files = commit
            if kind == "tree":
                return self.answer(body=[
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ])  # fmt: skip
            return self.answer(body={
                "id": repo, "modelId": repo, "sha": sha, "private": False, "tags": [],
                "siblings": [{"rfilename": name} for name in files],
            })  # fmt: skip
        if len(parts) == 5 and parts[2] == "resolve":
            commit = self.find_commit("/".join(parts[:2]), parts[3])
            if commit is None:
                return None
            sha, files = commit
            if parts[4] not in files:
                return self.refuse(404, "EntryNotFound")
            data = files[parts[4]]
            if self.command == "GET":
                self.server.downloads[parts[4]] += 1
            return self.answer(body=data, headers={
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes",
            })  # fmt: skip
        return self.refuse(404)

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self):
        body = self.body()
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.server.down:
            return self.refuse(503)
        if parts == ["api", "validate-yaml"]:
            return self.answer(body={"errors": [], "warnings": []})
        if "Authorization" not in self.headers:
            return self.refuse(401)
        if parts == ["api", "repos", "create"]:
            request = json.loads(body)
            repo = f"{request['organization']}/{request['name']}"
            if request.get("private") or request.get("visibility") == "private":
                self.server.private.add(repo)
            self.server.repos.setdefault(repo, [])
            return self.answer(body={"url": f"{self.server.url}/{repo}", "name": repo, "id": repo})
        repo = "/".join(parts[2:4])
        if parts[4] == "preupload":
            uploads = json.loads(body)["files"]
            return self.answer(
                body={"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in uploads]}
            )
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
        sha = self.server.commit(repo, files)
        return self.answer(
            body={"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{repo}/commit/{sha}"}
        )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of this test's own, which huggingface_hub asks from here and from child processes, and an empty cache."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    cache = tmp_path / "hub-cache"
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("HF_TOKEN", "hf_standin")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "HUGGINGFACE_CO_URL_HOME"):
        if hasattr(constants, name):
            old = getattr(constants, name)
            monkeypatch.setattr(constants, name, old.replace("https://huggingface.co", server.url))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
