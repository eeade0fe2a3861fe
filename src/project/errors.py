"""Errors that the user caused, and how they are told."""

import difflib
import dis
import os
import re
from collections.abc import Iterable


class UserError(Exception):
    """What was given, what is allowed and what to type, in one sentence; shown without a traceback."""


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The allowed name that looks most like ``name``, or None where none comes near.

    A shared beginning counts more than other letters: who types ``val/accuracy`` means ``val/acc``, not ``val/auroc``.
    """
    names = list(allowed)
    matches = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff)  # the nearest first

    def likeness(match: str) -> float:
        pairs = list(zip(name, match, strict=False))
        shared = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
        return difflib.SequenceMatcher(None, match, name).ratio() + 0.25 * shared / max(1, len(pairs))

    return max(matches, key=likeness, default=None)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``": did you mean X?"``, or nothing where no allowed name comes near."""
    match = nearest(name, allowed)
    return f": did you mean {match}?" if match else ""


# What libraries say at length and without this project's names for it: a part of their text, as a regular expression,
# and what to read instead.
_UNUSED = (
    "some parameters of the model had no part in the loss of a step, and plain DDP waits for the gradients of all: "
    "type trainer/strategy=ddp_find_unused"
)
_UNINITIALIZED = (
    "a lazy module, as nn.LazyLinear, has no weights yet, and several devices must begin with the same ones: give the "
    "number of features, as in nn.Linear(in_features, out_features), or run one batch through the net at the end of "
    "the model's __init__"
)
_NOTHING_TRAINED = (
    "the loss of training_step depends on no weight that is trained: the model has none, all of its weights are frozen "
    "(requires_grad=False), or the loss came out of .item(), .detach() or torch.no_grad()"
)
_IN_OUR_WORDS = {
    r"Too many open files|received \d+ items of ancdata": (
        "more files were to be open at once than this shell lets a process have: type ulimit -n 4096 before the "
        "command, or fewer trainer.devices and data.num_workers"
    ),
    r"Could not run '(aten::linalg_vector_norm|aten::clamp_|fsdp::chunk_cat)' with arguments from the 'Sparse": (
        r"an embedding with sparse=True has sparse gradients, for which torch has no \1: leave out sparse=True, or "
        "type trainer.gradient_clip_val=null where gradients are clipped, trainer/strategy=ddp where weights are spread"
    ),
    "DistributedDataParallel is not needed when a module doesn't have any parameter": _NOTHING_TRAINED,
    "element 0 of tensors does not require grad and does not have a grad_fn": _NOTHING_TRAINED,
    r"You requested to check (\S+) of the `\w+` but \S+ \* (\d+) < 1\..* `(limit_\w+_batches)=(\S+)`": (
        r"\1 of \2 batches is less than one: type trainer.\3=\4 or more; or, where it was typed as "
        r"trainer.overfit_batches, a number of batches, as trainer.overfit_batches=1"
    ),
    r"Unable to find (?:address|interface) for: (\S+)": (
        r"GLOO_SOCKET_IFNAME=\1 names no network interface of this host that has an address: type unset "
        "GLOO_SOCKET_IFNAME, or set it to one that ip -brief address lists, as lo for a single host"
    ),
    r"`val_check_interval` \((\d+)\) must be less than or equal to the number of the training batches \((\d+)\)": (
        r"trainer.val_check_interval=\1 is more than the \2 batches of an epoch: type trainer.val_check_interval=\2 or "
        "less, or trainer.check_val_every_n_epoch=null too, for a validation after so many batches of any epochs"
    ),
    "Modules with uninitialized parameters can't be used": _UNINITIALIZED,
    "uninitialized parameter in <method 'detach'": _UNINITIALIZED,  # of FSDP
    "parameters that were not used in producing the loss": _UNUSED,
    "Expected to have finished reduction in the prior iteration": _UNUSED,
    "Your training graph has changed in this iteration": (
        "some steps use other parameters of the model than the first did, and trainer/strategy=ddp_static_graph takes "
        "all steps for alike: type trainer/strategy=ddp_find_unused"
    ),
    "You restored a checkpoint with current_epoch": (
        "the run has trained more epochs than trainer.max_epochs says, so there is nothing to go on with: type a "
        "larger trainer.max_epochs=N, or leave it out"
    ),
    "Sharding propagation failed": (
        "the optimizer or the model asks for an operation that torch does not know for weights that are spread over "
        "ranks, as optimizer._target_=torch.optim.Adafactor does: type optimizer=adamw, or trainer/strategy=ddp"
    ),
    "SparseAdam does not support dense gradients": (
        "optimizer._target_=torch.optim.SparseAdam updates weights with sparse gradients alone, as of an embedding "
        "with sparse=True, and this model has others: type optimizer=adamw"
    ),
    "Timed out waiting": (
        "a rank waited for others longer than launch.timeout_s: self.log and compute() of a metric, trainer.log_dir "
        "and save_checkpoint are for all ranks to call, not for one (the run's folder ranks shows where each was); if "
        "one only takes longer, type launch.timeout_s=3600"
    ),
}


def sentence(error: BaseException) -> str | None:
    """The text of an error that the user caused; None for any other, which needs its traceback.

    Data modules and models know nothing of ``UserError``: a ``ValueError`` that is raised by this package's own
    code (not by a library that it calls), or of a class of its own, is a sentence too, and so is Lightning's
    ``MisconfigurationException``. Some texts of libraries have a sentence of ours.
    """
    if isinstance(error, UserError):
        return str(error)
    of_lightning = type(error).__name__ == "MisconfigurationException"
    if of_lightning or isinstance(error, RuntimeError | ValueError | OSError):
        told = _in_our_words(str(error))
        if told or of_lightning:
            return told or str(error)
    if isinstance(error, ValueError) and _is_ours(type(error).__module__):
        return str(error)  # also after torch carried it out of a loader's worker
    # Exactly that: a library's subclass may wrap an error of ours, with its traceback and a text of its own.
    if type(error) is ValueError and error.__traceback__ is not None:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        code, ours = last.tb_frame.f_code, _is_ours(last.tb_frame.f_globals.get("__name__", ""))
        # int("x") or a wrong unpacking in our code is a bug, though its last frame is ours: there nothing says raise.
        if ours and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS":
            return str(error)
    return None


def _in_our_words(text: str) -> str | None:
    for theirs, ours in _IN_OUR_WORDS.items():
        if found := re.search(theirs, text):
            return found.expand(ours)
    return None


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


FULL_ERROR = "HYDRA_FULL_ERROR"


def full_tracebacks() -> bool:
    """Whether the user asked for tracebacks with HYDRA_FULL_ERROR=1."""
    return os.environ.get(FULL_ERROR) == "1"
