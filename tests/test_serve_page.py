"""docs/guides/serve.md: its script trains, its exports are written, and transformers, PEFT and nnxdsl load them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export
from tests.doc_pages import ROOT, blocks, texts

PAGE = ROOT / "docs" / "guides" / "serve.md"
BASE = "google/gemma-3-1b-it"
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)
TOLERANCE = 1e-3
"""Of logits up to 12: transformers' own float32 differs by up to 2e-4 from float64, see docs/guides/weights.md."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the page's script and its exports have run, of a tiny base in the directory `base`."""
    place = tmp_path_factory.mktemp("serve")
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(16)
    ]
    data = Data.Conversations(str(place / "chats.jsonl"), max_length=64)
    Path(data.path).write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    first = Experiment(name="base", model=Model.Llama3("tiny"), objective=Objective.SFT(), data=data, steps=1)
    export(run(first, place / "runs", Display(quiet=True)).directory, place / "base")
    (script,) = [block for block in blocks(PAGE) if block.title == "train.py"]
    assert BASE in script.text
    (place / "train.py").write_text(script.text.replace(BASE, "base"), encoding="utf-8")
    commands = [line.partition("#")[0].split() for line in texts(PAGE, "sh")[0].splitlines()]
    assert len(commands) == 3
    for program, *argv in [*commands, ["python", "train.py", "export", "exact"]]:
        assert program == "python"
        ended = subprocess.run([sys.executable, *argv], cwd=place, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return place


def logits(directory: Path) -> np.ndarray:
    return np.asarray(nnxdsl.load(directory)(TOKENS, np.ones(TOKENS.shape, bool)))


@pytest.mark.extended
def test_the_exports_are_what_the_page_says(served: Path) -> None:
    both = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (served / "model").iterdir()} == both | {"config.json", "model.safetensors"}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in (served / "adapter").iterdir()} == both | adapter
    named = json.loads((served / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == served / "base"
    exact = logits(served / "exact")
    assert np.abs(exact - logits(served / "base")).max() > 20 * TOLERANCE
    # bfloat16 has 8 bits: of weights, and so of a logit's terms.
    assert np.abs(exact - logits(served / "model")).max() < 2**-6 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, which uses names that transformers renames
def test_its_python_runs(served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    monkeypatch.chdir(served)
    space: dict[str, Any] = {"__name__": "page"}
    sources = [block.text for block in blocks(PAGE) if block.language == "python" and block.title is None]
    assert len(sources) == 3
    for source in sources:
        exec(compile(source.replace(BASE, "base"), str(PAGE), "exec"), space)
    theirs, ours = capsys.readouterr().out.splitlines()
    assert ours == repr([theirs])
    with torch.no_grad():
        merged, adapted = (
            space[name].float().eval()(input_ids=torch.tensor(TOKENS).long()).logits.numpy()
            for name in ("model", "adapted")
        )
    assert np.abs(merged - logits(served / "model")).max() < TOLERANCE
    assert np.abs(adapted - logits(served / "exact")).max() < TOLERANCE
