"""Every benchmark, in order: `make bench`."""

from benchmarks import serving, streams, surgery, transport

serving.main()
streams.main()
surgery.main()
transport.main()
