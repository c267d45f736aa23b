"""docs/guides/rl.md: its code runs, and its table has the fields and defaults of the class."""

from __future__ import annotations

import ast
import re
from typing import Any

import attrs

from nnxdsl import Distance, Environment, Objective, Reward
from nnxdsl.config.core.base import declared, members
from nnxdsl.config.core.codegen import render
from nnxdsl.config.objectives.environment import environments
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data import BytesTokenizer, Encoder
from nnxdsl.data.rewards import Rewards, Sampled, Scores
from nnxdsl.data.tokenizers.chat_template import template_source
from nnxdsl.rollouts.environments import Environments
from tests.doc_pages import ROOT, texts

PAGE = (ROOT / "docs" / "guides" / "rl.md").read_text(encoding="utf-8")


def test_its_code_runs() -> None:
    space: dict[str, Any] = {}
    before, known = dict(functions), dict(environments)
    try:
        for block in texts("docs/guides/rl.md", "python"):
            exec(block, space)
        game = space["Guess"]()
        game.reset(number=7)
        assert (game.step("5"), game.step(" 7 ")) == (("try again", 0.0, False), ("right", 1.0, True))
        encoder = Encoder(BytesTokenizer(template_source(str(ROOT / "experiments" / "tools.jinja"))))
        assert not Environments(space["guess"].objective, encoder).tools
        for name, tool in (("calculator", "multiply"), ("bank", "pay")):
            played = attrs.evolve(space["guess"].objective, environment=Environment(name))
            assert [one["function"]["name"] for one in Environments(played, encoder).tools] == [tool]
        assert space["grpo"].objective.rewards[1] == Reward("brief", weight=0.2)
        rewards = Rewards((Reward("brief"), Reward("right length"), Reward("judged")))
        row = {"prompt": "", "words": 5, "answer": "to"}
        scores = rewards.score(Sampled(["one two"], [[1]], [row], [""]))
        assert scores == Scores([[1 - 7 / 200, 0.0, 2 / 26]], {"judge/busy": [0.5]}, {"right answer": ["to"]})
        assert Rewards(space["rewards"][1:], 256).names == ("math_accuracy", "think_format", "soft_overlong")
    finally:
        functions.clear()
        functions.update(before)
        environments.clear()
        environments.update(known)
    assert space["distill"].distance == Distance.JSD()


def test_its_tables_are_those_of_the_classes() -> None:
    table = PAGE.partition("| field |")[2].partition("\n\n")[0].splitlines()[2:]
    actual = [[cell.strip().strip("`") for cell in line.strip("|").split("|")][:2] for line in table]
    expected = [
        [name, "" if field.default is attrs.NOTHING else render(field.default).replace('"', "'")]
        for name, field in declared(Objective.GRPO).items()
    ]
    assert actual == expected
    named = re.findall(r"`(Distance\.\w+)\(", PAGE.partition("| `distance` |")[2].partition("\n\n")[0])
    assert named == [cls.__qualname__ for cls in members(Distance).values()]
    listed = re.findall(r"^\| `(Reward\.\w+)\(", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(cls.__qualname__ for cls in members(Reward).values() if cls is not Reward.Function)
    # Each class is there, and what its row says are its defaults.
    rows = PAGE.partition("| class | a token's loss |")[2].partition("\n\n")[0].splitlines()[2:]
    classes = [cls for cls in members(Objective).values() if issubclass(cls, PolicyGradient)]
    assert [re.findall(r"`(Objective\.\w+)`", row)[0] for row in rows] == [cls.__qualname__ for cls in classes]
    for cls, row in zip(classes, rows, strict=True):
        for name, value in re.findall(r"`(\w+)=([^`]+)`", row):
            field = declared(cls)[name]
            assert (name, value) == ("baseline", '"mean"') or field.default == ast.literal_eval(value), (cls, name)
        has_kl_in_table = "beta" in row
        assert has_kl_in_table or cls is Objective.GRPO or declared(cls)["beta"].default == 0
