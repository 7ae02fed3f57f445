"""An unmodified tritonclient against our server; `make check-triton`, in an environment of its own."""
