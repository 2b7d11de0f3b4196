"""Sensors: each suspects, each in a file of its own."""
