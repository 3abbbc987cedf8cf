"""The engines, one module each, with a function `render` (exports/engine.py). Runs on: LOGIN NODE."""
