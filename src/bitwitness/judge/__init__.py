"""Deciding who was wrong: experiments made by all ranks together, and the verdict."""
