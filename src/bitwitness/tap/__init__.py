"""All that touches torch from within: hooks, dispatch modes, patches, the moments of a step."""
