@{site_configuration}
/opt/venv/bin/python -c 'import sys; assert sys.version_info[:2] == (@{python_tuple}), sys.version'
# A library that is compiled on a newer distribution does not start on an older one.
. /etc/os-release
test "${VERSION_CODENAME:-}" = "@{codename}" || { echo "this stage is not @{codename}" >&2; exit 1; }
$apt update
$apt install --no-install-recommends @{apt_packages}
@{choose_pip}
python3 -m venv --without-pip /opt/build
"$python" -m pip --python /opt/build/bin/python install --no-cache-dir --no-input --disable-pip-version-check \
    --no-deps --require-hashes --only-binary :all: --requirement /usr/share/hpcenv/requirements.build.lock
# The build sees the packages of the image, torch among them, behind its own tools.
packages="$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
tools="$(/opt/build/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$packages" > "$tools/image.pth"
#@if toolkit
# The compiler, and the CUDA libraries of torch with their headers, in one folder.
mkdir -p /opt/cuda
cp -a "$tools/@{wheel_folder}/." /opt/cuda/
cp -a --no-clobber --symbolic-link "$packages/@{wheel_folder}/." /opt/cuda/
for library in /opt/cuda/lib/lib*.so.*; do ln -sf "${library##*/}" "${library%%.so.*}.so"; done
ln -sfn lib /opt/cuda/lib64
export CUDA_HOME="/opt/cuda"
#@end
#@if toolkit-image
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
#@end
#@if nvcc
export PATH="$CUDA_HOME/bin:$PATH"
NVCC_SAYS="$(nvcc --version)"
export NVCC_SAYS
case "$NVCC_SAYS" in
    *"release @{cuda},"*) ;;
    *) echo "nvcc is not of CUDA @{cuda}: $NVCC_SAYS" >&2; exit 1 ;;
esac
#@end
export PATH="/opt/build/bin:$PATH"
# Each job of a CUDA build needs up to 8 GB.
export MAX_JOBS="${MAX_JOBS:-4}"
#@if variables
@{variables}
#@end
"$python" -m pip --python /opt/build/bin/python wheel --no-cache-dir --no-input --disable-pip-version-check --no-deps \
    --no-build-isolation --no-binary :all: --require-hashes --wheel-dir /opt/wheels \
    --requirement /usr/share/hpcenv/requirements.sources.lock
"$python" -m pip --python /opt/venv/bin/python install --no-cache-dir --no-input --disable-pip-version-check \
    --no-deps --no-index /opt/wheels/*.whl
COMPILER_SAYS="$(c++ --version)"
export COMPILER_SAYS
/opt/build/bin/python - <<'PY'
@{report}
PY
