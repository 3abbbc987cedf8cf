"""CycloneDX 1.6 (ECMA-424), a bill of materials: packages, image, SIF and libraries with their digests.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, uuid5

from hpcenv.errors import Command, ToolMissing
from hpcenv.locking.export_notes import notes_on_edits
from hpcenv.locking.export_packages import (
    HEX_SHA256,
    NAME,
    VERSION,
    package_url,
    proved_sha256,
    python_version,
    sorted_packages,
)
from hpcenv.locking.exporter import Exporter, Rendered
from hpcenv.project import document
from hpcenv.project.lockfile import ContainerTable, DistTable, Lockfile

if TYPE_CHECKING:
    from cyclonedx.model import HashType, Property
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

_LIBRARY = re.compile(r"libs\.([^.]+)\.(.+)")


def cyclonedx(lockfile: Lockfile) -> Rendered:
    """Return a bill of materials as JSON.

    The bill describes the environment. The version of the environment is the lockfile's fingerprint, and the serial
    number is computed from the fingerprint. Packages without a hash are listed too, so nothing is left out.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    root = Component(
        type=ComponentType.APPLICATION,
        name="hpcenv-environment",
        version=_cut(lockfile.fingerprint),
        bom_ref="environment",
        properties=_properties(_environment_facts(lockfile)),
    )
    components = [*_image_components(lockfile.container), *_library_components(lockfile), *_dist_components(lockfile)]
    python = python_version(lockfile)
    if python is not None:
        components.append(_python_component(lockfile, python))
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"hpcenv:{lockfile.fingerprint}"),
        components=components,
    )
    # The bill has no time, because the same lockfile must give the same bytes. CycloneDX allows this. The library's
    # types do not allow it.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.metadata.component = root
    bom.metadata.tools.components.add(Component(type=ComponentType.APPLICATION, name="hpcenv"))
    bom.register_dependency(root, components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    return Rendered(text=text.rstrip("\n") + "\n", count=len(lockfile.packages.dist), notes=notes_on_edits(lockfile))


def _environment_facts(lockfile: Lockfile) -> dict[str, object]:
    """Return the facts that belong to no component: torch's build, the system, the host's floor, unknown fields."""
    packages = document.plain(lockfile.packages, "dist")
    return {
        **{field: value for field, value in lockfile.facts.items() if not _library_of(field)},
        **{f"packages.{key}": value for key, value in packages.items()},
        "host.driver-min": lockfile.host.driver_min,
        "determinism.profile": lockfile.determinism.profile,
        **{f"unknown:{field}": reason for field, reason in lockfile.unknown.items()},
    }


def _image_components(container: ContainerTable | None) -> Iterator[Component]:
    """Yield the image with its digests (index, manifest, config), and the SIF that the nodes run."""
    from cyclonedx.model.component import Component, ComponentType

    if container is None:
        return
    chain = document.plain(container, "sif", "overlay", "layers", "nvidia")
    yield Component(
        type=ComponentType.CONTAINER,
        name=_repository(container.reference)[0],
        version=_cut(container.digest),
        bom_ref="image",
        purl=_image_purl(container),
        hashes=_hashes(container.digest.removeprefix("sha256:")),
        properties=_properties(
            {
                **{f"container.{key}": value for key, value in chain.items()},
                **{f"container.layer.{n}.diff-id": layer.diff_id for n, layer in enumerate(container.layers)},
                **{f"container.nvidia.{key}": value for key, value in container.nvidia.items()},
            }
        ),
    )
    sif = document.plain(container.sif, "sha256")
    yield Component(
        type=ComponentType.FILE,
        name=f"{container.digest.replace(':', '-')}.sif",
        bom_ref="sif",
        hashes=_hashes(container.sif.sha256),
        properties=_properties({f"container.sif.{key}": value for key, value in sif.items()}),
    )
    if container.overlay is not None:
        facts = document.plain(container.overlay, "sha256")
        yield Component(
            type=ComponentType.FILE,
            name=f"overlay at {container.overlay.target}" if container.overlay.target else "overlay",
            bom_ref="overlay",
            hashes=_hashes(container.overlay.sha256 or ""),
            properties=_properties({f"container.overlay.{key}": value for key, value in facts.items()}),
        )


def _image_purl(container: ContainerTable) -> PackageURL | None:
    from packageurl import PackageURL

    if not container.reference.startswith("docker://"):
        return None  # an image that is a file is in no registry
    repository, tag = _repository(container.reference)
    name = repository.rsplit("/", 1)[-1].lower()
    if not NAME.fullmatch(name) or not VERSION.fullmatch(container.digest):
        return None
    qualifiers = {"repository_url": repository, "tag": tag, "arch": container.platform.partition("/")[2]}
    return PackageURL(
        type="oci",
        name=name,
        version=container.digest,
        qualifiers={key: value for key, value in qualifiers.items() if value},
    )


def _repository(reference: str) -> tuple[str, str]:
    """Return `HOST/NAME` and the tag of `docker://HOST/NAME:TAG@DIGEST`. For a file there is no tag."""
    if not reference.startswith("docker://"):
        return reference, ""
    tagged = reference.rpartition("://")[2].partition("@")[0]
    head, _, last = tagged.rpartition("/")
    name, _, tag = last.partition(":")
    return (f"{head}/{name}" if head else name), tag


def _library_of(field: str) -> str | None:
    match = _LIBRARY.fullmatch(field)
    return match[1] if match else None


def _library_components(lockfile: Lockfile) -> Iterator[Component]:
    """Yield the libraries that torch loads: CUDA runtime, cuBLAS, cuDNN, NCCL and so on."""
    from cyclonedx.model.component import Component, ComponentType

    libraries: dict[str, dict[str, object]] = {}
    for field, value in lockfile.facts.items():
        match = _LIBRARY.fullmatch(field)
        if match and value != "absent":
            libraries.setdefault(match[1], {})[match[2]] = value
    for name, facts in sorted(libraries.items()):
        version = facts.get("version")
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=_cut(version) if isinstance(version, str) else None,
            bom_ref=f"library:{name}",
            hashes=_hashes(str(facts.get("sha256", "")).removeprefix("sha256:")),
            properties=_properties({f"libs.{name}.{key}": value for key, value in facts.items()}),
        )


def _python_component(lockfile: Lockfile, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    name = str(lockfile.facts.get("python.implementation", "python"))
    purl = PackageURL(type="generic", name=name, version=version) if NAME.fullmatch(name) else None
    return Component(type=ComponentType.PLATFORM, name=name, version=_cut(version), bom_ref="python", purl=purl)


def _dist_components(lockfile: Lockfile) -> Iterator[Component]:
    from cyclonedx.model.component import Component, ComponentType

    seen: Counter[str] = Counter()
    for dist in sorted_packages(lockfile):
        reference = f"package:{dist.name}@{dist.version}"
        seen[reference] += 1
        yield Component(
            type=ComponentType.LIBRARY,
            name=dist.name,
            version=_cut(dist.version),
            bom_ref=reference if seen[reference] == 1 else f"{reference}#{seen[reference]}",
            purl=package_url(dist),
            hashes=_hashes(proved_sha256(dist) or ""),
            properties=_properties(_dist_facts(dist)),
        )


def _dist_facts(dist: DistTable) -> dict[str, object]:
    direct = document.plain(dist.direct_url) if dist.direct_url else {}
    wheel = document.plain(dist.wheel, "sha256", "built") if dist.wheel else {}
    built = document.plain(dist.wheel.built) if dist.wheel and dist.wheel.built else {}
    return {
        "layer": dist.layer,
        "hides": dist.hides,
        "source": dist.source,
        "record-sha256": dist.record_sha256,
        "content-sha256": dist.content_sha256,
        "reason": dist.reason,
        **{f"direct-url.{key}": value for key, value in direct.items()},
        # If hpcenv did not look for a wheel, there is no proof.
        **{f"wheel.{key}": value for key, value in (wheel or {"proof": "none"}).items()},
        **{f"wheel.built.{key}": value for key, value in built.items()},
    }


def _cut(version: str) -> str:
    """Cut a version to 1024 characters, the limit of CycloneDX 1.6."""
    return version[:1024]


def _properties(facts: Mapping[str, object]) -> list[Property]:
    from cyclonedx.model import Property

    return [
        Property(name=f"hpcenv:{key}", value=_property_text(value))
        for key, value in sorted(facts.items())
        if value is not None
    ]


def _property_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hashes(sha256: str) -> list[HashType]:
    from cyclonedx.model import HashAlgorithm, HashType

    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if HEX_SHA256.fullmatch(sha256) else []


def _render(lockfile: Lockfile) -> Rendered:
    try:
        return cyclonedx(lockfile)
    except ImportError as error:
        raise ToolMissing(
            "cyclonedx-python-lib, the library for bills of materials, is not installed",
            why=f"only `hpcenv export cyclonedx` needs it ({error})",
            hint=Command("pip", "install", "cyclonedx-python-lib>=11"),
        ) from error


def _is_ours(text: str) -> bool:
    try:
        bom = json.loads(text)
        return bool(bom["bomFormat"] == "CycloneDX" and bom["metadata"]["component"]["name"] == "hpcenv-environment")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


EXPORTER = Exporter(
    name="cyclonedx",
    help="bill of materials (CycloneDX 1.6): packages, SIF, libraries",
    render=lambda lockfile, _request: _render(lockfile),
    is_ours=_is_ours,
)
