"""An answer to a request: its choices while they are sampled."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import attrs

from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.serve.batches import Row
from nnxdsl.serve.choices import Choice
from nnxdsl.serve.requests import Request


@attrs.define(eq=False)
class Answer:
    """The choices of a request while they are sampled.

    Attributes:
        request: The request.
        model: Answers it.
        prompts: Token ids of each prompt.
        choices: The completions, those of a prompt one after another.
        rows: The row of each.
        pieces: The pieces of all rows, with the number of the row.
        created: When the request came, in seconds since 1970.
    """

    request: Request
    model: Pretrained
    prompts: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    rows: Sequence[Row]
    pieces: asyncio.Queue[tuple[int, Piece | Exception]]
    created: int = attrs.field(factory=lambda: int(time.time()))
    id: str = attrs.field(factory=lambda: secrets.token_hex(12))

    async def __aiter__(self) -> AsyncIterator[int]:
        """The number of each choice that has got tokens, until all have ended."""
        while any(choice.finish_reason is None for choice in self.choices):
            number, piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if self.choices[number].finish_reason is None:
                self.choices[number].add(piece)
                self.rows[number].is_cancelled = self.choices[number].finish_reason is not None
                yield number

    def cancel(self) -> None:
        """Ends what is still sampled."""
        for row in self.rows:
            row.is_cancelled = True

    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        prompt, new = sum(map(len, self.prompts)), sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
