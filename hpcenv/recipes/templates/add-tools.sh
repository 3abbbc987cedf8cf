#!/bin/sh
@{first_line}: tools for sessions, over the image of the project.
#
# Into a virtual environment over the image, pip installs @{packages}. It never replaces a package of the image.
# The result is one squashfs, which hpcenv.toml names as the overlay of [environment.@{environment}].
# Where pip needs a configuration: @{site}/pip.conf and @{site}/ca.crt, as for `hpcenv image init`.
set -eu
umask 022
image=@{image}
under=@{under} # the overlay that the project has already, or nothing
target=@{target}
packed=@{packed}
site=@{site}
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hpcenv-tools.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/over" "$work/pip" "$work/none"
pip=@{pip} # for images without pip; nothing if hpcenv's own Python has none
[ -z "$pip" ] || cp -R "$pip" "$work/pip/pip"
[ -d "$site" ] || site=$work/none
inside() {
  @{runtime} -q exec --bind "$work" --bind "$work/over:$target" --bind "$site:/mnt" "$image" "$@"
}

cat >"$work/packages.py" <<'END'
import importlib.metadata
# Of two versions of a package, Python loads the first one.
found = {}
for one in importlib.metadata.distributions():
    found.setdefault(one.metadata["Name"].lower().replace("_", "-"), one.version)
for name, version in sorted(found.items()):
    print("%s==%s" % (name, version))
END
inside python3 "$work/packages.py" >"$work/constraints.txt"
#@if venv
unsquashfs -q -n -f -d "$work/over" "$under"
#@end
#@if new
inside python3 -m venv --system-site-packages --without-pip "$target"
# A Python that is itself of a virtual environment does not pass its packages on.
paths=$(inside python3 -c 'import site, sys; print("\n".join(site.getsitepackages() * (sys.prefix != sys.base_prefix)))')
folder=$(echo "$work"/over/lib/python3*/site-packages)
printf '%s\n' "$paths" >"$folder/image.pth"
#@end
#@if packages
unsquashfs -q -n -f -d "$folder" "$under"
#@end
inside sh -ec '
  if [ -e /mnt/pip.conf ]; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi
  if [ -e /mnt/ca.crt ]; then export PIP_CERT=/mnt/ca.crt; fi
  python=$1/bin/python work=$2
  shift 2
  "$python" -c "import pip" 2>/dev/null || export PYTHONPATH="$work/pip"
  "$python" -m pip install --no-input --no-cache-dir --disable-pip-version-check -c "$work/constraints.txt" "$@"
' sh "$target" "$work" @{packages}

mksquashfs "$work/over" "$packed" -noappend -all-root -quiet -no-progress
cd @{root}
grep -q '^\[environment\.@{environment}\]' hpcenv.toml ||
  printf '\n[environment.@{environment}]\noverlay = "%s"\n' @{overlay} >>hpcenv.toml
hpcenv lock --lock @{environment}
