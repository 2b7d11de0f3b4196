"""The re-execution of a captured step, bit for bit, here or on another rank's device; healing with what it gives."""
