"""Alerts for a fleet: metrics for Prometheus; a health event and a line of JSON for each verdict. Nobody waits for them."""
