"""What runs with what: drivers, CUDA toolkits, torch builds, their libraries, and GPUs. Pure.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.

`table.toml` holds the facts, each with its source and date; the modules hold the rules. They get the table as a
`Compat`; the caller reads it.

- `table`, `table_file`: the table as dataclasses, and how it is read from plain data.
- `drivers`: is the driver new enough for the CUDA toolkit?
- `kernels`: does torch hold kernels for the GPU?
- `toolkits`: does a toolkit or a driver branch still support the GPU?
- `torch_builds`: which torch builds exist, for which Python, and which would run?
- `libraries`: do cuDNN, NCCL, cuBLAS, torchvision and torchaudio fit torch?
- `gpu_names`: what a GPU's name says.
- `image_rules`: does the image's own rule, NVIDIA_REQUIRE_CUDA, hold?

Each answer is a `Judgement` with three values. What the table does not know is `unknown`.
"""
