"""The web app: pages for launching, watching and comparing the runs of a directory. Never imports jax.

`app/view.py` documents how to write a page. In a wheel this package is
`nnxdsl._app`, in the repository it is the folder `app`: its files import each other relatively.
"""

import contextlib
import os

# Disables gradio's telemetry and version check, which are read when it is imported.
os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_SHARE="False", GRADIO_MCP_SERVER="False")
# huggingface_hub reads its own when it is imported; runs that the app starts keep the user's.
_environment = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")}
os.environ.update(dict.fromkeys(_environment, "1"))
with contextlib.suppress(ImportError):
    import huggingface_hub.constants  # noqa: F401
for _name, _value in _environment.items():
    if _value is None:
        del os.environ[_name]
    else:
        os.environ[_name] = _value
