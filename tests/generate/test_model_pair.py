"""What is said of two models is what training said: the same log-probabilities, rewards and answers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import RunError
from nnxdsl.data.tokenizers.base import BytesTokenizer, TokenizerBase
from nnxdsl.data.tokenizers.huggingface import HFTokenizer
from nnxdsl.generate import worker
from nnxdsl.generate.answers import generate, pairs, pieces, tokens
from nnxdsl.generate.model_pair import ModelPair
from nnxdsl.generate.streaming import PartialText
from nnxdsl.runs.run_dir import RunDirectory
from tests.fixtures.recipes import DPO_STEPS, SFT_STEPS

BYTE_FALLBACK = Path(__file__).parent.parent / "reference" / "row_shapes" / "gemma" / "tokenizer.json"
ROW = "pairs_held_out.jsonl:3"


def silent(stage: str, partial: object = None) -> None:
    pass


@pytest.fixture(scope="module")
def models(finished: Any) -> Iterator[ModelPair]:
    """The finished DPO run's policy, and its reference: the base with the adapter off."""
    with contextlib.chdir(finished.lab.place):
        yield ModelPair.open(finished.run("dpo"), DPO_STEPS)


@pytest.fixture(scope="module")
def table(models: ModelPair) -> dict[str, Any]:
    return pairs(models, {}, silent)


@pytest.mark.extended
def test_pairs_are_what_the_run_itself_wrote(models: ModelPair, table: dict[str, Any]) -> None:
    wrote = {row["step"]: row for row in RunDirectory(models.directory).evaluations()}[DPO_STEPS]
    assert table["recorded"]["eval/rewards/margins"] == wrote["eval/rewards/margins"]
    rows = table["rows"]
    assert len(rows) == table["total"] == 10
    for name in ("chosen", "rejected", "margins", "accuracies"):
        mean = sum(row["rewards"][name] for row in rows) / len(rows)
        assert mean == pytest.approx(wrote[f"eval/rewards/{name}"], abs=1e-5)
    for number, side in enumerate(("chosen", "rejected")):
        mean = sum(row["policy"][number] for row in rows) / len(rows)
        assert mean == pytest.approx(wrote[f"eval/logps/{side}"], abs=1e-4)
    assert wrote["eval/rewards/margins"] > 0.1  # there is something to compare


def test_the_first_policy_is_the_reference_to_the_bit(models: ModelPair, table: dict[str, Any]) -> None:
    assert table["first"] == {"largest": 0.0, "rows": 10, "expected": True, "compute": "float32"}
    assert any(row["policy"] != row["other"] for row in table["rows"])


@pytest.mark.extended
def test_tokens_sum_to_the_pair_and_to_its_margin(models: ModelPair, table: dict[str, Any]) -> None:
    row = next(row for row in table["rows"] if row["row"] == ROW)
    actual = tokens(models, {"row": ROW}, silent)["sides"]
    sums = [(math.fsum(side["policy"]), math.fsum(side["other"])) for side in actual]
    assert [policy for policy, _ in sums] == pytest.approx(row["policy"], abs=1e-5)
    assert [other for _, other in sums] == pytest.approx(row["other"], abs=1e-5)
    beta, ((c, c_ref), (r, r_ref)) = 0.2, sums
    assert beta * ((c - c_ref) - (r - r_ref)) == pytest.approx(row["rewards"]["margins"], abs=1e-5)
    assert "".join(actual[0]["pieces"]) == "<bos>Say 42: good xx<eos>"


def test_a_text_of_ones_own_is_read_as_the_pair_is(models: ModelPair) -> None:
    (pair, _), (ours,) = (
        tokens(models, asked, silent)["sides"]
        for asked in ({"row": ROW}, {"prompt": "Say 42: ", "text": "good xx", "chat": False})
    )
    assert (ours["ids"], ours["begin"]) == (pair["ids"], pair["begin"])
    for side in ("policy", "other"):
        np.testing.assert_allclose(ours[side], pair[side], atol=1e-5)
    again = {"prompt_ids": ours["ids"][: ours["begin"]], "completion_ids": ours["ids"][ours["begin"] :]}
    (same,) = tokens(models, again, silent)["sides"]
    assert same["policy"] == ours["policy"]


def test_the_likeliest_tokens_have_the_log_probabilities_of_the_text(models: ModelPair) -> None:
    (side, _) = tokens(models, {"row": ROW}, silent)["sides"]
    seen = 0
    for index, piece in enumerate(side["pieces"][side["begin"] :]):
        for name, column in (("policy", 1), ("other", 2)):
            best = side["likeliest"][name][index]
            assert len(best) == 5
            assert [row[column] for row in best] == sorted((row[column] for row in best), reverse=True)
            for text, policy, other in best:
                if text == piece:
                    seen += 1
                    assert policy == pytest.approx(side["policy"][index], abs=1e-4)
                    assert other == pytest.approx(side["other"][index], abs=1e-4)
    assert seen > len(side["policy"])


@pytest.mark.slow
def test_answers_are_those_that_the_run_wrote(models: ModelPair) -> None:
    wrote = [row for row in RunDirectory(models.directory).samples() if row["step"] == DPO_STEPS]
    for row in wrote:
        actual = generate(models, {"prompt": row["prompt"], "max_new_tokens": 6}, silent)
        assert actual["policy"]["text"] == row["policy"]
        assert actual["other"]["text"] == row["reference"]
        assert "".join(actual["prompt_pieces"]) == f"<bos>{row['prompt']}"
        for side in ("policy", "other"):
            said = actual[side]
            assert len(said["ids"]) == said["tokens"] + (said["stop"] is not None)
    rendered = {"row": ROW, "max_new_tokens": 6, "temperature": 1.0, "seed": 5}
    first, again = generate(models, rendered, silent), generate(models, rendered, silent)
    assert first["policy"]["ids"] == again["policy"]["ids"]


def test_two_steps_of_one_run_and_the_policy_before_training(finished: Any) -> None:
    with contextlib.chdir(finished.lab.place):
        two = ModelPair.open(finished.run("dpo"), 0, str(DPO_STEPS))
        actual = pairs(two, {"limit": 3}, silent)
        with pytest.raises(RunError, match="no checkpoint of step 1; there are"):
            ModelPair.open(finished.run("dpo"), 1)
    assert actual["against"] == f"step {DPO_STEPS}"
    assert not actual["first"]["expected"]
    assert actual["first"]["largest"] > 0.01
    assert len(actual["rows"]) == 3


@pytest.mark.slow
def test_the_policy_of_another_run(finished: Any) -> None:
    dpo, sft = finished.run("dpo"), finished.run("sft")
    with contextlib.chdir(finished.lab.place):
        # The first policy of the one is the last of the other, whose weights it starts from.
        both = ModelPair.open(dpo, 0, f"{sft.name}@{SFT_STEPS}")
        actual = pairs(both, {}, silent)
        for wrong in ("other@1", f"{sft.name}@x", f"{sft.name}@1", f"../{sft.name}@{SFT_STEPS}"):
            with pytest.raises(RunError, match=r"expected RUN@STEP|no checkpoint of step 1"):
                ModelPair.open(dpo, 0, wrong)
    assert actual["against"] == f"{sft.name}, step {SFT_STEPS}"
    assert actual["first"]["largest"] == pytest.approx(0, abs=1e-4)
    assert not actual["first"]["expected"]
    for row in actual["rows"]:
        assert row["policy"] == pytest.approx(row["other"], abs=1e-3)


@pytest.mark.slow
def test_several_answers_to_one_prompt(models: ModelPair) -> None:
    asked = {"prompt": "Say 1: ", "max_new_tokens": 6, "temperature": 1.5, "seed": 3}
    one, three = (generate(models, {**asked, "samples": count}, silent) for count in (1, 3))
    for side in ("policy", "other"):
        assert one[side]["more"] == []
        assert three[side]["ids"] == one[side]["ids"]
        assert len({tuple(said["ids"]) for said in (three[side], *three[side]["more"])}) == 3


@pytest.mark.extended
def test_text_is_told_while_it_is_decoded(models: ModelPair) -> None:
    reported: list[dict[str, Any]] = []

    def tell(stage: str, partial: Any = None) -> None:
        if partial is not None:
            reported.append(json.loads(json.dumps({"stage": stage, **partial})))

    asked = {"prompt": "Say 1: ", "max_new_tokens": 40, "temperature": 5.0, "seed": 3, "samples": 3}
    actual = generate(models, asked, tell)
    for side in ("policy", "other"):
        samples = [actual[side], *actual[side]["more"]]
        steps = [one[side] for one in reported if side in one]
        assert len(steps) > 2
        for number, sample in enumerate(samples):
            texts, counts = ([step[name][number] for step in steps] for name in ("texts", "tokens"))
            assert all(later.startswith(text) for text, later in zip(texts, [*texts[1:], sample["text"]], strict=True))
            assert counts == sorted(counts)
            assert counts[-1] == len(sample["ids"])
            assert [step["done"][number] for step in steps] == [count == len(sample["ids"]) for count in counts]
    assert reported[0].keys() == {"stage", "policy"}
    assert reported[-1].keys() == {"stage", "policy", "other"}  # what the first model said stays


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), HFTokenizer(BYTE_FALLBACK)], ids=["bytes", "fallback"])
def test_a_character_is_told_once_it_is_complete(tokenizer: TokenizerBase) -> None:
    text = PartialText(tokenizer)
    seen: list[str] = []
    for token in tokenizer.encode("é€😀é\n"):
        text.add([token])
        seen.append(text.text)
    assert [one for number, one in enumerate(seen) if one not in seen[:number]] == [
        "",
        "é",
        "é€",
        "é€😀",
        "é€😀é",
        "é€😀é\n",
    ]
    text.add(tokenizer.encode("ab"))
    assert text.text == "é€😀é\nab" == tokenizer.decode(text.ids)


def test_progress_has_the_text_and_keeps_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = {"policy": {"texts": ["é"], "tokens": [2], "done": [False]}}
    output = io.StringIO()
    report = worker._reporter(output, '{"id": 7}')
    report("sampling", partial)
    report("sampling", partial)  # at once, and so left out
    assert [json.loads(line) for line in output.getvalue().splitlines()] == [
        {"id": 7, "stage": "sampling", "partial": partial}
    ]
    monkeypatch.setattr(worker, "REPORT_SECONDS", 0.0)
    report("reading weights")
    assert json.loads(output.getvalue().splitlines()[-1]) == {"id": 7, "stage": "reading weights"}


@pytest.mark.extended
def test_a_chat_of_several_turns_goes_through_the_template(models: ModelPair) -> None:
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    fields = {"messages": messages, "max_new_tokens": 2, "sides": ["policy"]}
    actual = generate(models, fields, silent)
    template = models.encoder.template().render(messages, add_generation_prompt=True)
    assert actual["prompt_ids"] == models.encoder.rendered(template)
    assert "other" not in actual
    assert len(actual["policy"]["ids"]) <= 2
    for wrong in (
        [],
        "x",
        [{"role": "user"}],
        [{"role": "system", "content": "b"}],
        [{"role": "x", "content": "c"}],
    ):
        with pytest.raises(RunError, match="messages: expected roles"):
            generate(models, {**fields, "messages": wrong}, silent)
    for sides in ([], ["reference"], "policy"):
        with pytest.raises(RunError, match="sides: expected a list"):
            generate(models, {**fields, "sides": sides}, silent)


@pytest.mark.extended
def test_a_last_message_of_the_assistant_is_continued(models: ModelPair) -> None:
    messages = [{"role": "user", "content": "Hi 1"}, {"role": "assistant", "content": "go"}]
    actual = generate(models, {"messages": messages, "max_new_tokens": 3}, silent)
    assert "".join(actual["prompt_pieces"]) == "<bos><start_of_turn>user\nHi 1<end_of_turn>\n<start_of_turn>model\ngo"
    for side in ("policy", "other"):
        ids = actual[side]["ids"]
        assert 1 <= len(ids) <= 3
        scored = tokens(models, {"prompt_ids": actual["prompt_ids"], "completion_ids": ids}, silent)["sides"][0]
        best = [each[0][0] for each in scored["likeliest"][side]]
        assert best == scored["pieces"][scored["begin"] :]  # greedy, from behind the prefill


def test_what_cannot_be_answered_is_refused(models: ModelPair) -> None:
    for do, asked, token_ids in (
        (generate, {"prompt": "x", "max_new_tokens": 5_000}, "positions; shorten the prompt"),
        (generate, {"prompt": "x", "max_new_tokens": 4, "temperature": 1.0, "top_k": 10**6}, "top_k"),
        (generate, {"prompt": "x", "max_new_tokens": 4, "top_p": 0.5}, "no effect with temperature 0"),
        (generate, {"prompt": "x", "max_new_tokens": 4, "samples": 2}, r"1 at temperature 0 \(greedy\), got 2"),
        (generate, {"prompt": "x", "max_new_tokens": 4, "temperature": 1.0, "samples": 17}, "expected 1 to 16"),
        (generate, {"row": "other.jsonl:1", "max_new_tokens": 4}, "no such held-out row"),
        (tokens, {"prompt": "x", "text": ""}, "the completion is empty"),
        (tokens, {"prompt_ids": [1], "completion_ids": [10**6]}, "token ids below"),
        (tokens, {"prompt": "x", "text": "y" * 5_000}, "positions; shorten it"),
    ):
        with pytest.raises(RunError, match=token_ids):
            do(models, asked, silent)


def test_pieces_put_together_are_the_text(models: ModelPair) -> None:
    ids = models.tokenizer.encode("a <eos>\n é\x17")
    assert pieces(models.tokenizer, ids) == ["a", " ", "<eos>", "\n", " ", "<0xC3>", "<0xA9>", "<0x17>"]


@pytest.mark.slow
def test_the_process_answers_line_by_line_and_ends_with_its_input(finished: Any, tmp_path: Path) -> None:
    run = finished.run("dpo")
    requests = [
        {"id": 1, "do": "tokens", "row": ROW},
        {"id": 2, "do": "nothing"},
        {"id": 3, "do": "generate", "prompt": "x", "max_new_tokens": 0},
    ]
    argv = [sys.executable, "-m", "nnxdsl.generate.worker", str(run), "--step", str(DPO_STEPS)]
    done = subprocess.run(
        argv,
        input="".join(json.dumps(one) + "\n" for one in requests),
        capture_output=True,
        text=True,
        cwd=tmp_path,  # it goes where the run was started, which is where its files are
        env=finished.lab.environment,
        check=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("stage" in one for one in said)
    answers = {one["id"]: one for one in said if "stage" not in one}
    assert answers[1]["result"]["sides"][0]["name"] == "chosen"
    assert "expected one of generate, tokens, pairs" in answers[2]["error"]
    assert "max_new_tokens: expected at least 1" in answers[3]["error"]
    moved = tmp_path / run.name
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "checkpoints")
    (moved / "checkpoints").mkdir()
    argv[3] = str(moved)
    ask = json.dumps({"id": 1, "do": "pairs"}) + "\n"
    done = subprocess.run(argv, input=ask, capture_output=True, text=True, env=finished.lab.environment, check=True)
    assert "has no checkpoint yet" in done.stdout
