"""Labelled answers: one prompt and one completion in token ids, and the completion of another row to compare with."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import Feedback
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.build import Example, build_dataset, load, require_fit
from nnxdsl.data.loaders.fields import Fields, other_forms, read_ids, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError, kind_of
from nnxdsl.data.loaders.preferences import answer, cut_left
from nnxdsl.data.loaders.preferences import example as pair_of
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.ragged import Ragged, RaggedBuilder
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, Split
from nnxdsl.data.tokenizers.messages import is_blank, read_tools
from nnxdsl.data.tokenizers.special_tokens import SpecialTokenGuard
from nnxdsl.errors import DataError

READS = (
    "Data.Feedback reads prompt/completion/label (text or messages), prompt_ids/completion_ids/label, or the pairs of "
    "Data.Preferences"
)
IDS = ("prompt_ids", "completion_ids")
OF_PAIRS = ("chosen", "rejected", "chosen_ids", "rejected_ids")
OWN = ("completion", "completion_ids", "label")


@load.register(Feedback)
def load_feedback(
    data: Feedback,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
) -> Pairs:
    """Labelled answers of a file; see `load`. `loss_on` has no meaning here: completions are always the targets.

    The forms of a row are those of preference pairs, with one `completion` and its `label`; a row with `chosen` and
    `rejected` is a desirable answer and an undesirable one.

    Beside its own completion each answer gets a mismatched one: that of the nearest answer before it, the last being
    before the first, which has the same label and another prompt. So each completion is another one's as a rule just
    once, and which it is does not depend on the order of the rows or on the batch. (TRL takes the one before it in
    batches of the file's order.)

    Raises:
        DataError: As of `load`; or all rows have the same prompt.
    """
    encoder, markers = Encoder(tokenizer), SpecialTokenGuard(tokenizer, cure="take it out, or give token ids")

    def convert(row: Fields) -> Example:
        if any(name in row for name in OF_PAIRS):
            pair = pair_of(row, encoder, markers, data, vocabulary)
            prompt, chosen, rejected = pair.parts.values()
            parts = {"prompt": prompt, "completion": chosen, "rejected": rejected, "label": [1]}
            odd = (*pair.odd, *other_forms(row, "chosen/rejected", OWN))
            return pair._replace(
                parts=parts, cut=tuple("completion" if c == "chosen" else c for c in pair.cut), odd=odd
            )
        return _example(row, encoder, markers, data, vocabulary)

    names = ("prompt", "completion", "rejected", "label")
    reads = {"prompt", "tools", *IDS, *OF_PAIRS, *OWN}
    rows = build_dataset(data, convert, names, tokenizer=tokenizer, vocabulary=vocabulary, reads=reads)
    shown = {name: n for name, n in rows.report.lengths.items() if n.total and name != "label"}
    rows = rows._replace(report=attrs.evolve(rows.report, lengths=shown))
    without_label, desirable = _split_label(rows)
    other = mismatched(without_label.parts["prompt"], desirable)
    if other is None:
        raise DataError(f"{data.path}: all rows have the same prompt, so none can be compared with a mismatched answer")
    completions = without_label.parts["chosen"]
    paired = without_label._replace(parts={**without_label.parts, "rejected": _taken(completions, other)})
    prompt, longest = (paired.parts[name].lengths for name in ("prompt", "chosen"))
    longest = longest.clip(min=paired.parts["rejected"].lengths)
    require_fit(prompt + longest, paired, max_position, "lower data.max_prompt_length or data.max_completion_length")
    answers = Pairs(paired)
    answers.desirable = desirable
    return answers


def mismatched(prompts: Ragged, desirable: npt.NDArray[np.float32]) -> npt.NDArray[np.int64] | None:
    """[rows] for each row the nearest before it, in a ring, with the same label and another prompt.

    Where no row of that label has another prompt, it is the nearest of the other label. None if all prompts are one.
    """
    numbers: dict[bytes, int] = {}
    same = np.array([numbers.setdefault(prompts[row].tobytes(), len(numbers)) for row in range(len(prompts))])
    if len(numbers) < 2:
        return None
    found = np.full(len(prompts), -1, np.int64)
    for members in (*(np.flatnonzero(desirable == label) for label in (1, 0)), np.arange(len(prompts))):
        before = -1
        for turn in range(2):  # the first turn finds what is before the first row
            for place, row in enumerate(members):
                last = members[place - 1]
                before = last if same[last] != same[row] else before
                if turn and found[row] < 0 and before >= 0:
                    found[row] = before
    return found


def _split_label(rows: TokenizedRows) -> tuple[TokenizedRows, npt.NDArray[np.float32]]:
    """Pairs as two answers each, in the order of the file; and which answers are desirable."""
    builders = {name: RaggedBuilder() for name in ("prompt", "chosen", "rejected")}
    row_ids, desirable = [], []
    for row, where in enumerate(rows.row_ids):
        own, rejected = rows.parts["completion"][row], rows.parts["rejected"][row]
        for ids, label in ((own, rows.parts["label"][row][0]), (rejected, 0)):
            if not len(ids):
                continue
            builders["prompt"].add(rows.parts["prompt"][row].tolist())
            builders["chosen"].add(ids.tolist())
            row_ids.append(where)
            desirable.append(label)
    parts = {name: builder.build() for name, builder in builders.items()}
    return rows._replace(parts=parts, row_ids=row_ids), np.array(desirable, np.float32)


def _taken(rows: Ragged, which: npt.NDArray[np.int64]) -> Ragged:
    builder = RaggedBuilder()
    for row in which:
        builder.add(rows[int(row)].tolist())
    return builder.build()


def _example(
    row: Fields, encoder: Encoder, markers: SpecialTokenGuard, data: Feedback, vocabulary: int | None
) -> Example:
    is_ids = any(name in row for name in IDS)
    require(row, (*IDS, "label") if is_ids else ("prompt", "completion", "label"), READS)
    label = row["label"]
    if not isinstance(label, bool):
        raise RowError("wrong type", f"field 'label': expected true or false, got {kind_of(label)}")
    if is_ids:
        vocab_size = encoder.tokenizer.vocab_size if vocabulary is None else vocabulary
        prompt, completion = (read_ids(row, name, vocab_size) for name in IDS)
        split, chat = Split(prompt, [completion], merged=False), False
        odd = other_forms(row, "/".join(IDS), ("prompt", "completion", "tools"))
    else:
        split, chat, odd = _split(row, encoder, markers)
    prompt, completion = split.prompt, split.completions[0]
    for name, ids in (("prompt", prompt), ("completion", completion)):
        if not ids:
            raise RowError(f"empty {name}", f"the {name} is empty")
    bos = None if is_ids else encoder.tokenizer.bos_id
    parts = {
        "prompt": cut_left(prompt, data.max_prompt_length, bos),
        "completion": completion[: data.max_completion_length],
    }
    whole = {"prompt": prompt, "completion": completion}
    cut = tuple(name for name, ids in parts.items() if len(ids) < len(whole[name]))
    odd = (*odd, "merged border") if split.merged else odd
    return Example({**parts, "rejected": [], "label": [int(label)]}, cut, odd, chat)


def _split(row: Fields, encoder: Encoder, markers: SpecialTokenGuard) -> tuple[Split, bool, tuple[str, ...]]:
    """A row of text or chats as ids, whether it is a chat, and what is odd about it."""
    prompt, completion = (read_text_or_chat(row, name) for name in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt = markers.text(prompt, "prompt", opens=True)
        completion = markers.text(completion, "completion", ends=True)
        for name, text in (("prompt", prompt), ("completion", completion)):
            if not text.strip():
                raise RowError(f"empty {name}", f"the {name} is empty")
        split = encoder.split_text(prompt, (completion,))
        markers.ids(split.completions[0][:-1], prompt + completion, "fields 'prompt' and 'completion' together")
        return split, False, other_forms(row, "plain text", ("tools",))
    context, tools = markers.chat(prompt, "prompt", "user"), markers.tools(read_tools(row))
    if all(is_blank(message) for message in context):
        raise RowError("empty prompt", "the prompt is empty")
    completion_ids = answer("completion", markers.chat(completion, "completion", "assistant"), context)
    split = encoder.split_chat(context, [completion_ids], tools)
    return split, True, encoder.check_chat([*context, completion_ids], tools)
