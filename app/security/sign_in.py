"""Responses to unauthenticated requests: the sign-in form and JSON errors. No gradio."""

from __future__ import annotations

import json
from html import escape
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

PATH = "/sign-in"
MOST_BYTES = 4_096

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto 0; padding: 0 1rem; }
:root { color-scheme: light dark; }
input, button { font: inherit; padding: .4rem .6rem; box-sizing: border-box; }
input { width: 100%; margin: .3rem 0 .8rem; }
"""
_WRONG = {
    429: "Too many passwords are waiting to be checked: try again in a minute.",
    403: "Wrong token or password.",
}
_PASSWORD = "Sign in with the app's password."
_TOKEN = (
    "Sign in with the app's token: open the address that `nnxdsl app` printed when it started, which ends in "
    "?token=..., or paste the token here."
)
_HEADER = (
    "send the header 'Authorization: Bearer TOKEN', where TOKEN is NNXDSL_APP_TOKEN or the token in the address that "
    "`nnxdsl app` printed"
)


def refusal(status: int, has_password: bool) -> str:
    """JSON error for a program."""
    hint = "send the password as 'Authorization: Basic ...' with any user name, or " if has_password else ""
    message = _WRONG[429] if status == 429 else f"authentication required: {hint}{_HEADER}"
    return json.dumps({"error": message, "detail": message})


def page(status: int, has_password: bool, root: str, next_url: str, *, again: bool) -> str:
    """Returns the sign-in page, which opens a path below the root afterwards.

    It may reload itself once: a link on another site sends no SameSite=Strict cookie, a reload of the app's page does.
    """
    wrong = f'<p role="alert"><strong>{_WRONG[status]}</strong></p>' if status in _WRONG else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{'<meta http-equiv="refresh" content="0">' if again else ""}
<title>nnxdsl: sign in</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><main><h1>nnxdsl</h1>{wrong}<p>{escape(_PASSWORD if has_password else _TOKEN)}</p>
<form method="post" action="{escape(root)}{PATH}"><label for="secret">{"Password" if has_password else "Token"}</label>
<input type="password" name="secret" id="secret" required autofocus>
<input type="hidden" name="next" value="{escape(next_url)}"><button type="submit">Open the app</button></form>
</main></body></html>"""


def credentials(body: bytes) -> tuple[str, str]:
    """Parses a submitted form: the secret, and the path to open, which is below this app's root."""
    fields = parse_qs(body.decode("utf-8", errors="replace"))
    path, _, query = fields.get("next", ["/"])[-1].partition("?")
    return fields.get("secret", [""])[-1].strip(), address(path, query)


def address(path: str, query: str) -> str:
    """Path of this app, never another host, with its query but without tokens."""
    query_rest = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "token"])
    safe = quote("/" + path.lstrip("/\\"), safe="/:@!$&'()*+,;=-._~")
    return f"{safe}?{query_rest}" if query_rest else safe
