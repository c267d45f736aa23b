"""Writes `tool_schemas.json`: what `get_json_schema` of transformers makes of the functions of tool_functions.py.

    python tests/reference/make_tool_schemas.py

Needs transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import get_json_schema

sys.path.insert(0, str(Path(__file__).parent))

from tool_functions import FUNCTIONS

HERE = Path(__file__).parent


def main() -> None:
    schemas = {function.__name__: get_json_schema(function) for function in FUNCTIONS}
    content = {"transformers": transformers.__version__, "schemas": schemas}
    (HERE / "tool_schemas.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
