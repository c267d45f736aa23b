"""Answers to requests for completions and chats."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import attrs
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.data.tokenizers.messages import read_messages
from nnxdsl.data.tokenizers.tool_calls import reader_of
from nnxdsl.errors import DataError
from nnxdsl.generate.pretrained import Pretrained, TokenLogps
from nnxdsl.generate.sampler import Piece
from nnxdsl.serve.answers import Answer
from nnxdsl.serve.batches import Batches, PauseMode, Row, numbers_of
from nnxdsl.serve.choices import Choice, most_likely, of_chat, of_completion, of_prompt
from nnxdsl.serve.errors import Refused, error_body
from nnxdsl.serve.requests import MOST_COMPLETIONS, ChatRequest, CompletionRequest, Request
from nnxdsl.serve.tool_calls import ToolCalls

LISTEN_EVERY = 0.5
"""Seconds between two looks at whether a client is still there."""


@attrs.define(eq=False)
class Server:
    """Answers requests with a model, or with one of its adapters.

    Attributes:
        model: The model.
        name: What clients call it.
        batches: Samples.
        adapters: The model with an adapter merged, by the name of the adapter.
    """

    model: Pretrained
    name: str
    batches: Batches = attrs.field(factory=Batches)
    adapters: dict[str, Pretrained] = attrs.field(factory=dict)
    _scoring: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    async def completions(self, request: CompletionRequest, client: HTTPRequest) -> Response:
        """`POST /v1/completions`."""
        if request.stream and (request.echo or request.logprobs or request.prompt_logprobs is not None):
            message = "echo and logprobs above 0 are computed at the end, as prompt_logprobs are; leave stream out"
            raise Refused(message, "stream")
        if (request.prompt_logprobs or 0) > (size := self.model.config.vocab_size):
            raise Refused(f"expected at most the {size:,} tokens of the vocabulary", "prompt_logprobs")
        if len(request.prompts) * request.n > MOST_COMPLETIONS:
            raise Refused(f"expected at most {MOST_COMPLETIONS:,} completions; ask for fewer at a time", "prompt")
        prompts = await asyncio.to_thread(lambda: [self._ids(prompt) for prompt in request.prompts])
        answer = self._submit(request, prompts)
        if request.stream:
            return self._stream(answer, "text_completion", lambda _, text: {"text": text})
        await self._finish(answer, client)
        choices = [await self._completion(answer, number, client) for number in range(len(answer.choices))]
        return JSONResponse(self._body(answer, "text_completion", choices))

    async def chat(self, request: ChatRequest, client: HTTPRequest) -> Response:
        """`POST /v1/chat/completions`."""
        if request.max_completion_tokens is not None:
            request = request.model_copy(update={"max_tokens": request.max_completion_tokens})
        if request.max_tokens == 0:
            raise Refused("expected at least 1", "max_tokens")
        if request.top_logprobs is not None and not request.logprobs:
            raise Refused("has no effect without logprobs; set logprobs", "top_logprobs")
        if request.stream and request.top:
            raise Refused("top_logprobs are computed at the end; leave stream out", "stream")
        ids, calls = await asyncio.to_thread(self._chat_ids, request)
        answer = self._submit(request, [ids])
        if request.stream:
            first = {"delta": {"role": "assistant", "content": ""}}
            write = partial(_delta, calls=calls)
            return self._stream(answer, "chat.completion.chunk", write, first, is_whole=calls is not None)
        await self._finish(answer, client)
        choices = [await self._message(answer, number, calls, client) for number in range(len(answer.choices))]
        body = self._body(answer, "chat.completion", choices)
        if request.return_token_ids:
            body["prompt_token_ids"] = list(answer.prompts[0])
        return JSONResponse(body)

    async def pause(self, mode: PauseMode = "abort") -> dict[str, Any]:
        """`POST /pause`: requests that come later wait for `/resume`."""
        await asyncio.to_thread(self.batches.pause, mode)
        return {"status": "paused"}

    def resume(self) -> dict[str, Any]:
        """`POST /resume`."""
        self.batches.resume()
        return {"status": "resumed"}

    def is_paused(self) -> dict[str, Any]:
        """`GET /is_paused`."""
        return {"is_paused": self.batches.is_paused}

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        same = {"object": "model", "owned_by": "nnxdsl", "max_model_len": self.model.config.max_length}
        adapters = [{"id": name, **same, "parent": self.name} for name in self.adapters]
        return {"object": "list", "data": [{"id": self.name, **same}, *adapters]}

    def _ids(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt."""
        try:
            ids = Encoder(self.model.tokenizer).prompt(prompt) if isinstance(prompt, str) else prompt
        except (RowError, DataError, UnicodeError) as error:
            raise Refused(str(error), "prompt") from error
        size = self.model.config.vocab_size
        if not ids:
            raise Refused("expected at least one token", "prompt")
        if odd := [token for token in ids if not 0 <= token < size]:
            raise Refused(f"{odd[0]} is no token id; expected 0 to {size - 1:,}", "prompt")
        return ids

    def _chat_ids(self, request: ChatRequest) -> tuple[list[int], ToolCalls | None]:
        """Token ids of a chat, and what reads the calls of its tools."""
        encoder, tools = Encoder(self.model.tokenizer, template_args=request.chat_template_kwargs), request.functions
        try:
            messages = read_messages([message.plain() for message in request.messages], "messages")
            calls = None if tools is None else ToolCalls(tools, reader_of(encoder.template(tools), tools))
            return encoder.prompt(messages, tools), calls
        except (RowError, DataError, ValueError) as error:  # a UnicodeError is a ValueError
            raise Refused(str(error), "messages") from error

    def _submit(self, request: Request, prompts: Sequence[list[int]]) -> Answer:
        """Begins an answer.

        Raises:
            Refused: It does not fit into the model's positions, a setting has no effect, or too many requests wait.
        """
        config, model = self.model.config, self._named(request.model)
        if request.top_k > config.vocab_size:
            raise Refused(f"{request.top_k:,} exceeds the {config.vocab_size:,} tokens of the vocabulary", "top_k")
        if odd := [token for token in request.stop_token_ids if not 0 <= token < config.vocab_size]:
            raise Refused(f"{odd[0]} is no token id", "stop_token_ids")
        if request.stream_options is not None and not request.stream:
            raise Refused("has no effect without stream", "stream_options")
        stops, loop = {*stop_ids(self.model.tokenizer), *request.stop_token_ids}, asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

        def listener(number: int) -> Callable[[Piece | Exception], None]:
            def deliver(piece: Piece | Exception) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                    loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

            return deliver

        seed, rows, choices = request.seeded(), list[Row](), list[Choice]()
        for prompt in prompts:
            new = self._limit(request, prompt)
            sampling = request.sampling(max(new, 1))
            for numbers in numbers_of(seed, prompt, request.n):
                choices.append(Choice(self.model.tokenizer, request.stops, stops))
                choices[-1].finish_reason = None if new else "length"
                rows.append(Row(model, prompt, sampling, numbers, listener(len(rows)), not new))
        if not self.batches.submit([row for row in rows if not row.is_cancelled]):
            raise Refused("too many requests wait; ask again later", status=429)
        return Answer(request, model, prompts, choices, rows, pieces)

    def _named(self, name: str | None) -> Pretrained:
        """The model, or the one with the adapter of that name."""
        if name in (None, self.name):
            return self.model
        if name not in self.adapters:
            served = ", ".join(map(repr, (self.name, *self.adapters)))
            raise Refused(f"the model {name!r} is not served here, but {served}", "model", 404)
        return self.adapters[name]

    def _limit(self, request: Request, prompt: Sequence[int]) -> int:
        """Most tokens of a completion of a prompt."""
        config = self.model.config
        new = request.default_tokens if request.max_tokens is None else request.max_tokens
        new = max(config.max_length - len(prompt), 1) if new is None else new
        if len(prompt) + new > config.max_length:
            message = f"{len(prompt):,} tokens and {new:,} new ones are more than the model's {config.max_length:,}"
            raise Refused(f"{message} positions; shorten the prompt, or lower max_tokens", "max_tokens")
        if new and (problem := config.generation_problem(len(prompt), new)):
            raise Refused(problem, "max_tokens")
        return new

    async def _finish(self, answer: Answer, client: HTTPRequest) -> None:
        """Waits for the end, or for the client's."""

        async def wait() -> None:
            async for _ in answer:
                pass

        waiting = asyncio.create_task(wait())
        try:
            while not (await asyncio.wait([waiting], timeout=LISTEN_EVERY))[0]:
                await _require_client(client)
            waiting.result()
        finally:
            waiting.cancel()
            answer.cancel()

    def _stream(
        self,
        answer: Answer,
        kind: str,
        write: Callable[[Choice, str], dict[str, Any]],
        first: dict[str, Any] | None = None,
        *,
        is_whole: bool = False,
    ) -> Response:
        """Events of a growing answer.

        Args:
            answer: The answer.
            kind: Its name in the protocol.
            write: The fields of new text in an event.
            first: Fields of the first event of each choice.
            is_whole: Whether a choice is sent at its end.
        """

        def event(choices: list[dict[str, Any]], **fields: Any) -> str:
            return f"data: {json.dumps({**self._body(answer, kind, choices, usage=False), **fields})}\n\n"

        async def events() -> AsyncIterator[str]:
            try:
                if first is not None:
                    for number in range(len(answer.choices)):
                        yield event([{"index": number, **first, "finish_reason": None}])
                for number, choice in enumerate(answer.choices):
                    if choice.finish_reason is not None:  # no token is wanted
                        yield event([{"index": number, "finish_reason": choice.finish_reason, **write(choice, "")}])
                sent = [0] * len(answer.choices)
                async for number in answer:
                    choice, start = answer.choices[number], sent[number]
                    text = "" if is_whole and choice.finish_reason is None else choice.take()
                    if not text and choice.finish_reason is None:
                        continue
                    sent[number] = len(choice.ids)
                    body = {"index": number, "finish_reason": choice.finish_reason, **write(choice, text)}
                    if answer.request.top is not None:
                        make = of_chat if "delta" in body else of_completion
                        ids, logps = choice.ids[start:], choice.logps[start:]
                        body["logprobs"] = make(self.model.tokenizer, ids, logps, None)
                    if answer.request.return_token_ids:
                        body["token_ids"] = choice.ids[start:]
                    yield event([body])
                options = answer.request.stream_options
                if options is not None and options.include_usage:
                    yield event([], usage=answer.usage())
                yield "data: [DONE]\n\n"
            except Exception as error:  # the status is sent, so that the end of the stream has to say it
                yield f"data: {json.dumps(error_body(500, str(error)))}\n\n"
            finally:
                answer.cancel()

        return StreamingResponse(events(), media_type="text/event-stream")

    def _body(self, answer: Answer, kind: str, choices: list[dict[str, Any]], *, usage: bool = True) -> dict[str, Any]:
        """What all answers have."""
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        same = {"id": f"{prefix}-{answer.id}", "object": kind, "created": answer.created}
        same["model"] = answer.request.model or self.name
        return {**same, "choices": choices, **({"usage": answer.usage()} if usage else {})}

    async def _completion(self, answer: Answer, number: int, client: HTTPRequest) -> dict[str, Any]:
        """A choice of a completion."""
        request, choice, tokenizer = answer.request, answer.choices[number], self.model.tokenizer
        assert isinstance(request, CompletionRequest)
        prompt = answer.prompts[number // request.n]
        text, logprobs = choice.text, None
        if request.echo:
            prompt_ids = request.prompts[number // request.n]
            text = (prompt_ids if isinstance(prompt_ids, str) else tokenizer.decode(prompt, skip_special=False)) + text
        if request.logprobs is not None:
            ids = [*prompt, *choice.ids] if request.echo else choice.ids
            logps: list[float | None] = [*choice.logps]
            top: list[dict[str, float] | None] | None = None
            if request.echo or request.logprobs:
                logps, top = await self._scored(answer, [*prompt, *choice.ids], len(ids), client)
            logprobs = of_completion(tokenizer, ids, logps, top if request.logprobs else None)
        body = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if request.prompt_logprobs is not None:
            prompt_logps = await self._token_logps(answer, prompt, request.prompt_logprobs, client)
            body["prompt_logprobs"] = await asyncio.to_thread(of_prompt, tokenizer, prompt, prompt_logps)
        if request.return_token_ids:
            body |= {"token_ids": choice.ids, "prompt_token_ids": list(prompt)}
        return body

    async def _message(
        self, answer: Answer, number: int, calls: ToolCalls | None, client: HTTPRequest
    ) -> dict[str, Any]:
        """A choice of a chat, in which `calls` reads tool calls."""
        request, choice = answer.request, answer.choices[number]
        logprobs = None
        if request.top is not None:
            logps: Any = choice.logps
            top: Any = None
            if request.top:
                whole = [*answer.prompts[0], *choice.ids]
                logps, top = await self._scored(answer, whole, len(choice.ids), client)
            logprobs = of_chat(self.model.tokenizer, choice.ids, logps, top)
        called = None if calls is None else calls.message(choice)
        message = called or {"role": "assistant", "content": choice.text}
        finish_reason = "tool_calls" if called else choice.finish_reason
        body = {"index": number, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        if request.return_token_ids:
            body["token_ids"] = choice.ids
        return body

    async def _scored(
        self, answer: Answer, ids: Sequence[int], count: int, client: HTTPRequest
    ) -> tuple[list[float | None], list[dict[str, float] | None]]:
        """Log-probabilities of the last `count` tokens, and the most likely ones; None for a first token."""
        token_logps = await self._token_logps(answer, ids, answer.request.top or 0, client)
        logps: list[float | None] = [None, *token_logps.logps.tolist()]
        each: list[dict[str, float] | None] = [None, *most_likely(self.model.tokenizer, ids[1:], token_logps)]
        return logps[-count:] if count else [], each[-count:] if count else []

    async def _token_logps(self, answer: Answer, ids: Sequence[int], top: int, client: HTTPRequest) -> TokenLogps:
        """Log-probabilities of all tokens but the first, and of so many of the most likely ones."""
        async with self._scoring:  # one pass at a time
            await _require_client(client)
            return await asyncio.to_thread(answer.model.token_logps, ids, top, answer.request.temperature or 1.0)


def _delta(choice: Choice, text: str, calls: ToolCalls | None) -> dict[str, Any]:
    """The fields of new text of a chat; with `calls`, of a message that has ended."""
    called = None if calls is None else calls.message(choice)
    if called is None:
        return {"delta": {"content": text}}
    numbered = [{"index": number, **call} for number, call in enumerate(called["tool_calls"])]
    return {"delta": {"content": called["content"], "tool_calls": numbered}, "finish_reason": "tool_calls"}


async def _require_client(client: HTTPRequest) -> None:
    """Refuses to go on for a client that is gone."""
    if await client.is_disconnected():
        raise Refused("the client is gone", status=499)
