"""Objects whose methods are tools: what a completion calls is run, and the results are what the policy reads next."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import attrs

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.messages import Message, Tools
from nnxdsl.data.tokenizers.special_tokens import SpecialTokenGuard
from nnxdsl.data.tokenizers.tool_calls import Reader, ToolCall, typed_arguments
from nnxdsl.rollouts.reply import Reply


@attrs.frozen
class ToolUse:
    """Runs the tool calls of completions, as TRL does with its `environment_factory`.

    Attributes:
        tools: Schemas of the methods.
        read: Reads calls in the format of the chat template.
        guard: Finds special tokens in results.
    """

    tools: Tools
    read: Reader
    guard: SpecialTokenGuard

    def reply(self, environment: Any, text: str) -> Reply:
        """The results of the calls in a completion; without one the episode is over.

        What raises, is called with other arguments or does not exist is an error for the policy to read.
        """
        calls = self.read(text)
        if not calls:
            return Reply(done=True)
        results = [self._result(environment, call) for call in calls]
        named = [(f"call{number:05}", call, self._name(call)) for number, call in enumerate(calls, start=1)]
        messages: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": key, "content": content}
            for (key, _, name), (content, _) in zip(named, results, strict=True)
        ]
        written = {
            "content": text[: calls[0].start].rstrip(),
            "tool_calls": [
                {"id": key, "type": "function", "function": {"name": name, "arguments": call.arguments or {}}}
                for key, call, name in named
            ],
        }
        return Reply(messages, calls=len(calls), failures=sum(failed for _, failed in results), completion=written)

    def _result(self, environment: Any, call: ToolCall) -> tuple[str, bool]:
        """The text of a result, and whether the call failed."""
        try:
            return self.guard.text(_text(self._called(environment, call)), "result"), False
        except Exception as error:
            message = str(error) or type(error).__name__
            try:
                return self.guard.text(json.dumps({"error": message}, ensure_ascii=False), "result"), True
            except RowError:
                return json.dumps({"error": type(error).__name__}), True

    def _called(self, environment: Any, call: ToolCall) -> Any:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if call.name not in schemas:
            raise LookupError(f"there is no tool '{call.name}'; there are: {', '.join(schemas)}")
        if call.arguments is None:
            raise ValueError("the arguments are no JSON object")
        result = getattr(environment, call.name)(**typed_arguments(call.arguments, schemas[call.name]))
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _name(self, call: ToolCall) -> str:
        """The name of a call, which the model may have invented, as the chat template may write it."""
        try:
            return self.guard.text(call.name, "name") or "unknown"
        except RowError:
            return "unknown"


async def _awaited(result: Any) -> Any:
    return await result


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
