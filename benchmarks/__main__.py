"""Every benchmark, in order: `make bench`."""

from benchmarks import serving, streams, surgery, training, transport

serving.main()
streams.main()
surgery.main()
training.main()
transport.main()
