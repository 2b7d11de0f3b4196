"""Why a node's results differ."""
