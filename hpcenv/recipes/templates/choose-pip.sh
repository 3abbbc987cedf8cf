#@if distribution
python="$(command -v python3)"
#@end
#@if own
# The pip of this distribution cannot install into another environment, and writes no report.
python3 -m venv /opt/pip
/opt/pip/bin/python -m pip install --no-cache-dir --no-input --disable-pip-version-check \
    --no-deps --require-hashes --only-binary :all: --requirement /usr/share/hpcenv/requirements.pip.lock
python="/opt/pip/bin/python"
#@end
