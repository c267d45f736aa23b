"""The web app: pages for launching, watching and comparing the runs of a directory. Never imports jax.

`app/page.py` documents how to write a page; only `app/site.py` imports gradio. In a wheel this package is
`nnxdsl._app`, in the repository it is the folder `app`: its files import each other relatively.
"""

import os

# Disables gradio's telemetry and version check, which are read when it is imported.
os.environ.update(
    GRADIO_ANALYTICS_ENABLED="False",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    GRADIO_SHARE="False",
    GRADIO_MCP_SERVER="False",
)
