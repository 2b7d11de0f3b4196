"""Who made the first NaN: operators whose result is not finite although what they were given is."""
