"""`nnxdsl.load`: logits with padding on either side, text, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import nnxdsl
from nnxdsl import DataError, Tokenizer, WeightsError
from nnxdsl.formats import hf

REFERENCE = Path(__file__).parent.parent / "reference" / "families" / "gemma2"


@pytest.fixture(scope="module")
def model() -> nnxdsl.Pretrained:
    return nnxdsl.load(REFERENCE)


def test_logits_are_those_of_transformers(model: nnxdsl.Pretrained) -> None:
    expected = np.load(REFERENCE / "expected.npz")
    tokens, lengths, wanted = (expected[name] for name in ("tokens", "lengths", "logits"))
    size = tokens.shape[1]
    mask = np.arange(size) < lengths[:, None]
    right = np.asarray(model(tokens, mask))
    left = np.asarray(
        model(np.stack([np.roll(row, size - n) for row, n in zip(tokens, lengths, strict=True)]), mask[:, ::-1])
    )
    assert right.shape == wanted.shape
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(right[row, :n], wanted[row, :n], atol=2e-5)
        np.testing.assert_allclose(left[row, size - n :], wanted[row, :n], atol=2e-5)


def test_what_a_call_refuses(model: nnxdsl.Pretrained) -> None:
    with pytest.raises(ValueError, match=r"tokens: expected integers \[B, T\], got int64 of shape \(3,\)"):
        model(np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(1, 2\), got \(1, 3\)"):
        model(np.array([[1, 2]]), np.ones((1, 3)))
    with pytest.raises(ValueError, match="tokens: expected ids from 0 to 95"):
        model(np.array([[1, 96]]))
    assert model(np.array([[1, 96]]), np.array([[1, 0]])).shape == (1, 2, 96)  # what is no token does not matter
    with pytest.raises(ValueError, match="tokens: 129 tokens in a row exceed max_length=128"):
        model(np.ones((1, 129), int))
    with pytest.raises(ValueError, match=r"expected a list of prompts, got one text; write \[text\]"):
        model.generate("a")
    with pytest.raises(DataError, match="no tokenizer here"):
        model.generate(["a"])


@pytest.mark.extended
def test_text(tmp_path: Path) -> None:
    program = nnxdsl.compile(
        nnxdsl.Experiment(
            name="a",
            model=nnxdsl.Model.Qwen3("tiny"),
            objective=nnxdsl.Objective.SFT(loss_on="all"),
            data=nnxdsl.Data.Text("none.jsonl", max_length=16),
            optimizer=nnxdsl.Optimizer.SGD(schedule=nnxdsl.Schedule.Constant(lr=0.1)),
            batch_size=1,
            steps=1,
        )
    )
    state = program.init()
    hf.write(tmp_path / "hub", program.blueprint.config, program.policy(state)[1], like="qwen3")
    model = nnxdsl.load(tmp_path / "hub", tokenizer=Tokenizer.Bytes())
    chat = [{"role": "user", "content": "Hello"}]
    greedy = model.generate(["abc", chat], max_new_tokens=4)
    assert len(greedy) == 2
    assert model.generate(["abc", chat], max_new_tokens=4) == greedy
    rendered = model.generate(["abc"], max_new_tokens=8, temperature=5.0, seed=1)
    assert rendered != model.generate(["abc"], max_new_tokens=8, temperature=5.0, seed=2)

    # A last message of the assistant is continued: its turn stays open, and the answer is what follows it.
    for prefill in ("Sure, ", "No", ""):
        text = f"<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n{prefill}"
        ids = model.tokenizer.encode(text)
        (actual,) = model.generate([[*chat, {"role": "assistant", "content": prefill}]], max_new_tokens=3)
        answer: list[int] = []
        for _ in range(3):
            row, length = np.zeros((1, 80), int), len(ids) + len(answer)
            row[0, :length] = [*ids, *answer]
            answer.append(int(model(row, np.arange(80)[None] < length)[0, length - 1].argmax()))
        assert actual == model.tokenizer.decode(answer)
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(DataError, match=r"^prompts.1: the prompt ends with tool calls, which cannot be continued"):
        model.generate(["abc", [*chat, call]])


def test_every_tensor_that_does_not_fit(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE, tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(
        config.replace('"intermediate_size": 32', '"intermediate_size": 40')
    )
    with pytest.raises(WeightsError) as caught:
        nnxdsl.load(tmp_path / "other")
    first, *others = str(caught.value).splitlines()
    assert first == f"{tmp_path / 'other'}: 15 tensors do not fit:"
    assert len(others) == 15
    with pytest.raises(WeightsError, match="no such directory"):
        nnxdsl.load(tmp_path / "nowhere")
