"""Answers OpenAI's protocol over HTTP with a model of a run or of a directory: `nnxdsl serve`."""
