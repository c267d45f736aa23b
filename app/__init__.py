"""The web app: pages over a directory of runs, for launching, watching and comparing them. Never imports jax.

How a page is written stands in `app/page.py`; `app/site.py` is the one file that knows gradio. In a wheel this package
is `nnxdsl._app`, in the sources it is the folder `app`: its files import each other relatively.
"""
