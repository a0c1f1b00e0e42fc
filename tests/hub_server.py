"""A local stand-in for the Hugging Face hub: the endpoints that downloading calls.

Follows https://huggingface.co/docs/hub/api: model info, the tree of a revision, and
`resolve` for a file's bytes. Serves directories; knows nobody's login.
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

_INFO = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """What the server serves, and what it was asked.

    Attributes:
      repos: id -> revision -> directory.
      gated: ids of repositories that nobody may read.
      broken: ids of repositories whose files cannot be had.
      requests: "METHOD path" of every request, in order.
      url: where it listens.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.requests: list[str] = []
        self.url = ""

    def commit(self, repo: str, revision: str) -> str:
        return hashlib.sha1(str(self.repos[repo][revision]).encode()).hexdigest()

    def folder(self, repo: str, revision: str) -> Path | None:
        """The directory of a branch, a tag or a commit."""
        revisions = self.repos[repo]
        by_commit = {self.commit(repo, name): name for name in revisions}
        return revisions.get(by_commit.get(revision, revision))

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return a request's status, headers and body."""
        for pattern, handle in (
            (_TREE, self._tree),
            (_RESOLVE, self._resolve),
            (_INFO, self._info),
        ):
            if match := pattern.fullmatch(path):
                repo, revision, *rest = match.groups()
                revision = urllib.parse.unquote(revision or "main")
                if repo in self.gated:
                    return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
                if repo not in self.repos:
                    return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
                if self.folder(repo, revision) is None:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                return handle(repo, revision, *rest)
        return 404, {}, b"{}"

    def _info(self, repo, revision):
        sha = hashlib.sha1(str(self.folder(repo, revision)).encode()).hexdigest()
        body = {"_id": "0", "id": repo, "modelId": repo, "sha": sha, "siblings": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _tree(self, repo, revision):
        folder = self.folder(repo, revision)
        entries = [
            {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            }
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()

    def _resolve(self, repo, revision, name):
        if repo in self.broken:
            return 409, {}, b""  # 5xx would be tried again and again
        file = self.folder(repo, revision) / urllib.parse.unquote(name)
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": revision,
            "Content-Type": "application/octet-stream",
        }
        return 200, headers, body


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on a free local port."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = urllib.parse.urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
