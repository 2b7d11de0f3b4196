"""``bitwitness demo``: the main job on a plain machine, start to end."""
