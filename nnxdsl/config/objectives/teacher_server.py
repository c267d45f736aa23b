"""A server that gives the log-probabilities of a teacher, for on-policy distillation."""

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import filled, positive, server_url


@attrs.frozen(kw_only=True)
class TeacherServer(Spec):
    """A teacher behind `nnxdsl serve` or vLLM, on other devices or another machine.

    It is sent the token ids of prompts and completions, and returns the log-probability of each. Its model has the
    tokenizer of the one that is trained, and may be of any size and family.

    Attributes:
        url: Where it listens, without `/v1`.
        model: The model's name there; None for the first that the server names.
        api_key_variable: The environment variable with the key that the server asks for; it may be unset.
        timeout: Seconds that a request may take.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset({"url", "api_key_variable", "timeout"})

    url: str = attrs.field(kw_only=False, validator=server_url)
    model: str | None = attrs.field(default=None, validator=filled)
    api_key_variable: str = attrs.field(default="NNXDSL_API_KEY", validator=filled)
    timeout: float = attrs.field(default=600.0, validator=positive)
