"""The app as it is served, asked by a program: what gradio would allow and the guard does not."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser


def asked(app: Any, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=30)
    data = None if body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, {"content-type": "application/json", **named})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_served_app_refuses_what_it_should(app: Any, tmp_path: Path) -> None:
    question = {"fn_index": 0, "data": ["{}", ""], "session_hash": "x"}
    foreign = ({"host": "rebind.evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"})
    for path in ("/gradio_api/run/predict", "/gradio_api/queue/join", "/gradio_api/upload"):
        for headers in foreign:
            assert asked(app, "POST", path, question, **headers)[0] in (400, 403), (path, headers)
    assert asked(app, "POST", "/gradio_api/run/predict", question)[0] == 200  # a program on this machine
    (tmp_path / "project" / "secret.txt").write_text("a secret of this project")
    for path in ("/etc/passwd", f"{tmp_path}/project/secret.txt", "../../../etc/passwd", "http://127.0.0.1/x"):
        for form in (f"/gradio_api/file={path}", f"/file={path}", f"/gradio_api/proxy={path}"):
            status, body = asked(app, "GET", form)
            assert status in (400, 403, 404), form
            assert b"a secret of" not in body
            assert b"root:" not in body
    for path in ("/monitoring", "/docs", "/openapi.json", "/gradio_api/vibe-code", "/gradio_api/startup-events/x"):
        assert asked(app, "GET", path)[0] in (401, 403, 404, 405), path
    assert asked(app, "GET", "/run?id=x")[0] == 200
    assert asked(app, "GET", "/run/x")[0] == 404


def test_a_question_that_is_no_json_is_answered(app: Any) -> None:
    for data in (["{", ""], ["[1]", "?a"], ["9" * 5_000, "?" + "a=b&" * 5_000], ["{}", "?tab=%00&id=%2e%2e"]):
        for index in range(0, 16, 2):  # every other one runs in the browser alone
            question = {"fn_index": index, "data": data, "session_hash": "x"}
            status, body = asked(app, "POST", "/gradio_api/run/predict", question)
            assert status == 200, (index, data[0][:20], body[:300])
            assert b"The app itself failed" not in body, (index, data[0][:20], body[:2_000])
