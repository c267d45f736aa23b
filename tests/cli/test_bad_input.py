"""Invalid input is refused before anything is written: whole messages, exit code 2, no directory of runs."""

# ruff: noqa: E501 - whole messages stand as they are printed

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Objective, cli
from nnxdsl.config.core.base import members_hint
from nnxdsl.models.families.gemma3 import GEMMA3


@pytest.fixture
def place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab.place)
    return lab.place


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `nnxdsl WORDS` says on stderr when it refuses them; it must have said nothing else and written nothing."""
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert not Path("runs").exists()
    return err[re.search(r"^\w+Error: ", err, re.MULTILINE).start() :]  # behind what was read so far


HEADING = "in Experiment 'dpo'\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["objective.bta=0.2", "mesh.tensor='2'", "data=Data.Conversations('chats.jsonl')", "steps=ten"],
            "SpecError: 4 problems in Experiment 'dpo'\n"
            "  data: Objective.DPO reads preference pairs, Data.Conversations yields conversations; use Data.Preferences\n",
        ),
        (["stps=3"], f"SpecError: 1 problem {HEADING}  stps: Experiment has no field 'stps'; did you mean 'steps'?\n"),
        (["steps=10.5"], f"SpecError: 1 problem {HEADING}  steps: expected int, got 10.5\n"),
        (["steps=0"], f"SpecError: 1 problem {HEADING}  steps: expected a value > 0, got 0\n"),
        (
            ["objective=DPO"],
            f"SpecError: 1 problem {HEADING}  objective: expected Objective, got 'DPO'; use one of its members: "
            f"{members_hint(Objective)}\n",
        ),
        (
            ["adapter=None", "quantization=Quantization.NF4()"],
            f"SpecError: 1 problem {HEADING}  quantization: Quantization.NF4 freezes the base, so there is nothing to train "
            "without an adapter; add adapter=Adapter.LoRA()\n",
        ),
        (["microbatch_size=3"], f"SpecError: 1 problem {HEADING}  microbatch_size: 3 does not divide batch_size=4\n"),
        (["steps=1", "steps=2"], f"SpecError: 1 problem {HEADING}  steps: is set twice\n"),
        (["=3"], f"SpecError: 1 problem {HEADING}  =3: expected path=value, without spaces around '='\n"),
        (
            ["steps", "=", "10"],
            f"SpecError: 3 problems {HEADING}"
            + "".join(f"  {word}: expected path=value, without spaces around '='\n" for word in ("steps", "=", "10")),
        ),
        (
            ["--steps", "10"],
            "UsageError: --steps: there is no such flag; fields are set as path=value: steps=10\n",
        ),
        (
            ["--objective.beta=1"],
            "UsageError: --objective.beta=1: there is no such flag; fields are set as path=value: objective.beta=1\n",
        ),
        (["--jsn"], "UsageError: --jsn: there is no such flag; did you mean '--json'?\n"),
        (["--python"], "UsageError: --python has no effect on run\n"),
        (
            ["adapter.targets=('attenton', 'mlp')"],
            f"PlanError: 1 problem {HEADING}  adapter.targets.0: 'attenton' matches no linear layer; did you mean "
            "'attention'?\n",
        ),
        (
            ["data.max_prompt_length=1000", "data.max_completion_length=100"],
            f"PlanError: 1 problem {HEADING}  data.max_prompt_length: max_prompt_length + max_completion_length is "
            "1100 tokens, Model.Llama3 reads at most 1024\n",
        ),
        (
            ["evaluation.max_new_tokens=1010"],
            f"PlanError: 1 problem {HEADING}  evaluation.prompts.1: 19 tokens and 1,010 new ones are more than the model's "
            "1,024 positions; shorten it, or lower evaluation.max_new_tokens\n",
        ),
        (
            ["mesh.data=2"],
            f"PlanError: 1 problem {HEADING}  mesh: data=2 takes 2 devices, there are 1 (cpu)\n",
        ),
    ],
)
def test_the_whole_message(place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    actual = refused(capsys, "run", "dpo.py", *argv)
    if "4 problems" in message:  # the order of independent problems is the spec's own affair
        assert sorted(actual.splitlines()[1:]) == sorted(
            [
                "  data: Objective.DPO reads preference pairs, Data.Conversations yields conversations; use Data.Preferences",
                "  mesh.tensor: expected int, got '2'",
                "  objective.bta: DPO has no field 'bta'; did you mean 'beta'?",
                "  steps: expected int, got 'ten'",
            ]
        )
    else:
        assert actual == message


def test_bad_rows_are_named_with_file_and_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (place / "pairs.jsonl").open("a") as file:
        file.write('{"prompt": "p", "chosen": "same", "rejected": "same"}\n{"prompt": 3}\nnot json\n')
    lines = refused(capsys, "run", "dpo.py").splitlines()
    assert lines[0] == (
        "DataError: pairs.jsonl: 3 of 43 rows are bad; fix them, or leave them out with "
        "bad_rows=BadRows.Skip(at_most=3)"
    )
    assert [line.split(": ")[0] for line in lines[1:]] == [f"  pairs.jsonl:{number}" for number in (41, 42, 43)]


def test_an_empty_data_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "pairs.jsonl").write_text("")
    assert refused(capsys, "run", "dpo.py") == "DataError: pairs.jsonl: no row is left to learn from, of 0 read\n"


def test_data_of_the_second_stage_are_read_before_the_first_is_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "pairs_held_out.jsonl").unlink()
    assert refused(capsys, "run", "dpo.py").splitlines()[-1] == (
        f"DataError: pairs_held_out.jsonl: no such file (looked in the current directory, {place}); did you mean "
        "'chats_held_out.jsonl'?"
    )


def test_from_another_directory(lab: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code, out, err = lab.python("../sft.py", cwd=elsewhere)
    assert (code, out) == (2, "")
    assert err == (
        f"sft: reading data ...\nDataError: chats.jsonl: no such file (looked in the current directory, {elsewhere})\n"
    )
    assert list(elsewhere.iterdir()) == []


def test_a_home_that_is_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "home").write_text("")
    said = refused(capsys, "run", "sft.py", "evaluation=None", "--home", "home")
    assert said.splitlines()[-1] == "RunError: home: the directory of runs cannot be made: File exists"
    said = refused(capsys, "runs", "--home", "home")
    assert said == "RunError: home: is no directory; give the directory of all runs with --home\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "home").mkdir(mode=0o500)
    said = refused(capsys, "run", "sft.py", "evaluation=None", "--home", "home/runs")
    assert said.splitlines()[-1] == "RunError: home/runs: the directory of runs cannot be made: Permission denied"


def test_a_run_directory_that_holds_another_experiment(lab: Any, finished: Any) -> None:
    run = lab.place / "runs" / finished.run("sft").name
    shutil.copytree(finished.run("sft"), run)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "identity": "{}"}))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    code, out, err = lab.python("sft.py")
    assert (code, out) == (2, "")
    assert err == (
        f"RunError: runs/{run.name} holds another experiment (sft, made {record['created']}); "
        f"give this one another directory, or move that one away\n"
    )
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_other_peoples_files_are_not_moved_away(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cli.load("sft.py", Path("runs")).id
    (place / "home" / run).mkdir(parents=True)
    (place / "home" / run / "thesis").write_text("mine")
    said = refused(capsys, "run", "sft.py", "--home", "home", "--restart")
    assert said == (f"RunError: home/{run} is no run directory, so --restart leaves it alone; give another --home\n")
    assert (place / "home" / run / "thesis").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shwo", "sft.py"], "UsageError: shwo: there is no such verb; did you mean 'show'?\n"),
        (["sft.py"], "UsageError: sft.py: expected a verb first: app, compare, convert, data, diff, export, launch, plan, "
         "resume, run, runs, serve, show, sweep\n"),
        (["show"], "UsageError: the following arguments are required: FILE-or-RUN; see nnxdsl show --help\n"),
        (["diff", "sft.py"], "UsageError: the following arguments are required: OTHER; see nnxdsl diff --help\n"),
        (["runs", "all"], "UsageError: all: unexpected argument; see nnxdsl runs --help\n"),
        (["resume", "sft.py"], "RunError: sft.py: is a file; name a run, or run the file again to resume its run\n"),
        (["show", "sft.py", "--json", "--python"], "UsageError: argument --python: not allowed with argument --json; see nnxdsl show --help\n"),
        (["plan", "sft.py", "--restart", "--quiet"], "UsageError: --restart has no effect on plan; --quiet has no effect on plan\n"),
        (["show", "none.py"], "RunError: none.py: has no Experiment named 'experiment'\n"),
        (["show", "broken.py"], "RunError: broken.py:2: SyntaxError: '(' was never closed\n"),
        (["show", "raises.py"], "RunError: raises.py:3: ZeroDivisionError: division by zero\n"),
        (["show", "bare.py"], "RunError: bare.py: exits when it is imported; put experiment.main() under "
         '`if __name__ == "__main__":`\n'),
        (["show", "broken.json"], "SpecError: 1 problem in broken.json\n  not JSON: Expecting value: line 1 column 1 (char 0)\n"),
        (["show", "latin.json"], "RunError: latin.json: cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: "
         "invalid start byte\n"),
        (["show", "sftt.py"], "RunError: sftt.py: no such file or run (relative to {place}; runs are searched in runs)\n"),
        (["show", "."], "RunError: .: is not a run directory: it has no experiment.json\n"),
    ],
)  # fmt: skip
def test_words_that_make_no_command(
    place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (place / "none.py").write_text("experimnt = 1\n")
    (place / "broken.py").write_text("import nnxdsl\nexperiment = (1,\n")
    (place / "raises.py").write_text("import json\n\njson.loads('1') / 0\n")
    (place / "bare.py").write_text("raise SystemExit(0)\n")
    (place / "broken.json").write_text("nothing")
    (place / "latin.json").write_bytes(b"\xff")
    assert refused(capsys, *argv) == message.replace("{place}", str(place))


def test_the_same_words_in_a_process_of_their_own(lab: Any) -> None:
    for argv in (("-m", "nnxdsl", "run", "sft.py", "stps=3"), ("sft.py", "stps=3"), ("sft.py", "run", "stps=3")):
        code, out, err = lab.python(*argv)
        assert (code, out) == (2, "")
        assert err == (
            "SpecError: 1 problem in Experiment 'sft'\n  stps: Experiment has no field 'stps'; did you mean 'steps'?\n"
        )
    assert lab.python("sft.py", "steps", "=", "10")[2] == (
        "UsageError: steps: write path=value without spaces: steps=10\n"
    )
    assert not (lab.place / "runs").exists()


def test_missing_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "empty").mkdir()
    said = refused(capsys, "run", "sft.py", "evaluation=None", "model.weights=Weights.HF('no/such/dir')")
    assert said == f"WeightsError: no/such/dir: no such directory (relative to {place}), nor the name of a repository\n"
    said = refused(
        capsys,
        "run",
        "sft.py",
        "evaluation=None",
        "model.weights=Weights.HF('empty')",
        "model.tokenizer=Tokenizer.Bytes()",
    )
    assert "config.json" in said
    assert said.startswith("WeightsError: empty")
    said = refused(
        capsys, "run", "sft.py", "model.weights=Weights.Checkpoint('empty')", "model.tokenizer=Tokenizer.Bytes()"
    )
    assert said.splitlines()[-1] == (
        "CheckpointError: empty holds no checkpoints; expected a run directory, its 'checkpoints', or one step in there"
    )


def config_of(size: str) -> dict[str, Any]:
    config = GEMMA3[size]
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim, "intermediate_size": config.mlp.dim, "num_hidden_layers": config.layers.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "sliding_window": config.window, "max_position_embeddings": config.max_length, "query_pre_attn_scalar": 32,
    }  # fmt: skip


def test_damaged_weights_name_file_and_parameter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = place / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(config_of("tiny")))
    model = "model=Model.Gemma3('tiny', weights=Weights.HF('hub'), tokenizer=Tokenizer.Bytes())"
    argv = ("run", "sft.py", "evaluation=None", model)
    (hub / "model.safetensors").write_bytes(b"not a safetensors file")
    said = refused(capsys, *argv).splitlines()[-1]
    assert said.startswith("WeightsError: hub/model.safetensors")
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}).encode()
    (hub / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))
    said = refused(capsys, *argv)
    assert "PlanError: " in said
    assert "in Weights.HF('hub')\n" in said
    assert "model.norm.weight" in said
    assert "model.embed_tokens.weight" in said
