"""Completion in a real bash: verbs, flags, runs, names and values of settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl import Data, Experiment, Model, Objective, to_json
from nnxdsl.cli.completion import settings

BASH = shutil.which("bash")
REGISTER = Path(sys.executable).parent / "register-python-argcomplete"


def test_settings_are_those_of_all_members() -> None:
    actual = dict(settings(Experiment))
    assert {"objective.beta", "mesh.fsdp", "optimizer.schedule.lr", "evaluation.data.path", "model.weights"} <= set(
        actual
    )
    assert actual["memory.remat"][:2] == ["auto", "none"]
    assert "Objective.DPO()" in actual["objective"]
    assert {"Adapter.LoRA()", "None"} <= set(actual["adapter"])
    assert len(actual) < 2000


@pytest.mark.extended
@pytest.mark.skipif(BASH is None or not REGISTER.exists(), reason="needs bash and argcomplete's script")
def test_bash_completes(tmp_path: Path) -> None:
    data = Data.Preferences("pairs.jsonl", max_prompt_length=8, max_completion_length=8)
    ours = Experiment(name="own", model=Model.Gemma3("tiny"), objective=Objective.DPO(), data=data, steps=1)
    (tmp_path / "own.json").write_text(to_json(ours))
    (tmp_path / "train.py").write_text("raise SystemExit('completion ran the file')\n")
    (tmp_path / "nnxdsl").write_text(f'#!/bin/sh\nexec {sys.executable} -m nnxdsl "$@"\n')
    (tmp_path / "nnxdsl").chmod(0o755)

    def completions(line: str) -> set[str]:
        script = f"""
            eval "$({REGISTER} nnxdsl)"
            COMP_LINE={line!r}
            COMP_POINT=${{#COMP_LINE}}
            COMP_WORDS=({line} {"''" if line.endswith(" ") else ""})
            COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
            COMP_TYPE=9
            _python_argcomplete nnxdsl
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
        argv = [str(BASH), "-c", script]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return {word.strip() for word in done.stdout.splitlines()}

    assert completions("nnxdsl pl") == {"plan"}
    assert {"run", "sweep", "export"} <= completions("nnxdsl ")
    assert completions("nnxdsl plan train.py --dev") == {"--device"}
    assert "h200" in completions("nnxdsl plan train.py --device h")
    assert {"own.json", "train.py"} <= completions("nnxdsl run ")
    assert completions("nnxdsl run train.py see") == {"seed="}
    assert {"objective.beta=", "objective.num_generations="} <= completions("nnxdsl run train.py objective.")
    exact = completions("nnxdsl run own.json objective.")
    assert "objective.beta=" in exact
    assert "objective.num_generations=" not in exact
    assert completions("nnxdsl run train.py adapter=Adapter.Lo") == {r"Adapter.LoRA\(\)"}
