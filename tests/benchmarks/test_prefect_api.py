"""A server that is busy is asked again, one that is not there is not."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests

from benchmarks.prefect_api import ask
from tasks.environment import page
from tasks.servers import free_address


class Busy(BaseHTTPRequestHandler):
    """A closed connection, 503, then what it was told."""

    seen = 0

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen += 1
        if self.seen == 1:
            return
        self.send_response(503 if self.seen < 3 else 200)
        self.end_headers()
        self.wfile.write(json.dumps([self.path, json.loads(body)]).encode())

    def log_message(self, *_):
        """Say nothing."""


def test_a_busy_server_is_asked_again():
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = f"http://127.0.0.1:{server.server_port}/api"
        assert ask(api, "flow_runs/filter", limit=1) == ["/api/flow_runs/filter", {"limit": 1}]
        server.shutdown()
    assert Busy.seen == 3


def test_a_server_that_is_not_there_is_known_at_once():
    began = time.monotonic()
    with pytest.raises(requests.ConnectionError):
        ask(page(free_address()), "flow_runs/filter")
    assert time.monotonic() - began < 10
