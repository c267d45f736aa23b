"""Bodies of requests in OpenAI's protocol, and the fields that vLLM adds to it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nnxdsl.data.tokenizers.messages import Tools
from nnxdsl.generate.sampling import Sampling

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
MOST_PROMPT_LOGPROBS = 1024
MOST_STOPS = 16
MOST_COMPLETIONS = 1024
"""Most completions of a request."""
LEAST_TEMPERATURE = 1e-3
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields that are not supported, and the values that change nothing; None is one for all."""


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_usage: Whether the last event has the numbers of tokens.
    """

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of requests have in common.

    Attributes:
        model: Name of the served model; None for whichever it is.
        max_tokens: Most tokens of a completion, its stop token included.
        temperature: 0 for greedy decoding.
        top_p: See `Sampling`; 1 for all tokens.
        top_k: See `Sampling`; 0 or -1 for all tokens.
        min_p: See `Sampling`; 0 for all tokens.
        n: Completions of each prompt.
        seed: The same seed and prompt give the same completions; None for random ones.
        stop: Texts that end a completion, and are no part of it.
        stop_token_ids: Token ids that end a completion, beside those of the tokenizer.
        stream: Whether text is sent as it is decoded.
        stream_options: Options of that.
        return_token_ids: Whether choices have token ids.
        user: Has no effect, as in OpenAI's protocol.
    """

    model_config = ConfigDict(extra="forbid")
    default_tokens: ClassVar[int | None] = None
    """Most tokens where a request does not say it; None for as many as fit."""
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED
    """See `_UNSUPPORTED`."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, lt=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        """Refuses what would have no effect; leaves out fields with values that change nothing."""
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported.keys() & data.keys():
            if data[name] is not None and data[name] not in cls.unsupported[name]:
                raise ValueError(f"{name} is not supported; leave it out")
        return {name: value for name, value in data.items() if name not in cls.unsupported and value is not None}

    @field_validator("stop")
    @classmethod
    def _require_text(cls, stop: str | list[str]) -> str | list[str]:
        if "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop cannot be empty")
        return stop

    @field_validator("temperature")
    @classmethod
    def _require_warmth(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"expected 0, or at least {LEAST_TEMPERATURE}")
        return temperature

    @property
    def stops(self) -> list[str]:
        """Texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def top(self) -> int | None:
        """Most likely tokens of which log-probabilities are returned; None for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The settings of the sampler.

        Raises:
            ValueError: A setting has no effect.
        """
        if self.temperature == 0:  # OpenAI's clients send top_p=1 and others with it
            return Sampling(max_new_tokens)
        top_k = self.top_k if self.top_k > 0 else None
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(max_new_tokens, self.temperature, top_k, top_p, min_p=self.min_p or None)

    def seeded(self) -> int:
        """The seed, a random one where there is none."""
        return secrets.randbits(63) if self.seed is None else self.seed


class CompletionRequest(Request):
    """A request for completions of texts or token ids.

    Attributes:
        prompt: A text, token ids, or several of either.
        echo: Whether choices begin with the prompt.
        logprobs: Number of most likely tokens that have log-probabilities beside the sampled one; None for none at all.
        prompt_logprobs: Number of most likely tokens that have log-probabilities, by token id, at each place of the
            prompt, beside the token that is there; as of vLLM. None for none at all.
    """

    default_tokens: ClassVar[int | None] = 16
    unsupported = {**_UNSUPPORTED, "tools": ([],), "tool_choice": ("none",)}

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_PROMPT_LOGPROBS)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts."""
        one: Any = self.prompt
        return [one] if isinstance(one, str) or not one or isinstance(one[0], int) else one

    @property
    def top(self) -> int | None:
        """See `Request.top`."""
        return self.logprobs


class Message(BaseModel):
    """A message of a chat.

    Attributes:
        role: Whose it is.
        content: Its text, or parts of the type "text".
        tool_calls: What an assistant calls, as an answer has it.
        tool_call_id: Of the call whose result a message of the role "tool" is.
        name: Of the tool.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothing(cls, data: Any) -> Any:
        """Leaves out fields without a value, which OpenAI's own messages have."""
        return (
            {name: value for name, value in data.items() if value not in (None, [])} if isinstance(data, dict) else data
        )

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it; `read_messages` checks its parts and calls."""
        fields = self.model_dump(exclude_none=True)
        return fields if "tool_calls" in fields else {"content": "", **fields}


class Function(BaseModel):
    """A function of a tool.

    Attributes:
        name: Its name.
        description: What it does.
        parameters: JSON schema of its parameters.
        strict: False; calls are not constrained to the schema.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: Literal[False] | None = None


class Tool(BaseModel):
    """What a model may call.

    Attributes:
        type: "function".
        function: The function.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function


class ChatRequest(Request):
    """A request for answers to a chat.

    Attributes:
        messages: The chat; a last message of the assistant is continued.
        max_completion_tokens: The newer name of `max_tokens`.
        logprobs: Whether log-probabilities are returned.
        top_logprobs: As many of the most likely tokens have log-probabilities, beside the sampled one.
        tools: Functions that the model may call, each `{"type": "function", "function": {"name": ..., ...}}`.
        tool_choice: "none" leaves the tools out of the prompt, and calls are not read.
        chat_template_kwargs: Further arguments of the chat template.
    """

    unsupported = {**_UNSUPPORTED, "parallel_tool_calls": (True,), "prompt_logprobs": ()}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _require_tools(self) -> ChatRequest:
        if not self.tools and self.tool_choice == "auto" and "tool_choice" in self.model_fields_set:
            raise ValueError("tool_choice is 'auto', and there are no tools; add them, or leave it out")
        return self

    @property
    def functions(self) -> Tools | None:
        """The tools, as chat templates read them; None for none."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return tools if tools and self.tool_choice == "auto" else None

    @property
    def top(self) -> int | None:
        """See `Request.top`."""
        return (self.top_logprobs or 0) if self.logprobs else None
