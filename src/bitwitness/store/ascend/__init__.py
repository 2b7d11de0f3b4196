"""Ascend dump and overflow files, read without the vendor's toolkit. Only `source` imports torch."""
