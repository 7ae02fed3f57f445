"""Scheduling: admission, fair queues, leases, the owner thread."""
