"""What a run computed, written as it goes: modules, operators, parameters, gradients, the user's own points."""
