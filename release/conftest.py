"""What the tests of a worker's tarball share."""

import os
import pathlib
import tarfile

import pytest


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """$TARBALL's folder."""
    tarball = pathlib.Path(os.environ["TARBALL"])
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(tarball) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    assert root.name == tarball.name.removesuffix(".tar.gz")
    return root
