"""The manifests of docs/cluster.md, against the schema of Kubernetes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.documents import blocks

PAGE = Path(__file__).parents[2] / "docs/cluster.md"
MANIFESTS = [each.code for each in blocks(PAGE) if each.language == "yaml"]

pytestmark = pytest.mark.programs("kubernetes-validate")


def validated(folder: Path, manifest: str) -> subprocess.CompletedProcess[str]:
    path = folder / "manifest.yaml"
    path.write_text(manifest)
    command = ["kubernetes-validate", "--strict", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_follows_the_schema(tmp_path: Path, manifest: str) -> None:
    ran = validated(tmp_path, manifest)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_manifest_with_a_wrong_name_or_value_does_not(tmp_path: Path) -> None:
    (manifest,) = MANIFESTS
    for right, wrong in [
        ("podFailurePolicy:", "podFailurePolicies:"),
        ("values: [75]", "values: x"),
    ]:
        assert right in manifest
        assert validated(tmp_path, manifest.replace(right, wrong)).returncode != 0
