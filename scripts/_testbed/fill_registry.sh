#!/bin/bash
# Pushes the tags of the OCI layout at /mnt into a registry storage at /srv; called inside a
# sandbox without a network by image.store. Arguments: REPOSITORY TAG...
set -euo pipefail
repository=$1
shift
cat >/tmp/registry.yml <<'YAML'
version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: /srv}}
http: {addr: "127.0.0.1:5000"}
YAML
docker-registry serve /tmp/registry.yml >/tmp/registry.log 2>&1 &
for _ in {1..100}; do
    if (exec 3<>/dev/tcp/127.0.0.1/5000) 2>/dev/null; then break; fi
    sleep 0.1
done
for tag in "$@"; do
    skopeo --insecure-policy copy --quiet --dest-tls-verify=false \
        "oci:/mnt:$tag" "docker://127.0.0.1:5000/$repository:$tag" || { cat /tmp/registry.log >&2; exit 1; }
done
