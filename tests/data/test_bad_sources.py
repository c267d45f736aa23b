"""Sources that cannot be trained on: what the message says."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, DataError
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.loaders.token_cache import META, TokenCache
from nnxdsl.terminal.display import Display
from tests.waiting import HANG_SECONDS

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def refused(data: Data, tokens: BytesTokenizer | None = None) -> str:
    with pytest.raises(DataError) as error:
        load(data, tokens or BytesTokenizer())
    return str(error.value)


def test_an_empty_file_and_an_empty_split(write, tmp_path: Path) -> None:
    assert refused(Data.Text(write())) == "rows.jsonl: no row is left to learn from, of 0 read"
    datasets = pytest.importorskip("datasets")
    some, none = datasets.Dataset.from_list([PAIR]), datasets.Dataset.from_list([PAIR]).select([])
    datasets.DatasetDict({"train": some, "test": none}).save_to_disk(str(tmp_path / "saved"))
    assert len(load(Data.Preferences("saved", split="train"), BytesTokenizer())) == 1
    assert refused(Data.Preferences("saved", split="test")) == "saved/test: has no rows"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (PAIR, {"prompt": "a", "completion": "b"},
         "b.jsonl:1: field 'chosen' is missing; this row has: prompt, completion; Data.Preferences reads "
         "prompt/chosen/rejected (text or messages) or prompt_ids/chosen_ids/rejected_ids"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, PAIR,
         "b.jsonl:1: the first rows are Orca pairs (system, question, chosen, rejected); this row has: prompt, chosen, "
         "rejected"),
        (PAIR, {**PAIR, "chosen": 1},
         "b.jsonl:1: field 'chosen': expected text or a list of messages, got the number 1"),
    ],
    ids=["columns", "layouts", "types"],
)  # fmt: skip
def test_files_of_different_rows(write, first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    paths = write(first, first, name="a.jsonl"), write(second, name="b.jsonl")
    assert refused(Data.Preferences(paths)) == (
        "a.jsonl and 1 more: 1 of 3 rows is bad; fix them, or leave them out with bad_rows=BadRows.Skip(at_most=1)\n  "
        + message
    )


def test_a_template_that_cannot_mark_the_turns_of_the_assistant(write) -> None:
    joined = (
        "{% for m in messages %}{{ m.content | upper if loop.last and m.role == 'user' else m.content }}{% endfor %}"
    )
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    message = refused(Data.Conversations(write({"messages": [*turns, turns[1]]})), BytesTokenizer(joined))
    assert message.splitlines()[1:] == [
        "  rows.jsonl:1: the chat template renders earlier text differently once message 2 is complete, so the answer "
        "cannot be split from its prompt; use a template whose earlier text does not change, one with {% generation %} "
        "blocks, or objective.loss_on='last_assistant'"
    ]


def test_stored_tokens_of_another_version_are_made_again(write, tmp_path: Path, capsys: Any) -> None:
    data = Data.Preferences(write(PAIR, {**PAIR, "prompt": "d"}))
    cache = TokenCache(tmp_path / "home", display=Display(), workers=1, min_bytes=0)
    expected = load(data, BytesTokenizer(), cache=cache).ids_digest()
    (meta,) = (tmp_path / "home").glob(f"*/{META}")
    stored = json.loads(meta.read_text())
    meta.write_text(json.dumps({**stored, "tally": {**stored["tally"], "later": 1}}))
    capsys.readouterr()
    assert load(data, BytesTokenizer(), cache=cache).ids_digest() == expected
    assert "warning: the tokens of rows.jsonl are damaged; tokenizing again: " in " ".join(
        capsys.readouterr().err.split()
    )
    assert json.loads(meta.read_text()) == stored


class _NoSuchPage(http.server.BaseHTTPRequestHandler):
    """A Hub without datasets."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_have(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _NoSuchPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    argv = [sys.executable, "-m", "nnxdsl", "data", "hf://lab/none"]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    finally:
        server.shutdown()
        server.server_close()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "DataError: hf://lab/none: cannot be loaded: Dataset 'lab/none' doesn't exist on the Hub or cannot be "
        "accessed; look at its name, or log in with `hf auth login` if it is private or gated\n"
    )
