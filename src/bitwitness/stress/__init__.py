"""The device's own test: work whose bits are known or voted on, on every device at once, for a stated time."""
