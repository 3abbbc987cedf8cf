"""The engines. Each engine has one module with a function `render` (exports/engine.py). Runs on: LOGIN NODE."""
