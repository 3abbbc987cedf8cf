"""Only possible combinations of torch, CUDA, Python and distribution."""

from __future__ import annotations

import pytest
from recipe_cases import choose

from hpcenv.errors import SpecError
from hpcenv.recipes.combination import named_distribution


@pytest.mark.parametrize(
    ("requested", "tag", "requirement"),
    [
        ({}, "v2.13.0-cuda13.0-bookworm", "torch==2.13.0"),
        ({"cuda": "12.6"}, "v2.13.0-cuda12.6-bookworm", "torch==2.13.0+cu126"),
        ({"cuda": "cpu"}, "v2.13.0-cpu-bookworm", "torch==2.13.0+cpu"),
        (
            {"cuda": "12.4", "torch": "2.5.1", "distribution": "ubuntu24.04"},
            "v2.5.1-cuda12.4-ubuntu24.04",
            "torch==2.5.1",
        ),
        ({"torch": "2.15.0", "python": "3.12"}, "v2.15.0-cuda13.2-bookworm", "torch==2.15.0"),
    ],
)
def test_a_possible_combination(requested, tag, requirement):
    found = choose(**requested)
    assert (found.tag, found.requirement) == (tag, requirement)


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        (
            {"cuda": "12.8"},
            ("no build of torch 2.13.0 for CUDA 12.8", "12.6, 13.0, 13.2, cpu", "torch 2.11.0 has such a build"),
        ),
        (
            {"torch": "2.15.0", "python": "3.10"},
            ("no wheel for Python 3.10: its wheels begin at 3.11", "Python 3.11 to 3.15, or --torch 2.14.1"),
        ),
        ({"distribution": "ubuntu24.04", "python": "3.11"}, ("has Python 3.12", "--os bookworm")),
        ({"distribution": "alpine"}, ("bookworm, trixie, ubuntu22.04, ubuntu24.04",)),
        ({"torch": "9.9"}, ("not in the compatibility table", "2.15.0")),
        ({"python": "3.11; rm"}, ("not a Python version",)),
    ],
)
def test_an_impossible_one_is_refused_with_the_possible(requested, says):
    with pytest.raises(SpecError) as caught:
        choose(**requested)
    for words in says:
        assert words in str(caught.value)


def test_a_python_of_another_release_comes_with_the_base():
    assert choose(python="3.11").default_base == "debian:bookworm-slim"
    assert choose(python="3.12").default_base == "python:3.12-slim-bookworm"


@pytest.mark.parametrize("torch", ["2.1.0", "2.7.0", "2.9.0", "2.12.0", "2.14.0"])
def test_every_patch_release_is_known(torch):
    assert choose(torch=torch, python="3.11").torch == torch


@pytest.mark.parametrize(("torch", "python"), [("2.1.2", "3.13"), ("2.5.1", "3.8"), ("2.15.0", "3.10")])
def test_a_python_without_wheels_is_refused_at_both_ends(torch, python):
    with pytest.raises(SpecError, match=rf"torch {torch} has no wheel for Python {python}"):
        choose(torch=torch, python=python)


@pytest.mark.parametrize(
    ("image", "distribution"),
    [
        ("debian:bookworm-slim", "bookworm"),
        ("debian:12-slim", "bookworm"),
        ("r.example:5000/library/debian:13", "trixie"),
        ("python:3.11-slim-trixie", "trixie"),
        ("nvidia/cuda:12.6.3-base-ubuntu22.04", "ubuntu22.04"),
        ("r.example/cuda:12.6-ubuntu2404", "ubuntu24.04"),
        ("ubuntu:jammy-20260101", "ubuntu22.04"),
        ("ubuntu:20.04", "ubuntu20.04"),
        ("nvidia/cuda:12.1.1-runtime-ubuntu20.04", "ubuntu20.04"),
        ("ubuntu:focal", "focal"),
        ("debian:bullseye-slim", "bullseye"),
        ("debian:11", "debian11"),
        ("python:3.11-bullseye", "bullseye"),
        ("rockylinux:9", "rockylinux9"),
        ("rockylinux/rockylinux:9-minimal", "rockylinux9"),
        ("nvidia/cuda:12.6.3-base-rockylinux8", "rockylinux8"),
        ("nvidia/cuda:12.6.3-base-ubi9", "ubi9"),
        ("python:3.11-alpine3.20", "alpine3.20"),
        ("alpine", "alpine"),
        ("opensuse/leap:15.6", "leap15.6"),
        ("r.example/team/train-el9:1", "el9"),
        ("fedora:42", "fedora42"),
        # The name does not say it.
        ("python:3.11-slim", None),
        ("debian:latest", None),
        ("alpine/team/base:1", None),
        ("r.example/team/focalnet:2", None),
        ("nvcr.io/nvidia/pytorch:25.01-py3", None),
        ("r.example/team/model1:20.04", None),
        # Ordinary words in the name.
        ("lab/focal-loss:1.0", None),
        ("lab/stretch-robot:1", None),
        ("lab/leap2024:1", None),
        ("images/ubi-net.sif", None),
        ("noble-ai:2", None),
        ("lab/oracle-policy:3.11", None),
        ("lab/rocky-terrain:v2", None),
        ("lab/alpine-skiing-net", None),
        ("lab/buster.model:1", None),
        ("lab/net:focalloss-2", None),
        ("lab/el2024:1", None),
        ("lab/model-el100:1", None),
        ("lab/ubi360:2", None),
        ("lab/rocky-7b:1", None),
        ("lab/alma5:1", None),
        ("lab/fedora-12-hats:1", None),
        ("lab/debian2024:1", None),
        ("lab/ubuntu20240401:1", None),
        # The same words as the whole last part of the name, or as a whole word of the tag.
        ("lab/noble:2", "ubuntu24.04"),
        ("images/noble.sif", "ubuntu24.04"),
        ("lab/rocky", "rocky"),
        ("archlinux:base-devel", "archlinux"),
        ("lab/net:1.0-focal", "focal"),
        ("lab/net:2_stretch", "stretch"),
        # A release counts in each part of the name.
        ("images/torch-ubuntu22.04.sif", "ubuntu22.04"),
        ("lab/debian12-torch:2", "bookworm"),
        ("lab/torch-leap15.6:1", "leap15.6"),
        ("lab/ubi9-torch:1", "ubi9"),
        ("centos:7.9.2009", "centos7.9.2009"),
        ("amazonlinux:2023", "amazonlinux2023"),
    ],
)
def test_the_distribution_that_a_name_says(image, distribution):
    assert named_distribution(image) == distribution
    assert named_distribution(f"{image}@sha256:{'a' * 64}") == distribution
