"""`nnxdsl serve` in a process of its own, asked by OpenAI's client and by what other programs send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective
from nnxdsl.cli.dispatch import main
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.serve.http import make_app
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export

KEY = {"Authorization": "Bearer a key"}
QUESTION: Any = [{"role": "user", "content": "What is it?"}]


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server, api_key="a key")


@pytest.fixture
def post(server: str) -> Callable[..., Any]:
    def send(path: str = "completions", **body: Any) -> Any:
        return httpx.post(f"{server}/{path}", json=body, headers=KEY, timeout=600)

    return send


def logps_of(model: Pretrained, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of all tokens but the first, from whole logits."""
    each = jax.nn.log_softmax(model(np.array([ids]))[0, :-1] / temperature)
    return np.asarray(each)[np.arange(len(ids) - 1), ids[1:]]


def test_a_chat_by_the_client_of_openai(client: openai.OpenAI, model: Pretrained) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_completion_tokens": 12, "temperature": 0}
    (expected,) = model.generate([QUESTION], max_new_tokens=12)
    actual = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = actual.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.finish_reason == "length"
    assert actual.usage is not None
    assert actual.usage.completion_tokens == 12
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for place in choice.logprobs.content:  # greedy: each token is the most likely one
        assert place.logprob == max(top.logprob for top in place.top_logprobs)
    streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    events = list(streamed)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == expected
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage == actual.usage
    assert sum(bool(event.choices and event.choices[0].delta.content) for event in events) > 1


@pytest.mark.extended
def test_a_conversation_is_continued(client: openai.OpenAI, model: Pretrained) -> None:
    """A last message of the assistant is the beginning of its answer; contents may be parts."""
    begun: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "a w"},
    ]
    actual = client.chat.completions.create(model="tiny", messages=begun, max_tokens=6, temperature=0)
    (expected,) = model.generate([[QUESTION[0], begun[1]]], max_new_tokens=6)
    assert actual.choices[0].message.content == expected


def test_what_a_trainer_sends(post: Callable[..., Any], model: Pretrained) -> None:
    """The request of TRL's asynchronous trainer: token ids in and out, with the sampler's log-probabilities."""
    prompt = [97, 32, 119]
    asked = {
        "model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0,
    }  # fmt: skip
    actual = [post(**asked, seed=seed).json()["choices"][0] for seed in (2**62 + 5, 2**62 + 5, 4)]
    assert actual[0] == actual[1]
    assert actual[0]["token_ids"] != actual[2]["token_ids"]
    for choice in actual:
        assert choice["prompt_token_ids"] == prompt
        ids = choice["token_ids"]
        assert 1 <= len(ids) <= 9
        expected = logps_of(model, [*prompt, *ids], 0.7)[len(prompt) - 1 :]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=2e-5)
        assert choice["logprobs"]["top_logprobs"] is None


@pytest.mark.extended
def test_what_an_evaluation_sends(post: Callable[..., Any], model: Pretrained) -> None:
    """The request of lm-eval's local-completions: log-probabilities of the prompt, and whether each token is greedy."""
    rows = [[97, 32, 119, 111, 114, 100], [98, 98, 98]]
    for tokens in (0, 1):
        body = post(prompt=rows, max_tokens=tokens, temperature=0, logprobs=1, seed=1234, echo=True).json()
        for ids, choice in zip(rows, body["choices"], strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(ids) + tokens
            assert logprobs["token_logprobs"][0] is None
            got = logprobs["token_logprobs"][1 : len(ids)]
            np.testing.assert_allclose(got, logps_of(model, ids), atol=2e-5)
            best = np.asarray(model(np.array([ids]))[0, :-1]).argmax(-1)
            for place, token in enumerate(ids[1:]):
                is_best = got[place] == max(logprobs["top_logprobs"][place + 1].values())
                assert is_best == (best[place] == token)
            assert choice["text"].startswith(model.tokenizer.decode(ids, skip_special=False))


def test_what_a_distillation_sends(post: Callable[..., Any], model: Pretrained) -> None:
    """The request of TRL's trainers for the top k of a teacher, as vLLM answers it."""
    ids = [97, 32, 119, 111]
    asked: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 3}
    for temperature in (1.0, 0.7):
        (choice,) = post(**asked, temperature=temperature).json()["choices"]
        first, *places = choice["prompt_logprobs"]
        assert first is None
        each = np.asarray(jax.nn.log_softmax(model(np.array([ids]))[0, :-1] / temperature))
        for place, token, logps in zip(places, ids[1:], each, strict=True):
            best = np.argsort(-logps, kind="stable")[:3].tolist()
            expected = {**dict(zip(best, (1, 2, 3), strict=True)), **({} if token in best else {token: None})}
            assert {int(other): one["rank"] for other, one in place.items()} == expected
            for other, one in place.items():
                assert one["logprob"] == pytest.approx(logps[int(other)], abs=2e-5)
                assert one["decoded_token"] == model.tokenizer.decode([int(other)], skip_special=False)
    assert "prompt_logprobs" not in post(prompt=ids, max_tokens=1).json()["choices"][0]


@pytest.mark.extended
def test_a_completion_does_not_depend_on_those_beside_it(server: str) -> None:
    """Two hundred requests at one time, with several settings, lengths and seeds, and some that nobody waits for."""
    kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"temperature": 0}]

    async def ask(client: httpx.AsyncClient, number: int) -> Any:
        body = {"prompt": "a wo" * (1 + number % 3), "max_tokens": 3 + number % 7, "seed": number, "n": 1 + number % 2}
        actual = await client.post(f"{server}/completions", json={**body, **kinds[number % 3]}, headers=KEY)
        return [choice["text"] for choice in actual.raise_for_status().json()["choices"]]

    async def leave(client: httpx.AsyncClient) -> None:
        body = {"prompt": "a wo", "max_tokens": 200, "stream": True}
        async with client.stream("POST", f"{server}/completions", json=body, headers=KEY) as actual:
            await anext(actual.aiter_lines())

    async def all_together() -> tuple[list[Any], list[Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=900, limits=limits) as client:
            left = [leave(client) for _ in range(5)]
            batched = await asyncio.gather(*(ask(client, number) for number in range(200)), *left)
            return batched[:200], [await ask(client, number) for number in (0, 7, 101, 199)]

    joined, alone = asyncio.run(all_together())
    assert alone == [joined[number] for number in (0, 7, 101, 199)]
    assert len({text for texts in joined for text in texts}) > 50


@pytest.mark.extended
def test_a_text_ends_a_completion(post: Callable[..., Any], client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "a word and ", "max_tokens": 24, "temperature": 0}
    whole = post(**asked).json()["choices"][0]["text"]
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    for inputs in (stop, ["never there", stop]):
        body = post(**asked, stop=inputs, return_token_ids=True).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        assert len(choice["token_ids"]) == len(expected) + len(stop) == body["usage"]["completion_tokens"]  # bytes
    events = list(client.completions.create(model="tiny", **asked, stop=stop, stream=True))
    assert "".join(event.choices[0].text for event in events) == expected
    ids = post(**asked, return_token_ids=True).json()["choices"][0]["token_ids"]
    choice = post(**asked, stop_token_ids=[ids[4]], return_token_ids=True).json()["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids[: ids.index(ids[4]) + 1], "stop")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "model": "other"}, 404, "the model 'other' is not served here, but 'tiny'"),
        ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty is not supported; leave it out"),
        ({"prompt": "a", "colour": 1}, 400, "colour: Extra inputs are not permitted"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"prompt": [[400]]}, 400, "400 is no token id; expected 0 to 319"),
        ({"prompt": []}, 400, "expected at least one token"),
        ({"prompt": "a", "max_tokens": 5_000}, 400, "more than the model's"),
        ({"prompt": "a", "stream": True, "echo": True}, 400, "echo and logprobs above 0 are computed at the end"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 0}, 400, "as prompt_logprobs are; leave stream out"),
        ({"prompt": "a", "prompt_logprobs": 321}, 400, "expected at most the 320 tokens of the vocabulary"),
        ({"messages": []}, 400, "prompt: Field required"),
        ({"prompt": "a", "top_k": 10**6}, 400, "1,000,000 exceeds the 320 tokens of the vocabulary"),
        ({"prompt": "a", "temperature": 1e-9}, 400, "expected 0, or at least 0.001"),
        ({"prompt": "a", "stop": ["b", ""]}, 400, "a stop cannot be empty"),
        ({"prompt": "a", "stop_token_ids": [-1]}, 400, "-1 is no token id"),
        ({"prompt": "a", "stream_options": {}}, 400, "has no effect without stream"),
        ({"prompt": ["a"] * 20, "n": 100}, 400, "expected at most 1,024 completions"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(body: Any, status: int, message: str, post: Callable[..., Any]) -> None:
    actual = post(**body)
    error = actual.json()["error"]
    assert (actual.status_code, error["code"], error["type"]) == (status, status, "invalid_request_error")
    assert message in error["message"]


def test_what_is_no_request_is_answered_in_the_same_form(server: str) -> None:
    for path, body, status in (
        ("completions", b"{", 400),
        ("nothing", b"{}", 404),
        ("completions", b" " * (2**24 + 1), 413),
        ("completions", b'{"prompt": "\\ud800"}', 400),
    ):
        actual = httpx.post(f"{server}/{path}", content=body, headers={**KEY, "Content-Type": "application/json"})
        assert (actual.status_code, actual.json()["error"]["code"]) == (status, status), path


@pytest.mark.extended
def test_fields_without_a_value_are_left_out(post: Callable[..., Any]) -> None:
    """Messages as OpenAI's client gives them back, and clients that send null for what was not set."""
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stream", "stop", "seed", "logprobs", "user", "tools"))
    answer = {"role": "assistant", "content": "a wo", "refusal": None, "function_call": None, "tool_calls": None}
    actual = post("chat/completions", messages=[*QUESTION, answer], max_tokens=2, **nothing)
    assert actual.status_code == 200, actual.text
    assert len(post(prompt=[[97]], max_tokens=2, **nothing).json()["choices"]) == 1


def test_a_prompt_may_be_as_long_as_the_context(
    post: Callable[..., Any], client: openai.OpenAI, model: Pretrained
) -> None:
    most = model.config.max_length
    asked: dict[str, Any] = {"prompt": [97] * most, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    actual = post(**asked)
    assert actual.status_code == 200, actual.text
    choice = actual.json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == most
    assert choice["finish_reason"] == "length"
    events = list(client.completions.create(model="tiny", prompt="a", max_tokens=0, stream=True))
    assert [event.choices[0].finish_reason for event in events] == ["length"]


def test_a_key_is_needed(server: str, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert httpx.get(server.replace("/v1", "/health")).status_code == 200
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "a key"}):
        actual = httpx.get(f"{server}/models", headers=headers)
        assert (actual.status_code, actual.json()["error"]["code"]) == (401, 401)
    monkeypatch.delenv("NNXDSL_API_KEY", raising=False)
    assert main(["serve", trained.name, "--home", str(trained.parent), "--host", "0.0.0.0"]) == 2
    assert "others reach the server; set NNXDSL_API_KEY" in capsys.readouterr().err


@pytest.mark.extended
def test_weights_come_from_directories_below_one_alone(tmp_path: Path, trained: Path) -> None:
    root = tmp_path / "weights"
    exported = export(trained, root / "same").directory
    (root / "file").write_text("")
    (root / "link").symlink_to("/")
    other = Experiment(
        name="other",
        model=Model.Llama3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(trained.parent.parent / "texts.jsonl"), max_length=48),
        batch_size=4,
        steps=1,
    )
    export(run(other, tmp_path / "runs", Display(quiet=True)).directory, root / "other")
    model = nnxdsl.load(exported)
    before = model.leaves
    client = TestClient(make_app(model, "tiny", "a key", root))

    def call(path: str, **fields: object) -> tuple[int, str]:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}, **fields}
        answer = client.post("/collective_rpc", json=body, headers=KEY)
        return answer.status_code, answer.text

    assert call(str(exported)) == (200, '{"results":[null]}')
    assert model.leaves is not before
    loaded = model.leaves
    for path in (str(tmp_path), str(root), "/etc", str(root / "link"), str(root / ".." / "runs")):
        assert call(path)[0] == 403, path
    for path, message in (
        ("gone", "is no directory"),
        ("file", "is no directory"),
        ("other", "of another architecture"),
    ):
        status, text = call(str(root / path))
        assert (status, message in text) == (400, True), text
    assert call(str(exported), method="shutdown")[0] == 400
    assert client.post("/collective_rpc", json={}).status_code == 401
    assert model.leaves is loaded
    assert TestClient(make_app(model, "tiny")).post("/collective_rpc", json={}).status_code == 404
