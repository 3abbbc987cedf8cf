"""JAX's packages, where jax is installed."""

from __future__ import annotations

from probe_world import Venv


def jax_of(env: Venv) -> dict[str, object]:
    found = env.probe()
    assert not [field for field in found["unknown"] if field.startswith("jax")]
    return {field: value for field, value in found["values"].items() if field.startswith("jax")}


def test_without_jax_there_is_no_field_of_it(env: Venv) -> None:
    # The fingerprint of such an environment must stay what it was.
    env.install("jaxtyping", {}, "0.3")
    assert jax_of(env) == {}


def test_jax_for_cpus(env: Venv) -> None:
    env.install("jax", {}, "0.10.2")
    assert jax_of(env)["jax.jaxlib"] == "absent"
    env.install("jaxlib", {}, "0.10.1")
    assert jax_of(env) == {
        "jax.version": "0.10.2", "jax.jaxlib": "0.10.1", "jax.cuda": "none", "jax.cuda-plugin": "absent"
    }  # fmt: skip


def test_the_plugin_says_which_cuda_it_is_for(env: Venv) -> None:
    for name in ("jax", "jaxlib", "jax_cuda13_plugin", "jax_cuda13_pjrt"):
        env.install(name, {}, "0.10.2")
    found = jax_of(env)
    assert (found["jax.cuda"], found["jax.cuda-plugin"]) == ("13", "0.10.2")
    env.install("jax_cuda12_plugin", {}, "0.10.1")
    found = jax_of(env)
    assert (found["jax.cuda"], found["jax.cuda-plugin"]) == ("12, 13", "0.10.1, 0.10.2")
