"""All that touches torch from within: hooks, dispatch modes, captures."""
