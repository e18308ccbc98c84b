"""Prefect's server, asked over HTTP.

It is asked again when it says 503, as while its database is busy, or when it has closed a
connection that was kept for the next question.
"""

from __future__ import annotations

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

TIMEOUT_S = 30.0

HTTP = requests.Session()
_busy = Retry(8, connect=0, status_forcelist=[503], allowed_methods=None, backoff_factor=0.5)
HTTP.mount("http://", HTTPAdapter(max_retries=_busy))


def ask(api: str, path: str, **body: Any) -> Any:
    """What the server answers to a POST, such as `ask(api, "flow_runs/filter")`.

    Raises `requests.RequestException`.
    """
    answer = HTTP.post(f"{api}/{path}", json=body, timeout=TIMEOUT_S)
    answer.raise_for_status()
    return answer.json()
