#!/usr/bin/env bash
# Make the environment in the folder $1 and install this project into it, with the extras $2.
# Quiet: prints one line, and the installer's own words only where it fails.
set -eu
venv=$1 extras=$2

python=''
for p in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$p; break; fi
done
[ -n "$python" ] || { echo 'Python 3.11 or newer is needed; PYTHON= names one.' >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() { "$@" >"$log" 2>&1; }

make_venv() {   # a Python without ensurepip borrows its own pip, or virtualenv
    quietly "$python" -m venv "$venv" && return
    rm -rf "$venv"
    quietly "$python" -m venv --without-pip "$venv" &&
        quietly "$python" -m pip --python "$venv/bin/python" install pip && return
    rm -rf "$venv"
    quietly "$python" -m virtualenv "$venv" && return
    rm -rf "$venv"
    echo "$python can make no environment; on Debian or Ubuntu install python3-venv." >&2
    return 1
}

install() { quietly "$venv/bin/python" -m pip install -q -e ".[$1]"; }

export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "setting up $venv ($extras); the first time takes a minute or two"
[ -x "$venv/bin/python" ] || make_venv
install "$extras" && exit

case $extras in
opencl,*)   # an extra that some machines have no wheel for; the rest works without it
    echo 'OpenCL cannot be installed here; going on without it.'
    install "${extras#opencl,}" && exit ;;
esac
cat "$log" >&2
exit 1
