"""What is answered to requests without the token, and the form that takes it; plain ASGI, no gradio."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

from .html import Html, tag

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
    403: "That was not it: nothing was signed in.",
}


def sentence(has_password: bool) -> str:
    """What to do, in one sentence."""
    if has_password:
        return "This app asks for its password."
    return (
        "This app asks for its token: open the address that `nnxdsl app` printed when it started, which ends in "
        "?token=..., or paste the token here."
    )


def refusal(status: int, has_password: bool) -> bytes:
    """The same for a program, as JSON."""
    how = "send the header 'Authorization: Bearer TOKEN', where TOKEN is NNXDSL_APP_TOKEN or stands in the address "
    how += "that `nnxdsl app` printed"
    if has_password:
        how = "send the password as 'Authorization: Basic ...' with any user name, or " + how
    message = _WRONG[429] if status == 429 else f"this app asks who you are: {how}"
    return json.dumps({"error": message, "detail": message}).encode()


def page(status: int, has_password: bool, root: str, next_url: str, *, again: bool) -> bytes:
    """The form.

    Args:
        status: 401 where nothing was given, else why it is shown once more.
        has_password: Whether the password is asked for, and not the token.
        root: The app's own path.
        next_url: Where to go afterwards, below `root`.
        again: Whether the browser is to ask once more by itself. A link on another site brings no cookie; this page,
            which is the app's own, does.
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
    """What a form that was sent holds: the secret, and where to go."""
    fields = parse_qs(body.decode("utf-8", errors="replace"))
    return fields.get("secret", [""])[-1].strip(), below_root(fields.get("next", ["/"])[-1])


def below_root(url: str) -> str:
    """A URL as a path of this app, whatever it was: never another host's, without a token."""
    path, _, query = url.partition("?")
    return address("/" + path.lstrip("/\\"), query)


def address(path: str, query: str) -> str:
    """A path with a query, from which tokens are left out."""
    query_rest = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "token"])
    safe = quote("/" + path.lstrip("/\\"), safe="/:@!$&'()*+,;=-._~")
    return f"{safe}?{query_rest}" if query_rest else safe
