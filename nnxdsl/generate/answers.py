"""Outputs of a policy and a comparison model as JSON values: completions, per-token log-probs, held-out pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from nnxdsl.data.batch import SequenceBatch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import BytesTokenizer, TokenizerBase
from nnxdsl.data.tokenizers.encode import stop_ids
from nnxdsl.errors import RunError
from nnxdsl.generate.model_pair import REFERENCE, UNTRAINED, ModelPair
from nnxdsl.generate.sampling import Sampling
from nnxdsl.generate.streaming import Partial, PartialText, Tell, stream, warm_up
from nnxdsl.losses.base import PairLogps
from nnxdsl.runs.run_dir import RunDirectory

CONTEXT = 8
"""Preceding tokens that are decoded with a token, since they can change its text (a leading space, for example)."""

ROUND_TO = 64
"""Texts are padded to a multiple of this many tokens, so that similar lengths share a compiled program."""

MOST_SAMPLES = 16
"""Maximum number of completions per model and prompt."""

SHOWN = 600
"""Maximum number of characters of a text in a table."""

FIRST_ROWS = 64
"""Number of pairs on which the initial policy is compared with the reference."""

ROLES = ("system", "user", "assistant")

SIDES = ("chosen", "rejected")


def generate(models: ModelPair, request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Sample completions of one prompt from both models with the same random keys.

    Args:
        models: Policy and comparison model.
        request: "prompt" and "chat" (true, false, or null for the format of the run's data); or "row", the id of a
            held-out row; or "messages", a chat `[{"role": ..., "content": ...}]` for the chat template.
            Settings of `Sampling`: "max_new_tokens", "temperature" and so on; "samples" per model, 1 to 16; "sides",
            those of "policy" and "other" that are sampled from, by default both.
        tell: Progress callback, which also gets the text so far.

    Raises:
        RunError: the prompt is empty or too long, or a setting is out of range.
    """
    prompt = _prompt(models, request)
    try:
        sampling = Sampling(
            int(request.get("max_new_tokens", 64)),
            float(request.get("temperature", 0.0)),
            request.get("top_k"),
            request.get("top_p"),
            int(request.get("seed", 0)),
            int(request.get("num_speculative_tokens", 0)),
        )
    except ValueError as error:
        raise RunError(str(error)) from error
    room = models.program.blueprint.config.max_length
    if len(prompt) + sampling.max_new_tokens > room:
        raise RunError(
            f"{len(prompt):,} prompt tokens and {sampling.max_new_tokens:,} new tokens exceed the model's {room:,} "
            "positions; shorten the prompt, or lower max_new_tokens"
        )
    samples = int(request.get("samples", 1))
    if not 1 <= samples <= MOST_SAMPLES or (samples > 1 and not sampling.temperature):
        raise RunError(f"samples: expected 1 to {MOST_SAMPLES}, and 1 at temperature 0 (greedy), got {samples}")
    wanted = request.get("sides", list(models.models()))
    if not isinstance(wanted, list) or not wanted or not set(wanted) <= set(models.models()):
        raise RunError(f"sides: expected a list of {', '.join(models.models())}, got {wanted!r}")
    sides: dict[str, Any] = {}
    partial: dict[str, Partial] = {}
    for name in models.models():
        if name not in wanted:
            continue
        stage = f"sampling from {'the policy' if name == 'policy' else models.other.name}"
        tell(stage)
        try:
            warm_up(models, name, prompt, sampling, samples)
            began = time.perf_counter()
            texts = [PartialText(models.tokenizer) for _ in range(samples)]
            for now in stream(models, name, prompt, sampling, texts):
                partial[name] = now
                tell(stage, partial)
        except ValueError as error:
            raise RunError(str(error)) from error
        seconds = time.perf_counter() - began
        first, *more = (text.ids for text in texts)
        sides[name] = {
            **_completion(models, first),
            "seconds": seconds,
            "more": [_completion(models, ids) for ids in more],
        }
    return {
        **_who(models),
        "prompt_ids": prompt,
        "prompt_pieces": pieces(models.tokenizer, prompt),
        "special": _specials(models, prompt),
        "sampling": attrs.asdict(sampling),
        **sides,
    }


def _completion(models: ModelPair, ids: list[int]) -> dict[str, Any]:
    """One completion as text and as tokens."""
    stopped = bool(ids) and ids[-1] in stop_ids(models.tokenizer)
    return {
        "ids": ids,
        "text": models.tokenizer.decode(ids),
        "pieces": pieces(models.tokenizer, ids),
        "tokens": len(ids) - stopped,
        "stop": pieces(models.tokenizer, ids[-1:])[0] if stopped else None,
    }


def tokens(models: ModelPair, request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Compute per-token log-probabilities of a text under both models, teacher-forced.

    Args:
        models: Policy and comparison model.
        request: "row", the id of a held-out row; or "prompt", "text" and "chat"; or "prompt_ids" and "completion_ids".
        tell: Progress callback.

    Raises:
        RunError: the row does not exist, or the text is empty or too long.
    """
    tell("computing log-probs of both models")
    if request.get("row") and isinstance(models.held_out, Pairs):
        sides = _pair_sides(models, models.held_out, _index(models.held_out, str(request["row"])))
    elif request.get("row") and isinstance(models.held_out, Sequences):
        row = models.held_out.row(_index(models.held_out, str(request["row"])))
        sides = [_sequence_side(models, "text", row["tokens"].tolist(), row["target"].astype(bool).tolist())]
    elif request.get("completion_ids"):
        prompt, completion = _ids(models, request["prompt_ids"]), _ids(models, request["completion_ids"])
        sides = [
            _sequence_side(models, "text", [*prompt, *completion], [False] * len(prompt) + [True] * len(completion))
        ]
    else:
        sides = [_text_side(models, request)]
    tell("computing top-k tokens")
    return {**_who(models), "sides": [_with_alternatives(models, side) for side in sides]}


def pairs(models: ModelPair, request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Compute log-probabilities of the held-out pairs under both models, and the objective's reward metrics.

    Args:
        models: Policy and comparison model.
        request: "limit", the maximum number of rows.
        tell: Progress callback.

    Raises:
        RunError: the run has no held-out preference pairs.
    """
    data = models.held_out
    if not isinstance(data, Pairs):
        problem = "has no held-out data" if data is None else f"has held-out {type(data).__name__.lower()}"
        raise RunError(f"the experiment {problem}; this table needs preference pairs: set evaluation.data")
    count = min(len(data), int(request.get("limit", len(data))))
    size = models.program.blueprint.forward_batch_size
    rows: list[dict[str, Any]] = []
    largest = 0.0
    for start in range(0, count, size):
        tell(f"log-probs of {start:,} of {count:,} pairs computed")
        here = list(range(start, min(start + size, count)))
        batch = data.batch(here, size)
        policy, other = models.read(batch)
        assert isinstance(policy.loss_inputs, PairLogps)
        assert isinstance(other.loss_inputs, PairLogps)
        rewards = models.rewards(policy.loss_inputs, other.loss_inputs)
        policy_logps, other_logps = jax.device_get((policy.loss_inputs, other.loss_inputs))
        rows += [
            _pair_row(models, data, index, position, policy_logps, other_logps, rewards)
            for position, index in enumerate(here)
        ]
        if start < FIRST_ROWS:
            first = models.program.score(models.first, batch).token_stats if models.step else policy.token_stats
            difference = np.abs(np.asarray(first.logp) - np.asarray(other.token_stats.logp)) * np.asarray(first.mask)
            largest = max(largest, float(difference.max()))
    blueprint = models.program.blueprint
    moves = (
        blueprint.reference.has_own_weights
        or blueprint.reference.is_synced
        or models.other.name not in (REFERENCE, UNTRAINED)
    )
    return {
        **_who(models),
        "rows": rows,
        "total": len(data),
        "first": {
            "largest": largest,
            "rows": min(count, -(-FIRST_ROWS // size) * size),
            "expected": not moves,
            "compute": blueprint.compute.name,
        },
        "recorded": _recorded(models),
        "is_feedback": data.desirable is not None,
    }


def pieces(tokenizer: TokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode each token in its context; a token that is not printable by itself becomes `<0xC3>` or `<id 1234>`."""
    return [_piece(tokenizer, ids[max(0, position - CONTEXT) : position], token) for position, token in enumerate(ids)]


def _piece(tokenizer: TokenizerBase, before: Sequence[int], token: int) -> str:
    context = tokenizer.decode(before, skip_special=False)
    whole = tokenizer.decode([*before, token], skip_special=False)
    piece = whole[len(context) :] if whole.startswith(context) else tokenizer.decode([token], skip_special=False)
    if piece and "\ufffd" not in piece and (len(piece) > 1 or piece.isprintable() or piece in "\n\t\r"):
        return piece
    return f"<0x{token:02X}>" if isinstance(tokenizer, BytesTokenizer) and token < 256 else f"<id {token}>"


def _who(models: ModelPair) -> dict[str, Any]:
    experiment = models.program.experiment
    return {
        "run": models.directory.name,
        "step": models.step,
        "against": models.other.name,
        "objective": type(experiment.objective).__qualname__,
        "device": str(models.program.mesh.devices.flat[0].device_kind),
    }


def _recorded(models: ModelPair) -> dict[str, float]:
    """Evaluation metrics that the run logged at this step."""
    rows = [row for row in RunDirectory(models.directory).evaluations() if row.get("step") == models.step]
    return {name: value for name, value in (rows[-1] if rows else {}).items() if name.startswith("eval/")}


def _specials(models: ModelPair, ids: Sequence[int]) -> list[int]:
    """Indices of special tokens."""
    return [index for index, token in enumerate(ids) if token in models.tokenizer.special_ids]


def _ids(models: ModelPair, value: Any) -> list[int]:
    vocab_size = models.program.blueprint.config.vocab_size
    if not isinstance(value, list) or not all(isinstance(one, int) and 0 <= one < vocab_size for one in value):
        raise RunError(f"expected token ids below {vocab_size:,}")
    return value


def _index(data: Dataset, where: str) -> int:
    if where not in data.row_ids:
        raise RunError(f"{where}: no such held-out row, or it was dropped when the data was loaded")
    return data.row_ids.index(where)


def _chat_or_text(models: ModelPair, request: Mapping[str, Any], text: str) -> Any:
    is_chat = models.is_chat if request.get("chat") is None else bool(request["chat"])
    return [{"role": "user", "content": text}] if is_chat else text


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat, the last of which is a user's, or the assistant's to be continued."""

    def is_message(one: Any) -> bool:
        return isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str)

    if not isinstance(value, list) or not value or not all(map(is_message, value)) or value[-1]["role"] == "system":
        roles = ", ".join(ROLES)
        raise RunError(f"messages: expected roles ({roles}) with contents, the last one of the user or the assistant")
    return [{"role": one["role"], "content": one["content"]} for one in value]


def _prompt(models: ModelPair, request: Mapping[str, Any]) -> list[int]:
    if request.get("row"):
        data = models.held_out
        if not isinstance(data, Pairs | Prompts):
            raise RunError("the experiment has no held-out prompts: set evaluation.data")
        return data.row(_index(data, str(request["row"])))["prompt"].tolist()
    try:
        if "messages" in request:
            ids = models.encoder.prompt(_messages(request["messages"]))
        else:
            ids = models.encoder.prompt(_chat_or_text(models, request, str(request.get("prompt", ""))))
    except RowError as error:
        raise RunError(f"the prompt: {error}") from error
    if not ids:
        raise RunError("the prompt is empty; enter a prompt, or select a held-out row")
    return ids


def _pair_sides(models: ModelPair, data: Pairs, index: int) -> list[dict[str, Any]]:
    """Both completions of a pair, computed by the same compiled program as `pairs`, so that the numbers agree.

    Of completions of several turns, tokens that are no targets have no log-probability.
    """
    batch, row = data.batch([index], models.program.blueprint.forward_batch_size), data.row(index)
    both = [np.asarray(read.token_stats.logp[0]) for read in models.read(batch)]
    prompt, width, sides = row["prompt"].tolist(), batch.chosen.shape[1], []
    for number, name in enumerate(SIDES):
        completion = row[name].tolist()
        place, is_target = slice(number * width, number * width + len(completion)), data.mask(name, index)
        policy, other = (np.where(is_target, logps[place], np.nan) for logps in both)
        sides.append(_side(models, name, [*prompt, *completion], len(prompt), policy, other))
    return sides


def _text_side(models: ModelPair, request: Mapping[str, Any]) -> dict[str, Any]:
    prompt, text = str(request.get("prompt", "")), str(request.get("text", ""))
    if not text:
        raise RunError("the completion is empty; enter the text to compute log-probs of")
    rendered = _chat_or_text(models, request, prompt)
    try:
        if isinstance(rendered, str):
            split = models.encoder.split_text(prompt, (text,))
        else:
            split = models.encoder.split_chat(rendered, [{"role": "assistant", "content": text}])
    except RowError as error:
        raise RunError(f"the text: {error}") from error
    ids, begin = [*split.prompt, *split.completions[0]], len(split.prompt)
    return _sequence_side(models, "text", ids, [False] * begin + [True] * (len(ids) - begin))


def _sequence_side(models: ModelPair, name: str, ids: list[int], target: list[bool]) -> dict[str, Any]:
    """Log-probabilities of one text, from the first token of `target` (a mask over `ids`) to the end."""
    room = models.program.blueprint.config.max_length
    if len(ids) > room:
        raise RunError(f"{len(ids):,} tokens exceed the model's {room:,} positions; shorten it")
    begin = max(1, target.index(True)) if True in target else 1
    if len(ids) <= begin:
        raise RunError("the text has only one token; log-probs need at least two")
    width = min(room, -(-len(ids) // ROUND_TO) * ROUND_TO)
    row, mask = np.zeros((1, width), np.int32), np.zeros((1, width), bool)
    row[0, : len(ids)] = ids
    mask[0, begin : len(ids)] = True
    length = np.array([len(ids)], np.int32)
    policy, other = models.read(SequenceBatch(row, length, mask, np.ones(1, np.float32)))
    logps = (np.asarray(read.token_stats.logp[0])[begin - 1 : len(ids) - 1] for read in (policy, other))
    return _side(models, name, ids, begin, *logps)


def _side(
    models: ModelPair, name: str, ids: list[int], begin: int, policy: np.ndarray, other: np.ndarray
) -> dict[str, Any]:
    return {
        "name": name,
        "ids": ids,
        "pieces": pieces(models.tokenizer, ids),
        "special": _specials(models, ids),
        "begin": begin,
        "policy": _numbers(policy),
        "other": _numbers(other),
    }


def _with_alternatives(models: ModelPair, side: dict[str, Any]) -> dict[str, Any]:
    ids, begin = side["ids"], side["begin"]
    alternatives, table = models.alternatives(ids), {}
    for name, (best, policy, other) in alternatives.items():
        table[name] = [
            [
                [
                    _piece(models.tokenizer, ids[max(0, position - CONTEXT) : position], int(token)),
                    float(logp),
                    float(other_logp),
                ]
                for token, logp, other_logp in zip(
                    best[position - 1], policy[position - 1], other[position - 1], strict=True
                )
            ]
            for position in range(begin, len(ids))
        ]
    return {**side, "likeliest": table}


def _pair_row(
    models: ModelPair,
    data: Pairs,
    index: int,
    position: int,
    policy: PairLogps,
    other: PairLogps,
    rewards: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    row = data.row(index)
    return {
        "row": data.row_ids[index],
        **{name: models.tokenizer.decode(row[name])[:SHOWN] for name in ("prompt", *SIDES)},
        "prompt_tokens": len(row["prompt"]),
        **{f"{name}_tokens": int(data.mask(name, index).sum()) for name in SIDES},
        "policy": [float(policy.chosen_logps[position]), float(policy.rejected_logps[position])],
        "other": [float(other.chosen_logps[position]), float(other.rejected_logps[position])],
        "rewards": {name.removeprefix("rewards/"): _number(value[position]) for name, value in rewards.items()},
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    """A float; None for NaN and infinity, which JSON cannot represent."""
    number = float(value)
    return number if math.isfinite(number) else None
