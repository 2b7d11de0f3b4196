"""Ascend dump and overflow files, read without the vendor's toolkit. Imports no torch."""
