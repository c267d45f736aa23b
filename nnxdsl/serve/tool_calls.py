"""Tool calls of an answer to a chat, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
from typing import Any

import attrs

from nnxdsl.data.tokenizers.messages import Tools
from nnxdsl.data.tokenizers.tool_calls import Reader, ToolCall, typed_arguments
from nnxdsl.serve.choices import Choice


@attrs.frozen
class ToolCalls:
    """Reads the calls of a request's tools.

    Attributes:
        tools: The functions.
        read: Reads calls in the format of the chat template.
    """

    tools: Tools
    read: Reader

    def message(self, choice: Choice) -> dict[str, Any] | None:
        """The assistant's message of a choice that has ended; None where it calls nothing, or in no form that is read.

        Args:
            choice: The choice. Chat templates may write calls in special tokens, which its text is without.
        """
        ids = [token for token in choice.ids if token not in choice.stop_ids]
        text = choice.tokenizer.decode(ids, skip_special=False)
        calls = self.read(text)
        if not calls or any(not call.name or call.arguments is None for call in calls):
            return None
        content = text[: calls[0].start].strip()
        return {"role": "assistant", "content": content or None, "tool_calls": [self._written(call) for call in calls]}

    def _written(self, call: ToolCall) -> dict[str, Any]:
        schema = next((x["function"]["parameters"] for x in self.tools if x["function"]["name"] == call.name), {})
        arguments = json.dumps(typed_arguments(call.arguments or {}, schema), ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
