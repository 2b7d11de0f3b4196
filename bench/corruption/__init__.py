"""The parts of the campaign over every kind of silent corruption; see ``bench/corrupt.py``."""
