"""Deployments: a loaded model with its replicas and recorded passes."""
