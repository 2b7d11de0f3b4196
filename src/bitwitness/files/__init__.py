"""One way in and one way out: what is read is a regular file of bounded size, what is written is whole or not there."""
