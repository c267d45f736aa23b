"""The web app: pages for launching, watching and comparing the runs of a directory. Never imports jax.

`app/page.py` documents how to write a page; only `app/site.py` imports gradio. In a wheel this package is
`nnxdsl._app`, in the repository it is the folder `app`: its files import each other relatively.
"""
