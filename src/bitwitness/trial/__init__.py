"""An operator on trial: is its result within what its dtype and formula allow."""
