"""Watch rules, one a file: each tells of a step of all series what is unusual in it."""
