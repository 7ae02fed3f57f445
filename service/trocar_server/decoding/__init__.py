"""Image decoding in separate processes, which a deadline, a cancellation or a stop can kill.

`headers` says what an image will need before anything is decoded; `worker` decodes, started by exec;
`process` is the server's end of it. Nothing here imports torch, and nothing is pickled.
"""
