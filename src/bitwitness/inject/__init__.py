"""Fault injection: a device that computes wrongly, declared in TOML."""
