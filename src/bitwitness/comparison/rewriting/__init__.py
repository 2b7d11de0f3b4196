"""Ways of writing one mathematics: differences of which nothing is left."""
