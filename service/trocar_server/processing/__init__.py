"""Tokenizers and feature extractors of hosted models, in separate processes that a deadline can kill.

`inputs` are the samples, `folder` the processor's files, `worker` the process with `tokenization` and
`audio`, `exchange` the server's end of it. Nothing here imports torch in the server, and nothing is pickled.
"""
