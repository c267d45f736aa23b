"""Tasks of lm-eval over `nnxdsl serve`: the results of its own backend for transformers.

`LM_EVAL=/path/to/environment/bin/lm_eval pytest -m slow -n 0 tests/serve/test_lm_eval.py`; made for lm-eval 0.4.13 with
its extra `api`, transformers 5.24 and torch 2.13 in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.weights.export import export
from tests.fixtures.serving import KEY, serving

LM_EVAL = os.environ.get("LM_EVAL", "")
PROMPTS = ("a word", "and another", "one more", "no", "what is it?", "a word and another word, and one more")
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{target}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": [","], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LM_EVAL, reason="LM_EVAL does not name lm-eval's command")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Tasks over rows of a file."""
    rows = [
        {
            "question": f"{first} {number}",
            "choices": [f" {word}" for word in PROMPTS],
            "answer": number % 6,
            "target": f" {last}",
        }
        for number, (first, last) in enumerate((first, last) for first in PROMPTS for last in PROMPTS[:3])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    for name, task in TASKS.items():
        body = {"task": name, **data, "test_split": "test", **task}
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(body))  # JSON is YAML
    return tmp_path


def results(place: Path, model: str, arguments: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics of each task, and what the model has answered to each row."""
    command = [LM_EVAL, "--model", model, "--model_args", arguments, "--tasks", ",".join(TASKS), "--log_samples"]
    command += ["--include_path", str(place / "tasks"), "--output_path", str(place / name), "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place / "cache"), "OPENAI_API_KEY": KEY}
    subprocess.run(command, check=True, env={**os.environ, **offline}, cwd=place)
    (file,) = (place / name).rglob("results_*.json")
    samples = {task: next((place / name).rglob(f"samples_{task}_*.jsonl")).read_text().splitlines() for task in TASKS}
    answers = {task: [json.loads(line)["resps"] for line in lines] for task, lines in samples.items()}
    return json.loads(file.read_text())["results"], answers


def test_tasks_have_the_results_of_transformers(trained: Path, place: Path) -> None:
    directory = export(trained, place / "model").directory
    with serving(trained.name, "--home", str(trained.parent), "--name", "tiny") as url:
        tokenizer = f"tokenizer={directory},tokenizer_backend=huggingface,add_bos_token=True"
        arguments = f"model=tiny,base_url={url}/completions,{tokenizer},max_length=512"
        ours, texts = results(place, "local-completions", arguments, "ours")
    theirs, expected = results(place, "hf", f"pretrained={directory},dtype=float32,max_length=512", "theirs")
    assert ours.keys() == theirs.keys() == TASKS.keys()
    for task, metrics in theirs.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    assert texts["written"] == expected["written"]
