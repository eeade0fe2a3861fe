"""A config from elsewhere runs nothing that this machine does not trust."""

from pathlib import Path
from typing import Any

import pytest

from project.config.from_checkpoint import untyped
from project.config.trust import check_targets, signature, trusted_packages
from project.errors import UserError

OWN = {
    "data": {"_target_": "project.data.SyntheticImages"},
    "model": {"_target_": "project.models.ImageClassifier", "net": {"_target_": "project.models.nets.MLP"}},
    "optimizer": {"_target_": "torch.optim.AdamW"},
    "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR"},
    "trainer": {"_target_": "lightning.Trainer", "strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy"}},
    "callbacks": {"stop": {"_target_": "lightning.pytorch.callbacks.EarlyStopping"}},
}


def test_what_this_project_writes_is_trusted() -> None:
    check_targets(OWN, "best.ckpt", trusted_packages())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.system", "would run os.system (model.net)"),
        ("builtins.eval", "type launch.trusted_targets=[builtins]"),
        ("subprocess.run", "subprocess.run"),
        ("torch.hub.load", "torch.hub.load"),
        ("torch.load", "torch.load"),
        ("project.launch.agent.os.system", "project.launch.agent.os.system"),
        ("project.launch.agent.tempfile", "project.launch.agent.tempfile"),
        ("project.launch.agent.partial_of_nothing", "can't be found"),
        ("torch.nn.functional.boolean_dispatch.__globals__", "can't be imported"),
        ("projectile.Model", "projectile.Model"),
    ],
)
@pytest.mark.parametrize("place", ["dict", "list"])
def test_anything_else_is_refused_wherever_it_stands(target: str, words: str, place: str) -> None:
    net: Any = {"_target_": target}
    config = {"model": {"net": net if place == "dict" else [1, net]}}
    with pytest.raises(UserError) as info:
        check_targets(config, "best.ckpt", trusted_packages())
    assert words.replace("model.net", "model.net" if place == "dict" else "model.net[1]") in str(info.value)


def test_package_can_be_trusted_for_one_command() -> None:
    config = {"model": {"_target_": "collections.OrderedDict"}}
    with pytest.raises(UserError, match=r"type launch\.trusted_targets=\[collections\]"):
        check_targets(config, "best.ckpt", trusted_packages())
    check_targets(config, "best.ckpt", trusted_packages(["collections"]))
    check_targets(config, "best.ckpt", trusted_packages("collections"))


def test_what_is_typed_is_the_users_own() -> None:
    node = {"model": {"_target_": "evil.Model", "net": {"_target_": "evil.Net"}}}
    assert untyped(node, {"model._target_": 1}) == {"model": {"net": {"_target_": "evil.Net"}}}
    assert node["model"]["_target_"] == "evil.Model"


def test_own_config_is_known_again_and_a_changed_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    config = {"model": {"_target_": "mine.Model", "width": 8}}
    signed = signature(config)
    assert signed is not None
    assert signed == signature({"model": {"width": 8, "_target_": "mine.Model"}})
    assert signed != signature({"model": {"_target_": "mine.Model", "width": 9}})
    key = tmp_path / ".config" / "project" / "key"
    assert key.stat().st_mode & 0o077 == 0
    key.write_text("another user's")
    assert signed != signature(config)


def test_config_is_not_signed_where_no_key_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".config").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert signature({}) is None
