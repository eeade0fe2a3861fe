"""Training that starts from the weights of another, with parts of the net left as they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from project.downloads import RemoteFile, fetch

Weights = Mapping[str, Tensor]
PUBLISHED = "published"
BACKBONE = "backbone"


class Finetuning(Callback):
    """Puts weights into `model.net` before training, and keeps some of its modules from changing.

    The last layer keeps its own initial weights where its shape is another: that of the new classes. Frozen modules
    stay in evaluation mode, so that their batch norm keeps its statistics and nothing is dropped. They stay frozen to
    the end of the run: DDP and sharding strategies decide at the start which gradients they exchange, and Lightning's
    `BackboneFinetuning`, which thaws layers under way, gives schedules parameters that they don't know. To train all
    layers afterwards, start a second run from the first one's checkpoint.

    Args:
        weights: `published` for those that torchvision or timm publish for the net, or a file: a checkpoint of this
            project, or a state dict saved by torch. None keeps the initial weights.
        freeze: `backbone` for all but the last layer, or the modules' names, as [conv1, layer1]. None freezes nothing.

    Raises:
        ValueError: There are no such weights, they belong to another net, or the net has no such module.
    """

    def __init__(self, weights: str | None = PUBLISHED, freeze: str | Sequence[str] | None = BACKBONE) -> None:
        self.weights = weights
        self.freeze = freeze
        self._frozen: list[nn.Module] = []
        self._failure: ValueError | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the strategy wraps or shards the net, and before the optimizer is given its parameters."""
        if stage != "fit":
            return
        net = getattr(pl_module, "net", None)
        if not isinstance(net, nn.Module):
            raise ValueError(f"callbacks=finetuning works on model.net, which {type(pl_module).__name__} does not have")
        try:
            if self.weights == PUBLISHED:
                load(net, published_weights(pl_module.hparams["net"]))
            elif self.weights is not None:
                load(net, read_weights(Path(self.weights).expanduser()))
        except ValueError as error:
            self._failure = error  # unless the run goes on from a checkpoint, which is not known yet
        self._frozen, parameters = frozen_parts(net, self.freeze)
        for parameter in parameters:
            parameter.requires_grad_(False)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The run goes on with weights of its own."""
        self._failure = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After Lightning has put the whole model into training mode; validations restore what they find."""
        if self._failure is not None:
            raise self._failure
        for module in self._frozen:
            module.eval()


def load(net: nn.Module, weights: Weights) -> None:
    """Copy weights into a net, except into its last layer where that has another shape.

    Raises:
        ValueError: Others differ too.
    """
    own = net.state_dict()
    last = last_layer(net)
    of_last = {f"{last}.{name}" if last else name for name, _ in net.get_submodule(last).named_parameters()}
    fitting = {name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape}
    missing = [name for name in own if name not in fitting and name not in of_last]
    # Counters of batch norm are younger than some files.
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing:
        shapes = "is not among them" if missing[0] not in weights else f"has shape {tuple(weights[missing[0]].shape)}"
        raise ValueError(
            f"callbacks.finetuning.weights are those of another net: {missing[0]} {shapes}, in model.net it is "
            f"{tuple(own[missing[0]].shape)}: choose the net that they were trained with"
        )
    net.load_state_dict(fitting, strict=False)


def last_layer(net: nn.Module) -> str:
    """The name of the last module, in the order of their definition, that has parameters of its own."""
    names: list[str] = [name for name, module in net.named_modules() if list(module.parameters(recurse=False))]
    return names[-1]


def frozen_parts(net: nn.Module, freeze: str | Sequence[str] | None) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules and the parameters to freeze.

    Raises:
        ValueError: There is no such module, or nothing would be left to train.
    """
    modules = dict(net.named_modules())
    if freeze is None:
        return [], []
    if freeze == BACKBONE:
        head = last_layer(net)
        names = [name for name in modules if name and not f"{head}.".startswith(f"{name}.")]
        kept = set(modules[head].parameters())
        return [modules[name] for name in names], [each for each in net.parameters() if each not in kept]
    names = [freeze] if isinstance(freeze, str) else list(freeze)
    unknown = [name for name in names if name not in modules]
    if unknown:
        tops = ", ".join(name for name, _ in net.named_children())
        raise ValueError(
            f"callbacks.finetuning.freeze={unknown[0]} is no module of {type(net).__name__}, which has {tops}: type "
            f"callbacks.finetuning.freeze={BACKBONE}, or names of modules in a list"
        )
    parameters = [each for name in names for each in modules[name].parameters()]
    if len(set(parameters)) == len(list(net.parameters())):
        raise ValueError("callbacks.finetuning.freeze leaves no weights to train: name fewer modules")
    return [modules[name] for name in names], parameters


def read_weights(path: Path) -> Weights:
    """The net's weights out of a checkpoint or a saved state dict; nothing in the file is executed.

    Raises:
        ValueError: There is no such file, or it holds no weights.
    """
    if not path.is_file():
        raise ValueError(
            f"callbacks.finetuning.weights={path} is no file: type callbacks.finetuning.weights= with one that is, "
            f"{PUBLISHED} or null"
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the reader raise anything
        raise ValueError(f"{path} holds no weights that torch can read safely ({type(error).__name__})") from error
    weights = content.get("state_dict", content) if isinstance(content, dict) else {}
    weights = {name.removeprefix("net."): tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    if not weights:
        raise ValueError(f"{path} holds no weights: name a checkpoint, or a state dict saved by torch")
    return weights


def published_weights(net: Mapping[str, Any]) -> Weights:
    """What torchvision or timm publish for the net of this config.

    Raises:
        ValueError: Nothing is published for it, or it can't be had.
    """
    package = str(net["_target_"]).partition(".")[0]
    if package == "torchvision":
        return _of_torchvision(str(net["name"]))
    if package == "timm":
        return _of_timm(str(net["model_name"]))
    raise ValueError(
        f"no weights are published for model.net._target_={net['_target_']}: type model/net=torchvision, "
        "model/net=timm, or callbacks.finetuning.weights= with a file"
    )


def _of_torchvision(name: str) -> Weights:
    from torchvision.models import get_model_weights

    url = get_model_weights(name).DEFAULT.url
    # The file's name ends in how its digest begins. torch's own folder: what is there already is not fetched again.
    digest = Path(url).stem.rpartition("-")[2]
    (path,) = fetch([RemoteFile(url, digest)], Path(torch.hub.get_dir(), "checkpoints"))
    return read_weights(path)


def _of_timm(name: str) -> Weights:
    import timm

    try:
        weights: Weights = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of whichever library fetches the file
        config = timm.get_pretrained_cfg(name)
        place = (config and (config.url or config.hf_hub_id)) or "where timm's documentation says"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"the weights of {name} can't be had ({reason}): fetch them from {place} on a machine with a network and "
            "type callbacks.finetuning.weights= with their file"
        ) from error
    return weights
