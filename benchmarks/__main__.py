"""Every benchmark, in order: `make bench`."""

from benchmarks import serving, transport

serving.main()
transport.main()
