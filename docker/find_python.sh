#!/bin/sh
# Print a Python >= 3.11: the one asked for, or the newest of the usual names; installs Debian's when root and none is there.
wanted=${1:-python3}
good() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_one() {
    for python in "$wanted" python3.13 python3.12 python3.11; do
        if good "$python"; then
            command -v "$python"
            return 0
        fi
    done
    return 1
}
find_one && exit 0
packages="python3 python3-venv python3-dev"
if [ "$wanted" = python3 ] && ! command -v python3 >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "== apt-get install: $packages" >&2
    apt-get update >/dev/null && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $packages >/dev/null && find_one && exit 0
fi
echo "error: no Python 3.11 or later (asked for $wanted); on Debian 12 or Ubuntu 24.04:" \
    "sudo apt-get install -y --no-install-recommends $packages; elsewhere: make PYTHON=/path/to/python3.11" >&2
exit 3
