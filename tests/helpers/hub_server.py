"""A stand-in of the Hugging Face Hub's HTTP interface, as much of it as models need: create, list, commit, download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_stand_in"


class Hub:
    """Repositories in memory: by name, whether they are private, their files, and the messages of their commits."""

    def __init__(self):
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.full = False

    def commit(self, name, lines):
        (header, *operations) = map(json.loads, lines)
        files = self.files[name]
        for operation in operations:
            path = operation["value"]["path"]
            if operation["key"] == "file":
                files[path] = base64.b64decode(operation["value"]["content"])
            else:
                assert operation["key"] == "deletedFile", operation
                del files[path]
        self.commits[name].append(header["value"]["summary"])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def answer(self, status, content=None, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        url = f"http://{self.headers['Host']}"
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            known = name in hub.files
            if not known:
                hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
                hub.files[name], hub.commits[name] = {".gitattributes": b""}, []
            return self.answer(409 if known else 200, {"url": f"{url}/{name}", "id": name})
        if path == "/api/validate-yaml":
            facts = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return self.answer(200, {"errors": [] if facts else [{"message": "no metadata"}], "warnings": []})
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            named = [file["path"] for file in json.loads(body)["files"]]
            listed = [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in named]
            return self.answer(200, {"files": listed})
        assert "/commit/" in path, path
        if hub.full:
            return self.answer(413, {"error": "The repository is full."})
        hub.commit(name, body.splitlines())
        where = {"commitUrl": f"{url}/{name}/commit/{len(hub.commits[name]):040x}", "commitOid": "0" * 40}
        return self.answer(200, where | {"success": True, "pullRequestUrl": None})

    def do_GET(self):
        hub, parts = self.hub, unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            name = "/".join(parts[2:4])
            if name not in hub.files:
                return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            files = hub.files[name]
            if "tree" in parts:
                sizes = {path: len(content) for path, content in files.items()}
                tree = [{"type": "file", "path": path, "size": size, "oid": "0" * 40} for path, size in sizes.items()]
                return self.answer(200, tree)
            facts = {"id": name, "private": hub.private[name], "sha": f"{len(hub.commits[name]):040x}"}
            return self.answer(200, facts | {"siblings": [{"rfilename": file} for file in files]})
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        content = hub.files[name].get(file)
        revision = {"X_Repo_Commit": f"{len(hub.commits[name]):040x}"}
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound", **revision)
        return self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **revision)

    do_HEAD = do_GET

    def log_message(self, *_):
        """Be silent."""


@contextmanager
def serve_hub():
    """Serve an empty hub on a free port of this machine; yields it and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
