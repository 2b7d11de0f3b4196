"""Why a step cannot be run again, as far as its recording knows; shown in the coverage."""

from __future__ import annotations

CREATE_GRAPH = "backward ran with create_graph: second derivatives are not replayed"
NO_FORWARD = (
    "the model's own forward is not called; give the module that the training calls: gradients are sensed, but there is "
    "nothing to run again"
)
EVALUATED = (
    "its forward ran in evaluation mode, in which the model had not been trained before: was model.train() forgotten after an "
    "evaluation? (later steps of this kind are looked at)"
)
DRAWN_ELSEWHERE = (
    "another thread of the script works ({thread}): random numbers that were drawn during the step may be its own, or what "
    "it draws next"
)
CLEARED = "a forward was backpropagated again after the gradients of its first backward had been zeroed"
WRAPPED_LATER = (
    "the model was wrapped or sharded after its guard was made, so that other ranks share its gradients: make the guard "
    "after that"
)
EXCHANGED_IN_BACKWARD = "ranks exchange something in the backward, by other means than DistributedDataParallel"
REDUCED_TWICE = (
    "gradients are reduced over the ranks more than once in a step (accumulation without no_sync()), so that a rank's own part "
    "is known no more: run all backwards but the last one under model.no_sync(), which is also faster"
)
IN_LOSS_CODE = "ranks exchange something in the loss code"
CHANGED_BY_HOOK = "a hook of the script's ({}) changes a gradient in the backward, outside the model's forward"
PARAMETER_HOOKS = "the hooks on parameters' gradients are not the same now as in the backward"
SOME_PARAMETERS = "the backward is asked for the gradients of some parameters only (inputs=)"
FROZEN = "parameters were frozen between the forward and the backward"
FROZEN_MOVED = "the forward changed a frozen parameter that it had not been seen to change before"
AUTOCAST_BACKWARD = "the backward runs under autocast"
UNFROZEN = (
    "{} was frozen when the model was guarded: a DistributedDataParallel that was made with it frozen does not reduce its "
    "gradient, and the ranks drift apart; wrap the model again after unfreezing"
)
DISPATCHING = "the script's {mode} was on in the forward or is on now, and what it makes of results is not known"
OWN_OUTPUTS = "a forward was given what the script had computed from an earlier one's outputs and written elsewhere"
"""Why gradients cannot be put right, if an earlier forward's outputs were wrong."""
