"""Which drivers, CUDA toolkits, torch builds, libraries and GPUs run together. Pure.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.

`table.toml` contains the facts, each with its source and date. The modules contain the rules. The caller reads the
table, and gives it to the functions as a `Compat`.

- `compat_table`, `table_file`: the table as dataclasses, and how the table is read from plain data.
- `drivers`: is the driver new enough for the CUDA toolkit?
- `kernels`: does torch have kernels for the GPU?
- `toolkits`: does a toolkit or a driver branch still support the GPU?
- `torch_builds`: which torch builds exist, for which Python, and which builds would run?
- `libraries`: do cuDNN, NCCL, cuBLAS, torchvision and torchaudio fit torch?
- `gpu_names`: what does a GPU's name say about the GPU?
- `image_rules`: does a node meet the requirement in the image, NVIDIA_REQUIRE_CUDA?

Each answer is a `Judgement` with one of three results. If the table has no entry, the result is `unknown`.
"""
