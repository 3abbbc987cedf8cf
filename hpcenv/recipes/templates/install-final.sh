@{site_configuration}
$apt update
$apt install --no-install-recommends @{apt_packages}
# apt has no lock: this list names the installed versions.
dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' > /usr/share/hpcenv/dpkg-packages.txt
# Files that no program needs, and that differ from build to build.
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /root/.cache \
    /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
useradd --uid @{user} --create-home --shell /bin/bash trainer
mkdir -p /workspace
/opt/venv/bin/python -c 'import sys; assert sys.version_info[:2] == (@{python_tuple}), sys.version'
