"""New weights and adapters for a server: from directories below the one that it was started with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import attrs
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from nnxdsl.errors import NnxdslError
from nnxdsl.serve.errors import Refused
from nnxdsl.serve.server import Server


class ReloadArguments(BaseModel):
    """Arguments of `reload_weights`.

    Attributes:
        weights_path: A directory in the Hub's format, with a model of the served architecture.
        is_checkpoint_format: Of vLLM: whether names are those of the Hub.
    """

    model_config = ConfigDict(extra="forbid")

    weights_path: str
    is_checkpoint_format: Literal[True] = True


class RemoteCall(BaseModel):
    """The body of `/collective_rpc`, of which vLLM's servers have more methods.

    Attributes:
        method: What is called.
        kwargs: Its arguments.
    """

    model_config = ConfigDict(extra="forbid")

    method: Literal["reload_weights"]
    kwargs: ReloadArguments


class AdapterName(BaseModel):
    """The body of `/v1/unload_lora_adapter`.

    Attributes:
        lora_name: What clients call the adapter.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)


class NewAdapter(AdapterName):
    """The body of `/v1/load_lora_adapter`.

    Attributes:
        lora_path: A directory in PEFT's format, with an adapter of the served model.
    """

    lora_path: str


MOST_ADAPTERS = 16
"""At one time."""


@attrs.frozen(eq=False)
class ServedWeights:
    """Loads weights and adapters into a model that is served.

    Attributes:
        server: The server.
        directory: What is loaded lies below it.
    """

    server: Server
    directory: Path
    _lock: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    async def call(self, call: RemoteCall) -> dict[str, Any]:
        """`POST /collective_rpc`: answers once requests that come later are answered by the new weights.

        Adapters, which are merged into the old weights, are no longer served.

        Raises:
            Refused: The directory lies elsewhere, or does not hold a model of this architecture.
        """
        path = self._below(call.kwargs.weights_path, "kwargs.weights_path")
        async with self._lock:
            try:
                await asyncio.to_thread(self.server.model.reload, path)
            except (NnxdslError, OSError) as error:
                raise Refused(str(error), "kwargs.weights_path") from error
            self.server.adapters.clear()
        return {"results": [None]}

    async def load_adapter(self, new: NewAdapter) -> Response:
        """`POST /v1/load_lora_adapter`: the model with the adapter is then another one, of this name.

        Raises:
            Refused: The name is taken, there are too many, or the directory does not hold an adapter of the model.
        """
        path, server = self._below(new.lora_path, "lora_path"), self.server
        async with self._lock:
            if new.lora_name in (server.name, *server.adapters):
                raise Refused(f"{new.lora_name!r} is served already; unload it, or choose another name", "lora_name")
            if len(server.adapters) >= MOST_ADAPTERS:
                raise Refused(f"{MOST_ADAPTERS} adapters are served already; unload one", "lora_name")
            try:
                server.adapters[new.lora_name] = await asyncio.to_thread(server.model.with_adapter, path)
            except (NnxdslError, OSError) as error:
                raise Refused(str(error), "lora_path") from error
        return Response(f"Success: LoRA adapter '{new.lora_name}' added successfully.")

    async def unload_adapter(self, adapter: AdapterName) -> Response:
        """`POST /v1/unload_lora_adapter`: completions that are sampled with it already go on.

        Raises:
            Refused: There is none of this name.
        """
        async with self._lock:
            if self.server.adapters.pop(adapter.lora_name, None) is None:
                raise Refused(f"no adapter {adapter.lora_name!r} is served", "lora_name", 404)
        return Response(f"Success: LoRA adapter '{adapter.lora_name}' removed successfully.")

    def _below(self, directory: str, field: str) -> Path:
        """An existing directory that weights may be read from."""
        path, root = Path(directory).resolve(), self.directory.resolve()
        if path == root or not path.is_relative_to(root):
            raise Refused(f"{path} is not below {self.directory}, where weights are read from", field, 403)
        if not path.is_dir():  # what is none might be the name of a repository on the Hub
            raise Refused(f"{path} is no directory", field)
        return path
