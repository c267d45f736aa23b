"""Responses to unauthenticated requests: the sign-in form and JSON errors. No gradio."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

from ..html import Html, tag

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


def sentence(has_password: bool) -> str:
    """Instruction to sign in, one sentence."""
    if has_password:
        return "Sign in with the app's password."
    return (
        "Sign in with the app's token: open the address that `nnxdsl app` printed when it started, which ends in "
        "?token=..., or paste the token here."
    )


def refusal(status: int, has_password: bool) -> bytes:
    """JSON error for a program."""
    how = "send the header 'Authorization: Bearer TOKEN', where TOKEN is NNXDSL_APP_TOKEN or the token in the address "
    how += "that `nnxdsl app` printed"
    if has_password:
        how = "send the password as 'Authorization: Basic ...' with any user name, or " + how
    message = _WRONG[429] if status == 429 else f"authentication required: {how}"
    return json.dumps({"error": message, "detail": message}).encode()


def page(status: int, has_password: bool, root: str, next_url: str, *, again: bool) -> bytes:
    """Returns the sign-in page.

    Args:
        status: 401 without a secret, else the error of the last attempt.
        has_password: Whether the form asks for the password instead of the token.
        root: Root path of the app.
        next_url: Path to open afterwards, below `root`.
        again: Whether the page reloads itself once: a link on another site sends no SameSite=Strict cookie, a reload
            from the app's own page does.
    """
    label = "Password" if has_password else "Token"
    field = tag("input", type="password", name="secret", id="secret", required=True, autofocus=True)
    form = tag(
        "form",
        tag("label", label, for_="secret"),
        field,
        tag("input", type="hidden", name="next", value=next_url),
        tag("button", "Open the app", type="submit"),
        method="post",
        action=f"{root}{PATH}",
    )
    wrong = tag("p", tag("strong", _WRONG[status]), role="alert") if status in _WRONG else None
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="refresh", content="0") if again else None,
        tag("title", "nnxdsl: sign in"),
        Html(f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'),
    )
    body = tag("body", tag("main", tag("h1", "nnxdsl"), wrong, tag("p", sentence(has_password)), form))
    return f"<!doctype html>{tag('html', head, body, lang='en')}".encode()


def given(body: bytes) -> tuple[str, str]:
    """Parses a submitted form: the secret, and the path to open."""
    fields = parse_qs(body.decode("utf-8", errors="replace"))
    return fields.get("secret", [""])[-1].strip(), below_root(fields.get("next", ["/"])[-1])


def below_root(url: str) -> str:
    """Reduces any URL to a path of this app without a token; never another host."""
    path, _, query = url.partition("?")
    return address("/" + path.lstrip("/\\"), query)


def address(path: str, query: str) -> str:
    """Path with its query, without tokens."""
    query_rest = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "token"])
    safe = quote("/" + path.lstrip("/\\"), safe="/:@!$&'()*+,;=-._~")
    return f"{safe}?{query_rest}" if query_rest else safe
