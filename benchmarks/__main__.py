"""Every benchmark, in order: `make bench`."""

from benchmarks import serving, streams, transport

serving.main()
streams.main()
transport.main()
