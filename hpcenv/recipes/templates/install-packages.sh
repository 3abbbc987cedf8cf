@{site_configuration}
# The names of apt packages, and the wheels that start, are those of one distribution.
. /etc/os-release
test "${VERSION_CODENAME:-}" = "@{codename}" || { echo "the base is not @{codename}" >&2; exit 1; }
#@if install-python
$apt update
$apt install --no-install-recommends ca-certificates python3 python3-pip python3-venv
#@end
@{choose_pip}
python3 -m venv --without-pip /opt/venv
"$python" -m pip --python /opt/venv/bin/python install --no-cache-dir --no-input --disable-pip-version-check \
    --no-deps --require-hashes --only-binary :all: \
    --report /usr/share/hpcenv/pip-report.json --requirement /usr/share/hpcenv/requirements.lock
