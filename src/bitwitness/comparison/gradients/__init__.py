"""What happened to gradients and updates, all at once or to one of them."""
