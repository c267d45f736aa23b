"""Sends alerts to a command, and to a webhook, as they are noticed."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import attrs

from nnxdsl.errors import RunError

from ..settings import Settings
from . import alerts
from .jobs import kill_group, run

SEND_SECONDS = 30.0  # timeout of the command, and of the webhook


class AlertSender:
    """A thread that checks runs and sends what is new, if the settings have a command or a webhook."""

    def __init__(self, settings: Settings, source: alerts.Alerts) -> None:
        """Starts the thread, which sends what is noticed from the start of the app on."""
        self._settings, self._source = settings, source
        self._ended, self._child = threading.Event(), None
        self._senders = [self._run] if settings.alert_command else []
        self._senders += [self._post] if settings.alert_webhook else []
        self._thread = threading.Thread(target=self._keep, name="alerts", daemon=True)
        if self._senders:
            self._thread.start()

    def close(self) -> None:
        """Stops the thread, and kills a command that is running."""
        self._ended.set()
        if self._senders:
            kill_group(self._child)
            self._thread.join(5)

    def _keep(self) -> None:
        sent = self._source.recorded
        while not self._ended.is_set():
            new = self._source.all()[sent:]
            sent += len(new)
            for alert, send in itertools.product(new, self._senders):
                if self._ended.is_set():
                    return
                try:
                    send(json.dumps(attrs.asdict(alert)).encode())
                except (OSError, http.client.HTTPException, RunError) as error:
                    sys.stderr.write(f"alerts: {alert.kind} of {alert.run} was not sent: {error}\n")
            self._ended.wait(alerts.CHECK_SECONDS)

    def _run(self, alert: bytes) -> None:
        """Runs the command with an alert as its standard input; raises if it fails or has to be killed."""
        argv = self._settings.alert_command
        variables = {name: value for name, value in os.environ.items() if not name.startswith("NNXDSL_APP_")}

        def begun(child: subprocess.Popen[bytes]) -> None:
            self._child = child

        code, _, errors = run(argv, self._settings.project, variables, SEND_SECONDS, begun, alert)
        if code is None:
            raise RunError(f"{argv[0]} did not end within {SEND_SECONDS:g} s and was killed")
        if code:
            raise RunError(f"{argv[0]} ended with exit code {code}: {errors}")

    def _post(self, alert: bytes) -> None:
        """Posts an alert to the webhook; raises `OSError` if that fails, or if the answer is a redirect."""
        url = self._settings.alert_webhook or ""
        request = urllib.request.Request(url, alert, {"Content-Type": "application/json"})
        urllib.request.build_opener(_NoRedirects).open(request, timeout=SEND_SECONDS).close()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect may lead to another scheme, and would turn a POST into a GET: it is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows none."""
