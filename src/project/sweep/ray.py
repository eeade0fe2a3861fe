"""Jobs of a sweep on Ray, which gives each devices of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra_plugins.hydra_ray_launcher import ray_launcher
from omegaconf import OmegaConf

from project.errors import UserError


class RayLauncher(ray_launcher.RayLauncher):  # type: ignore[misc]
    """Hydra's launcher for Ray, which would wait for ever for devices that no host has."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Hand all jobs to Ray, if it can run one.

        Raises:
            UserError: no host has what a job asks for.
        """
        import ray

        if not ray.is_initialized():
            init: Any = OmegaConf.to_container(self.ray_cfg.init, resolve=True)
            ray.init(**init)
        wanted: Any = OmegaConf.to_container(self.ray_cfg.remote, resolve=True)
        for key, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            most = max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)
            if wanted.get(key, 0) > most:
                raise UserError(
                    f"hydra.launcher.ray.remote.{key}={wanted[key]}: no host has more than {most:g} {resource}: type "
                    f"hydra.launcher.ray.remote.{key}={most:g}"
                )
        results: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
        return results
