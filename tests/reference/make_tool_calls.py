"""Writes `tool_calls.json`: two tool calls as the chat templates of published models write them.

    python tests/reference/make_tool_calls.py

Needs TRL, whose package has the templates, and transformers, which renders them.
"""

from __future__ import annotations

import json
from pathlib import Path

import trl
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
PROPERTIES = {"question": {"type": "string", "description": "What."},
              "count": {"type": "integer", "description": "How many."}}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["question"]}}}  # fmt: skip
ARGUMENTS = ({"question": 'who, {and} "why"', "count": 3}, {"question": "x\ny"})


def call(number: int, arguments: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "id": f"call0000{number}", "function": {"name": "look_up", "arguments": arguments}}


def render(template: str, chat: list[dict[str, object]], add_generation_prompt: bool) -> str:
    options = {"chat_template": template, "add_generation_prompt": add_generation_prompt}
    return render_jinja_template([chat], tools=[TOOL], bos_token="", eos_token="", **options)[0][0]


def main() -> None:
    result = {}
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if "training" in file.stem:
            continue
        rendered = {}
        for count in (1, 2):
            calls = [call(*one) for one in enumerate(ARGUMENTS[:count], start=1)]
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
            try:
                texts = [render(file.read_text(), *one) for one in ((chat[:1], True), (chat[:1], False), (chat, False))]
            except Exception:  # it renders no such chat
                continue
            written = next((texts[2][len(text) :] for text in texts[:2] if texts[2].startswith(text)), texts[2])
            if "look_up" in written:
                rendered[count] = written
        if rendered:
            result[file.stem] = rendered
    content = {"trl": trl.__version__, "arguments": ARGUMENTS, "texts": result}
    (HERE / "tool_calls.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
