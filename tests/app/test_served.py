"""The app as it is served, asked by a program: what gradio would allow and the guard does not."""

from __future__ import annotations

import base64
import http.client
import json
import re
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from app.pages import PAGES, demo
from app.processes.jobs import MOST_OF_A_CLIENT
from app.store.run_paths import FILES
from tests.app.conftest import TOKEN, RunningApp
from tests.app.forged import SECRET, Outside
from tests.app.many import experiment, write_run
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.browser
PREDICT = "/gradio_api/run/predict"
NEEDED = (
    "/assets/",
    "/static/",
    "/config",
    "/theme.css",
    "/download",
    *(f"/gradio_api/{name}" for name in ("app_id", "info", "queue/data")),
)
CALLED = ("/gradio_api/run/predict", "/gradio_api/queue/join")
Response = tuple[int, http.client.HTTPMessage, bytes]


def asked(app: Any, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    """One request of a program that has the token, unless it is given another `authorization`."""
    status, _, result = respond(app, method, path, body, **headers)
    return status, result


def respond(app: Any, method: str, path: str, body: object = None, **headers: str) -> Response:
    source = (headers.pop("source", "127.0.0.1"), 0)  # the address of the client: all of 127.0.0.0/8 are this machine
    connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=HANG_SECONDS, source_address=source)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    named = {"authorization": f"Bearer {app.token}", "content-type": "application/json"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, {name: value for name, value in named.items() if value})
    answer = connection.getresponse()
    result = answer.status, answer.headers, answer.read()
    connection.close()
    return result


def test_a_served_app_refuses_what_it_should(app: Any, tmp_path: Path) -> None:
    question = question_of(app, "/", "load", "{}", "?", "{}")
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
    for page in PAGES:
        index = functions(app, page.path)["load"]
        for text, query in (
            ("{", ""),
            ("[1]", "?a"),
            ("9" * 5_000, "?" + "a=b&" * 5_000),
            ("{}", "?tab=%00&id=%2e%2e"),
        ):
            question = {"fn_index": index, "data": [text, query, text], "session_hash": "x"}
            status, body = asked(app, "POST", PREDICT, question)
            assert status == 200, (page.name, text[:20], body[:300])
            assert b"Internal error" not in body, (page.name, text[:20], body[:2_000])


def test_a_request_that_gradio_cannot_take_is_one_line_of_its_output(project: Path, environment: Any) -> None:
    app = RunningApp(project, environment)
    app.start()
    child = app.child
    assert child is not None
    assert child.stdout is not None
    bad = ({}, {"fn_index": "x\nTraceback"}, {"fn_index": 99_999, "data": []}, {"data": {}}, [], b"{", b"\xff")
    statuses = [asked(app, "POST", path, body)[0] for path in CALLED for body in bad]
    assert all(400 <= status <= 500 for status in statuses), statuses
    assert asked(app, "GET", "/")[0] == 200
    child.terminate()
    printed = child.stdout.read()
    child.wait(HANG_SECONDS)
    child.stdout.close()
    lines = [line for line in printed.splitlines() if "POST" in line]
    assert len(lines) == statuses.count(500) > 0, printed
    assert not re.search(r"^(Traceback| +File |\w*Error)", printed, re.MULTILINE), printed


def test_jobs_of_one_client_leave_room_for_those_of_others(app: Any) -> None:
    large = app.project / "large-0.jsonl"
    large.write_text('{"text": "some words that are read for long"}\n' * 400_000)
    files = [large, *(app.project / f"large-{number}.jsonl" for number in range(1, 2 * MOST_OF_A_CLIENT))]
    for file in files[1:]:
        file.hardlink_to(large)
    index = functions(app, "/data")["load"]

    def shown(file: Path, source: str) -> bytes:
        data = ["{}", f"?file={file.name}", "{}"]
        question = {"fn_index": index, "data": data, "session_hash": "x"}
        status, body = asked(app, "POST", PREDICT, question, source=source)
        assert status == 200
        return body

    refusal = f"{MOST_OF_A_CLIENT} computations of yours wait or run".encode()
    assert [refusal in shown(file, "127.0.0.2") for file in files] == [
        number >= MOST_OF_A_CLIENT for number in range(len(files))
    ]
    assert refusal not in shown(files[-1], "127.0.0.3")
    assert refusal in shown(files[-2], "127.0.0.2")


BESIDE = """
import attrs
from nnxdsl import Objective

@attrs.frozen(kw_only=True)
class Mine(Objective.DPO):
    '''An objective of the project.'''
"""


def test_what_stands_beside_a_recipe_is_found_if_it_is_allowed(project: Path, environment: Any) -> None:
    recipes = project / "experiments"
    (recipes / "mine_beside.py").write_text(BESIDE)
    path = (recipes / "tiny.py").read_text().replace("Objective.DPO", "mine_beside.Mine")
    (recipes / "own.py").write_text(f"import mine_beside\n{path}")
    app = RunningApp(project, environment, ("--allow", "mine_beside"))
    app.start()

    question = {"fn_index": functions(app, "/data")["load"], "data": ["{}", "?of=exp%3Aown", "{}"], "session_hash": "x"}

    def has_rows() -> bool:
        body = asked(app, "POST", PREDICT, question)[1].decode()
        assert "No module named" not in body, body
        return "40 rows trained on" in body

    try:
        wait_until(has_rows)
    finally:
        app.end()


def functions(app: Any, path: str, **headers: str) -> dict[str, int]:
    """Numbers of a page's functions, by id or else text of the button that calls them; `load` is that of all."""
    page = asked(app, "GET", path, **headers)[1].decode()
    config = json.JSONDecoder().raw_decode(page.partition("window.gradio_config = ")[2])[0]
    named = {one["id"]: one["props"].get("elem_id") or one["props"].get("value") for one in config["components"]}
    result: dict[str, int] = {}
    for one in config["dependencies"]:
        for number, kind in one["targets"]:
            result[kind if kind == "load" else str(named.get(number))] = one["id"]
    return result


def question_of(app: Any, path: str, button: str, *data: str, **headers: str) -> dict[str, object]:
    """What a browser sends when a button of a page is clicked, or the page is opened."""
    return {"fn_index": functions(app, path, **headers)[button], "data": list(data), "session_hash": "x"}


ROUTES = """
import json, gradio
from gradio.routes import App

def flat(routes):
    for route in routes:
        inner = getattr(route, "original_router", route)  # a router that was included
        yield from flat(getattr(inner, "routes", None) or ())
        for method in getattr(route, "methods", None) or ():
            yield method, route.path

with gradio.Blocks() as blocks:
    gradio.Textbox()
print(json.dumps(sorted(flat(App.create_app(blocks).routes))))
"""


@pytest.fixture(scope="module")
def routes(environment: dict[str, str]) -> list[tuple[str, str]]:
    """(method, path) of everything that gradio would answer."""
    fields = {**environment, "GRADIO_ANALYTICS_ENABLED": "False"}
    run = subprocess.run([sys.executable, "-c", ROUTES], env=fields, capture_output=True, check=True, text=True)
    result = {(method, re.sub(r"{[^}]*}", "x", path)) for method, path in json.loads(run.stdout.splitlines()[-1])}
    assert len(result) > 60
    return sorted(result - {("GET", "/favicon.ico")})  # which is empty for everybody


def test_every_route_needs_the_token_and_few_exist(app: RunningApp, routes: list[tuple[str, str]]) -> None:
    cookies = ("", f"nnxdsl-app-{app.port}={TOKEN}", f"access-token-unsecure={TOKEN}; token={TOKEN}")
    ours = [("GET", path) for path in ("/run?id=x", "/download?run=x&file=log.txt", "/nothing")]
    for method, path in [*routes, *ours, ("OPTIONS", PREDICT), ("POST", PREDICT)]:
        for inputs, cookie in zip(("", "Bearer x", "Basic eDp5"), cookies, strict=True):
            status, headers, body = respond(app, method, path, None, authorization=inputs, cookie=cookie)
            assert status == 401, (method, path, status)
            assert headers.get("set-cookie") is None
            assert b"fn_index" not in body
        is_needed = method in ("GET", "HEAD") and (path.split("?")[0] in ("/", "/run") or path.startswith(NEEDED))
        if not is_needed and not (method == "POST" and path in CALLED):
            assert asked(app, method, path)[0] == 404, (method, path)
    launch = question_of(app, "/", demo.START, "?")
    assert asked(app, "POST", PREDICT, launch, authorization="")[0] == 401
    assert not (app.home / ".app" / "launches").exists()


@pytest.mark.parametrize("argv", [(), ("--read-only",)])
def test_nothing_can_be_uploaded(project: Path, environment: Any, argv: tuple[str, ...]) -> None:
    app = RunningApp(project, environment, argv)
    app.start()
    form = b"--x\r\ncontent-disposition: form-data; name=files; filename=a\r\n\r\na\r\n--x--\r\n"
    try:
        for path in ("/gradio_api/upload", "/gradio_api/upload/", "/upload", "/gradio_api/upload?upload_id=x"):
            for fields, refused in (("", 401), (f"Bearer {app.token}", 404)):
                kind = "multipart/form-data; boundary=x"
                assert asked(app, "POST", path, form, authorization=fields, content_type=kind)[0] == refused, path
    finally:
        app.end()


def test_the_printed_address_opens_the_app_and_its_token_stands_nowhere(project: Path, environment: Any) -> None:
    app = RunningApp(project, environment, token=None)
    app.start()
    try:
        address = app.line.split(" on ")[1].split()[0]
        assert re.fullmatch(rf"http://127\.0\.0\.1:{app.port}/\?token=[\w-]{{43}}", address)
        first = app.token
        assert first is not None
        status, headers, _ = respond(app, "GET", f"/?token={first}", authorization="", accept="text/html")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"].split(";")[0]
        assert cookie.startswith(f"nnxdsl-app-{app.port}=")
        assert asked(app, "GET", "/run", authorization="", cookie=cookie)[0] == 200
        tag = question_of(app, "/", "Tag", f"?ids={write_run(app.home, experiment(0), 'stopped', 3).name}", "kept")
        assert asked(app, "POST", CALLED[1], tag, authorization="", cookie=cookie)[0] == 200
        wait_until((app.home / ".app" / "tags.jsonl").exists)
        files = [path for path in project.rglob("*") if path.is_file()]
        assert [path for path in files if first.encode() in path.read_bytes()] == []
        app.end()
        app.token = None
        app.start()
        assert app.token != first
        assert asked(app, "GET", "/", authorization=f"Bearer {first}")[0] == 401
        assert asked(app, "GET", "/", authorization="", cookie=cookie)[0] == 200  # a page that was open goes on
    finally:
        app.end()


@pytest.mark.parametrize("mode", ["file", "variable"])
def test_an_app_with_a_password_starts_and_asks_for_it(project: Path, environment: Any, mode: str) -> None:
    file = project / "password.txt"
    file.write_text("open sesame\n")
    argv = ("--password-file", str(file)) if mode == "file" else ()
    fields = {} if mode == "file" else {"NNXDSL_APP_PASSWORD": "open sesame"}
    app = RunningApp(project, {**environment, **fields}, argv)
    app.start()
    try:
        assert "sign in with the password" in app.line
        assert "open sesame" not in app.line
        assert TOKEN not in app.line
        right, wrong = (base64.b64encode(f"x:{word}".encode()).decode() for word in ("open sesame", "wrong"))
        for path in ("/", "/run", "/theme.css", "/gradio_api/app_id"):
            assert asked(app, "GET", path, authorization="")[0] == 401, path
            assert asked(app, "GET", path, authorization=f"Basic {right}")[0] == 200, path
        assert asked(app, "GET", "/", authorization=f"Basic {wrong}")[0] == 401
        kind = "application/x-www-form-urlencoded"
        form = b"secret=open+sesame&next=%2Frun%3Fid%3Dx"
        status, headers, _ = respond(app, "POST", "/sign-in", form, authorization="", content_type=kind)
        assert (status, headers["location"]) == (303, "/run?id=x")
        cookie = headers["set-cookie"].split(";")[0]
        opened = question_of(app, "/", "load", "{}", "?", "{}", authorization="", cookie=cookie)
        assert asked(app, "POST", PREDICT, opened, authorization="", cookie=cookie)[0] == 200
    finally:
        app.end()


def test_many_wrong_passwords_hold_up_neither_others_nor_the_end(project: Path, environment: Any) -> None:
    app = RunningApp(project, {**environment, "NNXDSL_APP_PASSWORD": "open sesame"})
    app.start()
    right, wrong = (base64.b64encode(f"x:{word}".encode()).decode() for word in ("open sesame", "wrong"))
    guesses: list[http.client.HTTPConnection] = []
    try:
        for number in range(60):
            address = (f"127.0.1.{1 + number % 6}", 0)
            guess = http.client.HTTPConnection("127.0.0.1", app.port, timeout=HANG_SECONDS, source_address=address)
            guess.request("GET", "/", headers={"authorization": f"Basic {wrong}"})
            guesses.append(guess)
        assert asked(app, "GET", "/", authorization=f"Basic {right}")[0] == 200
        assert select.select([guess.sock for guess in guesses[-6:]], [], [], 0)[0] == []  # those wait
        assert app.child is not None
        app.child.terminate()
        # Each is respond: none is cut off by the limit for requests that go on, with an exception in the log.
        assert {guess.getresponse().status for guess in guesses} == {401}
        output, _ = app.child.communicate(timeout=HANG_SECONDS)
        assert (app.child.returncode, output) == (0, "")
        app.child = None
    finally:
        for guess in guesses:
            guess.close()
        if app.child is not None:
            app.end()


@pytest.mark.parametrize("root", ["", "/nnxdsl"])
def test_an_app_speaks_of_the_proxy_that_was_named_and_of_no_other_host(
    project: Path, environment: Any, root: str
) -> None:
    forged = {
        "x_forwarded_host": "evil.example",
        "x_forwarded_proto": "https",
        "x_gradio_server": "http://evil.example",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = RunningApp(project, environment, ("--proxy", f"https://lab.example{root}") if root else (), port=port)
    app.start()
    try:
        for path in ("/", f"{root}/", f"{root}/run?id=x"):
            status, body = asked(app, "GET", path, **forged)
            assert (status, b"evil.example" in body) == (200, False), path
        if root:
            assert " on https://lab.example/nnxdsl/ " in app.line
            through = {"x_forwarded_host": "lab.example", "origin": "https://lab.example"}
            status, body = asked(app, "GET", "/nnxdsl/run", **through)
            assert status == 200
            assert b"https://lab.example/nnxdsl" in body
            assert b'href=\\"/nnxdsl/' in body
            assert not re.search(rb'href=\\"/(?!nnxdsl/)', body)
    finally:
        app.end()


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_no_request_reaches_beyond_the_home(project: Path, environment: Any, step: int) -> None:
    outside = Outside.under(project)
    app = RunningApp(project, environment)
    app.start()
    before = outside.snapshot()
    numbers = {page.name: functions(app, page.path) for page in PAGES}

    def ask(index: int, data: list[str]) -> None:
        status, body = asked(app, "POST", PREDICT, {"fn_index": index, "data": data, "session_hash": "x"})
        assert status == 200, (data, body[:300])
        assert SECRET.encode() not in body, data
        assert b"Internal error" not in body, (data, body[body.find(b"Internal error") :][:1_000])

    try:
        for run in (one[:1_000] for one in outside.hostile()[::step]):
            for name in sorted(FILES - {"control", "lock"} | {"metrics.csv"}):
                for safe in ("", "/"):
                    status, body = asked(app, "GET", f"/download?run={quote(run, safe=safe)}&file={name}")
                    assert status == 404 or run.startswith("linked-"), (run, name)
                    assert SECRET.encode() not in body, (run, name)
            for query, _ in outside.queries(run):
                for page in PAGES:
                    ask(numbers[page.name]["load"], ["{}", "?" + urlencode(query), "{}"])
        assert outside.snapshot() == before
        assert not list((app.home / ".app").glob("launches/*"))
    finally:
        app.end()
