"""KTO data: a prompt, a completion and a label in token ids, and a mismatched completion of another row."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import Feedback
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.build import build_dataset, load
from nnxdsl.data.loaders.completions import require_prompt, split_chat, split_ids, split_text, truncated, turns_after
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, other_forms, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError, kind_of
from nnxdsl.data.loaders.preferences import example as pair_example
from nnxdsl.data.loaders.preferences import require_pairs_fit
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.ragged import Ragged, RaggedBuilder
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, Split
from nnxdsl.data.tokenizers.messages import read_tools, require_no_media
from nnxdsl.errors import DataError

READS = (
    "Data.Feedback reads prompt/completion/label (text or messages), prompt_ids/completion_ids/label, or the pairs of "
    "Data.Preferences"
)
IDS = ("prompt_ids", "completion_ids")
PAIR_FIELDS = ("chosen", "rejected", "chosen_ids", "rejected_ids")
SINGLE_FIELDS = ("completion", "completion_ids", "label")
PARTS = ("prompt", "completion", "rejected", "label", "completion_mask", "rejected_mask")
MISMATCHED = {"chosen": "rejected", "chosen_mask": "rejected_mask"}
"""Parts of a completion, and those of the mismatched one beside it."""


@load.register(Feedback)
def load_feedback(
    data: Feedback,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
    cache: TokenCache | None = None,
) -> Pairs:
    """Labelled completions of a file; see `load`. Targets are the completions, whatever `loss_on`.

    The forms of a row are those of preference pairs, with one `completion` and its `label` (true or false, also as text
    or as 1 and 0); a row with `chosen` and
    `rejected` gives a desirable and an undesirable completion.

    Each completion gets a mismatched one for the KL estimate: the nearest one before it (cyclically) with the same
    label and another prompt. It does not depend on the order of training or on the batch, and most completions are
    used once. (TRL takes the previous one of a batch in the file's order.)

    Raises:
        DataError: As in `load`; or all rows have the same prompt.
    """
    encoder = Encoder.of(tokenizer, data, remedy="take it out, or give token ids")

    def convert(row: Fields) -> Example:
        if any(name in row for name in PAIR_FIELDS):
            pair = pair_example(row, encoder, data, vocabulary)
            prompt, chosen, rejected, *masks = pair.parts.values()
            parts = dict(zip(PARTS, (prompt, chosen, rejected, [1], *masks), strict=True))
            odd = (*pair.odd, *other_forms(row, "chosen/rejected", SINGLE_FIELDS))
            return pair._replace(
                parts=parts, cut=tuple("completion" if c == "chosen" else c for c in pair.cut), odd=odd
            )
        return _example(row, encoder, data, vocabulary)

    reads = {"prompt", "tools", *IDS, *PAIR_FIELDS, *SINGLE_FIELDS}
    rows = build_dataset(data, convert, PARTS, tokenizer=tokenizer, vocabulary=vocabulary, reads=reads, cache=cache)
    lengths = {name: n for name, n in rows.report.lengths.items() if n.total and name != "label"}
    rows = rows._replace(report=attrs.evolve(rows.report, lengths=lengths))
    singles, desirable = _split_pairs(rows)
    other = mismatched(singles.parts["prompt"], desirable)
    if other is None:
        raise DataError(
            f"{data.name}: all rows have the same prompt, so no completion can be paired with a mismatched one"
        )
    of_others = {
        mine: _select(singles.parts[single], other) for single, mine in MISMATCHED.items() if single in singles.parts
    }
    paired = singles.with_parts({**singles.parts, **of_others})
    require_pairs_fit(paired, max_position)
    pairs = Pairs(paired)
    pairs.desirable = desirable
    return pairs


def mismatched(prompts: Ragged, desirable: npt.NDArray[np.float32]) -> npt.NDArray[np.int64] | None:
    """[rows] for each row the nearest one before it (cyclically) with the same label and another prompt.

    If no row of that label has another prompt, the nearest one of the other label. None if all prompts are equal.
    """
    numbers: dict[bytes, int] = {}
    prompt_of = np.array([numbers.setdefault(prompts[row].tobytes(), len(numbers)) for row in range(len(prompts))])
    if len(numbers) < 2:
        return None
    mismatch = np.full(len(prompts), -1, np.int64)
    for members in (*(np.flatnonzero(desirable == label) for label in (1, 0)), np.arange(len(prompts))):
        before = -1
        for cycle in range(2):  # the first turn finds the one before the first row
            for place, row in enumerate(members):
                last = members[place - 1]
                before = last if prompt_of[last] != prompt_of[row] else before
                if cycle and mismatch[row] < 0 and before >= 0:
                    mismatch[row] = before
    return mismatch


def _split_pairs(rows: TokenizedRows) -> tuple[TokenizedRows, npt.NDArray[np.float32]]:
    """Single completions, two for each pair, in the order of the file; and [rows] 1 for desirable ones."""
    has_masks = any(name in rows.parts for name in PARTS[-2:])
    builders = {name: RaggedBuilder() for name in ("prompt", *MISMATCHED) if name != "chosen_mask" or has_masks}
    row_ids, desirable = [], []
    for row, row_id in enumerate(rows.row_ids):
        for name, label in (("completion", rows.parts["label"][row][0]), ("rejected", 0)):
            if not len(rows.parts[name][row]):
                continue
            builders["prompt"].add(rows.parts["prompt"][row].tolist())
            builders["chosen"].add(rows.parts[name][row].tolist())
            if has_masks:
                mask = rows.parts.get(f"{name}_mask")
                builders["chosen_mask"].add([] if mask is None else mask[row].tolist())
            row_ids.append(row_id)
            desirable.append(label)
    parts = {name: builder.build() for name, builder in builders.items()}
    return rows.with_parts(parts, row_ids), np.array(desirable, np.float32)


def _select(rows: Ragged, indices: npt.NDArray[np.int64]) -> Ragged:
    builder = RaggedBuilder()
    for row in indices:
        builder.add(rows[int(row)].tolist())
    return builder.build()


def _example(row: Fields, encoder: Encoder, data: Feedback, vocabulary: int | None) -> Example:
    is_ids = any(name in row for name in IDS)
    require(row, (*IDS, "label") if is_ids else ("prompt", "completion", "label"), READS)
    label = _label(row["label"])
    if is_ids:
        split, chat = split_ids(row, IDS, encoder, vocabulary), False
        odd = other_forms(row, "/".join(IDS), ("prompt", "completion", "tools"))
    else:
        split, chat, odd = _split(row, encoder)
    for name, ids in (("prompt", split.prompt), ("completion", split.completions[0])):
        _require(ids, name)
    single = truncated(split, ("completion",), data, None if is_ids else encoder.tokenizer.bos_id, odd, chat)
    return single._replace(parts={**single.parts, "rejected": [], "rejected_mask": [], "label": [int(label)]})


def _label(value: object) -> bool:
    """A label: true or false, 1 or 0, or a text of these, as CSV files have it."""
    name = value.strip().casefold() if isinstance(value, str) else value
    for label, names in ((True, (True, "true", "1")), (False, (False, "false", "0"))):
        if name in names:
            return label
    got = repr(value[:40]) if isinstance(value, str) else kind_of(value)
    raise RowError("wrong type", f"field 'label': expected true or false, got {got}")


def _require(value: object, name: str) -> None:
    if not value:
        raise RowError(f"empty {name}", f"the {name} is empty")


def _split(row: Fields, encoder: Encoder) -> tuple[Split, bool, tuple[str, ...]]:
    """A row of text or chats as ids, whether it is a chat, and warnings."""
    require_no_media(row)
    prompt, completion = (read_text_or_chat(row, name) for name in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        encoder.require_plain()
        prompt = encoder.guard.text(prompt, "prompt", opens=True)
        completion = encoder.guard.text(completion, "completion", ends=True)
        for name, text in (("prompt", prompt), ("completion", completion)):
            _require(text.strip(), name)
        split = split_text(prompt, {"completion": completion}, encoder)
        return split, False, other_forms(row, "plain text", ("tools",))
    context, tools = encoder.guard.chat(prompt, "prompt", "user"), encoder.guard.tools(read_tools(row))
    require_prompt(context)
    turns = turns_after("completion", encoder.guard.chat(completion, "completion", "assistant"), context)
    split, odd = split_chat(context, {"completion": turns}, tools, encoder)
    return split, True, odd
