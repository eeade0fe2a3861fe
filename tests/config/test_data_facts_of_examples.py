"""What configs learn from pictures and tables before a run."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pictures import folder_of_pictures
from project.config.composition import config_folder, explain, register_resolvers


def composed(*overrides: str) -> dict[str, Any]:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", list(overrides))
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


def told(*overrides: str) -> str | None:
    with pytest.raises(OmegaConfBaseException) as caught:
        composed(*overrides)
    return explain(caught.value, "train")


def test_pictures_tell_their_classes_to_the_model(tmp_path: Path) -> None:
    config = composed("experiment=image_folder", f"data.folder={folder_of_pictures(tmp_path / 'own', per_class=1)}")
    assert config["data"]["classes"] == ["blue", "green", "red"]
    assert config["model"]["num_classes"] == config["model"]["net"]["num_classes"] == 3


def test_a_table_tells_its_columns_and_how_many_features_they_make() -> None:
    config = composed("experiment=tabular_regression", "data.target=mean radius")
    assert config["model"]["net"]["image_shape"] == [29 + 2]  # the diagnosis is a name of two
    assert config["model"]["net"]["num_classes"] == 1
    mean, std = config["model"]["target_scale"]
    assert 13 < mean < 15
    assert 3 < std < 4


def test_what_is_typed_wins_and_nothing_is_looked_at() -> None:
    typed = [f"data.{name}=null" for name in ("columns", "classes", "target_scale")]
    config = composed(
        "experiment=tabular_mlp", "data.path=/nowhere.csv", "data.num_features=7", "data.num_outputs=2", *typed
    )
    assert config["model"]["net"]["image_shape"] == [7]


def test_what_is_wrong_with_the_files_is_a_sentence(tmp_path: Path) -> None:
    assert told("experiment=image_folder", f"data.folder={tmp_path}") == (
        f"{tmp_path} holds no folders, but each class needs a folder with its pictures: "
        f"make {tmp_path / 'NAME'} for each of them"
    )
    assert told("experiment=image_folder", "data.folder=/nowhere", "data.batch_size=0") == (
        "data.batch_size=0 must be at least 1: type data.batch_size=64"
    )
