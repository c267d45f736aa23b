"""New weights for a server: from directories below the one that it was started with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import attrs
from pydantic import BaseModel, ConfigDict

from nnxdsl.errors import NnxdslError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.serve.errors import Refused


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


@attrs.frozen(eq=False)
class ServedWeights:
    """Loads weights into a model that is served.

    Attributes:
        model: The model.
        directory: What is loaded lies below it.
    """

    model: Pretrained
    directory: Path
    _lock: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    async def call(self, call: RemoteCall) -> dict[str, Any]:
        """`POST /collective_rpc`: answers once requests that come later are answered by the new weights.

        Raises:
            Refused: The directory lies elsewhere, or does not hold a model of this architecture.
        """
        path, root = Path(call.kwargs.weights_path).resolve(), self.directory.resolve()
        if path == root or not path.is_relative_to(root):
            raise Refused(
                f"{path} is not below {self.directory}, where weights are read from", "kwargs.weights_path", 403
            )
        if not path.is_dir():  # what is none might be the name of a repository on the Hub
            raise Refused(f"{path} is no directory", "kwargs.weights_path")
        async with self._lock:
            try:
                await asyncio.to_thread(self.model.reload, path)
            except (NnxdslError, OSError) as error:
                raise Refused(str(error), "kwargs.weights_path") from error
        return {"results": [None]}
