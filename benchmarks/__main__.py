"""Every benchmark, in order: `make bench`."""

from benchmarks import cache, serving, streams, surgery, training, transport

serving.main()
cache.main()
streams.main()
surgery.main()
training.main()
transport.main()
