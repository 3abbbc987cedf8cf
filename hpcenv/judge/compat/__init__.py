"""What runs with what: drivers, CUDA toolkits, torch builds, their libraries, and GPUs. Pure.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.

`table.toml` holds the facts, each with its source and date; the modules hold the rules. The caller reads the table and
passes it on as a `Compat`.

- `table`, `table_file`: the table as dataclasses, and how the table is read from plain data.
- `drivers`: is the driver new enough for the CUDA toolkit?
- `kernels`: does torch hold kernels for the GPU?
- `toolkits`: does a toolkit or a driver branch still support the GPU?
- `torch_builds`: which torch builds exist, for which Python, and which of them would run?
- `libraries`: do cuDNN, NCCL, cuBLAS, torchvision and torchaudio fit torch?
- `gpu_names`: what does a GPU's name say?
- `image_rules`: does the rule in the image, NVIDIA_REQUIRE_CUDA, hold?

Each answer is a `Judgement` with three values. Without an entry in the table, the answer is `unknown`.
"""
