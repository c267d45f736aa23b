"""Adapters that a server loads, under names that clients call."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Weights
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export
from tests.fixtures.serving import KEY, serving

pytestmark = pytest.mark.extended

Post = Callable[[str, Any], tuple[int, Any]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a model, `weights/lora` and `weights/dora`, adapters of it in PEFT's format, and the runs that made them."""
    place = tmp_path_factory.mktemp("adapters")
    (place / "texts.jsonl").write_text('{"text": "a word and another word, and one more"}\n' * 4)
    sft = Experiment(
        name="base",
        model=Model.Qwen3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(place / "texts.jsonl"), max_length=48),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=3e-3)),
        batch_size=4,
        steps=2,
    )
    export(run(sft, place / "runs", Display(quiet=True)).directory, place / "model")
    (place / "weights").mkdir()
    model = Model.HF(str(place / "model"), weights=Weights.HF(str(place / "model")))
    for name, adapter in (("lora", Adapter.LoRA(rank=4, alpha=32.0)), ("dora", Adapter.DoRA(rank=2))):
        optimizer = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.02))
        experiment = attrs.evolve(sft, name=name, model=model, adapter=adapter, optimizer=optimizer, steps=4)
        directory = run(experiment, place / "runs", Display(quiet=True)).directory
        export(directory, place / "weights" / name, adapter=True)
        (place / name).symlink_to(directory)
    return place


@pytest.fixture(scope="module")
def post(place: Path) -> Iterator[Post]:
    message = "--weights-directory", str(place / "weights"), "--name", "tiny"
    with serving(place / "model", *message) as url:

        def answer(route: str, body: Any) -> tuple[int, Any]:
            inputs = None if body is None else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            request = urllib.request.Request(url.removesuffix("/v1") + route, inputs, headers)
            try:
                with urllib.request.urlopen(request) as result:
                    status, text = result.status, result.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    status, text = error.code, error.read().decode()
            return status, json.loads(text) if text.startswith("{") else text

        yield answer


def completion(model: str, **fields: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": model, "prompt": "a word", "max_tokens": 12, "temperature": 0.0, "logprobs": 0, **fields}


def test_each_name_answers_with_its_weights(place: Path, post: Post) -> None:
    before = post("/v1/completions", completion("tiny"))
    for name in ("lora", "dora"):
        added = {"lora_name": name, "lora_path": str(place / "weights" / name)}
        assert post("/v1/load_lora_adapter", added)[0] == 200
    models = post("/v1/models", None)[1]["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [("tiny", None), ("lora", "tiny"), ("dora", "tiny")]
    every = {}
    for name, directory in (("tiny", "model"), ("lora", "lora"), ("dora", "dora")):
        status, body = post("/v1/completions", completion(name, echo=True))
        assert (status, body["model"]) == (200, name)
        model, (choice,) = nnxdsl.load(place / directory), body["choices"]
        assert choice["text"] == "a word" + model.generate(["a word"], max_new_tokens=12)[0]
        status, body = post("/v1/completions", completion(name, echo=True, return_token_ids=True))
        (choice,) = body["choices"]
        expected = model.token_logps([*choice["prompt_token_ids"], *choice["token_ids"]]).logps
        every[name] = choice["logprobs"]["token_logprobs"][1:]
        assert every[name] == pytest.approx(expected.tolist(), abs=2e-5)
    assert every["tiny"] != every["lora"] != every["dora"]
    assert post("/v1/completions", completion("tiny"))[1]["choices"] == before[1]["choices"]
    for name in ("lora", "dora"):
        assert post("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    assert [one["id"] for one in post("/v1/models", None)[1]["data"]] == ["tiny"]
    assert post("/v1/completions", completion("lora"))[0] == 404


def test_other_weights_end_the_adapters(place: Path, post: Post) -> None:
    assert post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(place / "weights" / "lora")})[0] == 200
    export(place / "lora", place / "weights" / "merged")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(place / "weights" / "merged")}}
    assert post("/collective_rpc", call)[0] == 200
    assert post("/v1/completions", completion("one"))[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "tiny", "lora_path": "lora"}, 400, "'tiny' is served already"),
        ({"lora_name": "x", "lora_path": "../model"}, 403, "is not below"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "is no directory"),
        ({"lora_name": "x", "lora_path": "empty"}, 400, "adapter_config.json"),
        ({"lora_name": "", "lora_path": "lora"}, 400, "at least 1 character"),
    ],
)
def test_what_is_no_adapter_is_refused(
    body: dict[str, str], status: int, message: str, place: Path, post: Post
) -> None:
    (place / "weights" / "empty").mkdir(exist_ok=True)
    body = {**body, "lora_path": str(place / "weights" / body["lora_path"])}
    actual, answer = post("/v1/load_lora_adapter", body)
    assert actual == status
    assert message in answer["error"]["message"]
    assert post("/v1/unload_lora_adapter", {"lora_name": "nobody"})[0] == 404


def test_requests_wait_while_the_server_is_paused(post: Post) -> None:
    assert post("/is_paused", None) == (200, {"is_paused": False})
    assert post("/pause?mode=keep", {}) == (200, {"status": "paused"})
    assert post("/is_paused", None) == (200, {"is_paused": True})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, "/v1/completions", completion("tiny"))
        assert post("/v1/models", None)[0] == 200
        assert not waiting.done()
        assert post("/resume", {}) == (200, {"status": "resumed"})
        assert waiting.result()[0] == 200
    status, answer = post("/pause?mode=later", {})
    assert (status, "'abort', 'wait' or 'keep'" in answer["error"]["message"]) == (400, True)


@pytest.mark.extended
def test_keys_and_values_in_8_bits(place: Path) -> None:
    with serving(place / "model", "--kv-cache-dtype", "int8", "--name", "tiny") as url:
        body = json.dumps(completion("tiny", return_token_ids=True)).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, headers)) as result:
            (choice,) = json.loads(result.read())["choices"]
    ids = choice["prompt_token_ids"], choice["token_ids"]
    expected = nnxdsl.load(place / "model").token_logps([*ids[0], *ids[1]]).logps[len(ids[0]) - 1 :]
    assert 1e-5 < np.abs(np.array(choice["logprobs"]["token_logprobs"]) - expected).max() < 0.05
