"""Starting from other weights, and leaving some of them as they are."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from project.data import DataModule, TensorDataset
from project.models import ImageClassifier
from project.models.finetuning import Finetuning, frozen_parts, last_layer, load, published_weights, read_weights
from project.models.nets import MLP, ResidualCNN, ViT


class Noise(DataModule):
    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        image = 3 + 2 * torch.randn(16, 1, 8, 8, generator=generator)  # batch norm's statistics would follow it
        images = TensorDataset({"image": image, "label": torch.arange(16) % 4})
        self.train_set = self.val_set = self.test_set = images


def cnn(num_classes: int = 4, seed: int = 0) -> ResidualCNN:
    torch.manual_seed(seed)
    return ResidualCNN([1, 8, 8], num_classes, width=4, blocks=2)


def classifier(seed: int = 0) -> ImageClassifier:
    torch.manual_seed(seed)
    net = {"_target_": "project.models.nets.ResidualCNN", "image_shape": [1, 8, 8], "num_classes": 4, "width": 4}
    return ImageClassifier({**net, "blocks": 2}, {"_target_": "torch.optim.AdamW", "lr": 0.1}, num_classes=4)


def fit(folder: Path, model: ImageClassifier, callback: Finetuning, epochs: int = 2, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Noise(batch_size=8), **arguments)
    return trainer


def changed(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_frozen_backbone_keeps_weights_and_batch_norm_while_the_head_learns(tmp_path: Path) -> None:
    model = classifier()
    before = snapshot(model.net)
    trainer = fit(tmp_path, model, Finetuning(weights=None))
    assert changed(before, model.net) == {"head.weight", "head.bias"}
    (group,) = trainer.optimizers[0].param_groups
    assert len(group["params"]) == 2


def test_named_modules_are_frozen_and_the_rest_learns(tmp_path: Path) -> None:
    model = classifier()
    before = snapshot(model.net)
    fit(tmp_path, model, Finetuning(weights=None, freeze=["stem", "body.0"]))
    learned = {name for name in before if not name.startswith(("stem.", "body.0."))}
    assert changed(before, model.net) == learned


def test_a_run_that_goes_on_keeps_the_backbone_frozen_and_needs_no_file(tmp_path: Path) -> None:
    torch.save(cnn(seed=5).state_dict(), tmp_path / "weights.pth")
    callback = Finetuning(str(tmp_path / "weights.pth"))
    first = classifier()
    fit(tmp_path, first, callback, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "weights.pth").unlink()
    model = classifier(seed=1)
    fit(tmp_path, model, Finetuning(callback.weights), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    head = {"head.weight", "head.bias"}
    assert changed(cnn(seed=5).state_dict(), first.net) == changed(first.net.state_dict(), model.net) == head


def test_weights_come_from_a_checkpoint_or_a_state_dict(tmp_path: Path) -> None:
    source = classifier(seed=3)
    trainer = fit(tmp_path, source, Finetuning(weights=None, freeze=None))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    torch.save(source.net.state_dict(), tmp_path / "net.pth")
    for name in ("run.ckpt", "net.pth"):
        net = cnn()
        load(net, read_weights(tmp_path / name))
        assert not changed(source.net.state_dict(), net)


def test_the_last_layer_keeps_its_own_weights_for_another_number_of_classes() -> None:
    source, net = cnn(num_classes=10, seed=1), cnn(num_classes=4)
    head = net.head.weight.clone()
    load(net, source.state_dict())
    assert torch.equal(net.head.weight, head)
    rest = nn.ModuleList([net.stem, net.body])
    assert not changed(nn.ModuleList([source.stem, source.body]).state_dict(), rest)


@pytest.mark.parametrize(
    ("net", "head"),
    [(MLP([1, 8, 8], 4), "layers.7"), (cnn(), "head"), (ViT([1, 8, 8], 4), "head"), (nn.Linear(2, 2), "")],
)
def test_the_last_layer_is_found_and_everything_else_is_backbone(net: nn.Module, head: str) -> None:
    assert last_layer(net) == head
    if head:
        _, parameters = frozen_parts(net, "backbone")
        frozen = {id(parameter) for parameter in parameters}
        names = {name for name, parameter in net.named_parameters() if id(parameter) not in frozen}
        assert names == {f"{head}.weight", f"{head}.bias"}


def test_a_new_run_without_its_weights_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.pth is no file"):
        fit(tmp_path, classifier(), Finetuning("nowhere.pth"))


def test_files_without_weights_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights=.*nowhere.pth is no file: type callbacks.finetuning.weights="):
        read_weights(tmp_path / "nowhere.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match="holds no weights that torch can read safely"):
        read_weights(tmp_path / "text.pth")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="holds no weights: name a checkpoint"):
        read_weights(tmp_path / "other.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "pickled.pth")  # a whole module, which would run what it names
    with pytest.raises(ValueError, match="can read safely"):
        read_weights(tmp_path / "pickled.pth")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            ResidualCNN([1, 8, 8], 4, width=8, blocks=2).state_dict(),
            r"stem.0.weight has shape \(8, 1, 3, 3\), in model",
        ),
        (nn.Linear(2, 2).state_dict(), "stem.0.weight is not among them"),
    ],
)
def test_weights_of_another_net_are_refused(weights: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(cnn(), weights)


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (["layer9"], "freeze=layer9 is no module of ResidualCNN, which has stem, body, pool, head"),
        ([""], "leaves no weights to train"),
    ],
)
def test_what_can_not_be_frozen_is_told(freeze: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        frozen_parts(cnn(), freeze)


def test_nets_without_published_weights_are_told() -> None:
    with pytest.raises(ValueError, match="no weights are published for model.net._target_=project.models.nets.MLP"):
        published_weights({"_target_": "project.models.nets.MLP"})


def test_torchvisions_weights_are_asked_for_by_the_file_to_put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no way out, even where there is a network
    net = {"_target_": "torchvision.models.get_model", "name": "resnet18"}
    with pytest.raises(ValueError, match=r"resnet18-f37072fd.pth is not in .*checkpoints and can't be downloaded"):
        published_weights(net)
    assert models.get_model_weights("resnet18").DEFAULT.url.endswith("resnet18-f37072fd.pth")


def test_timms_weights_are_asked_for_by_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the weights of resnet18 can't be had .*: fetch them from"):
        published_weights({"_target_": "timm.create_model", "model_name": "resnet18"})
