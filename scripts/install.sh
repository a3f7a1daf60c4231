#!/usr/bin/env bash
# Installs the checkout, editable, with EXTRAS into .venv: scripts/install.sh demo,embedded
# Says plainly what is missing on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    echo "paceline: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    stop "Python 3.11 or newer is missing (Debian: apt install python3 python3-venv python3-dev)"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python cannot make virtual environments (Debian: apt install python3-venv)"
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv || {
        rm -rf .venv
        stop "making .venv failed; is the disk full? $(df -h --output=avail . | tail -1 | tr -d ' ') are free"
    }
}

command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null ||
    stop "a C compiler is missing; it builds three small modules (Debian: apt install gcc)"
progress=off
if [ ! -x .venv/bin/python ]; then
    make_venv
    [ -t 1 ] && progress=on # pip's own bars; later there is little to fetch and much to skip
fi
[ -f "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    stop "Python.h is missing; the C modules need it (Debian: apt install python3-dev)"

phases() { # of what pip says, a line for each
    local line phase='' next
    while read -r line; do
        case $line in
            Installing\ build\ dependencies:\ started) next='Fetching what builds paceline' ;;
            *still\ running...) # each minute, of what pip has a process of its own for
                echo "  $line" && continue ;;
            Collecting*) next='Finding and fetching packages' ;;
            Building*) next='Building what has no wheel, and paceline itself' ;;
            Installing\ collected*) # `Installing collected packages: torch, rich, paceline`
                local names=${line//[^,]/}
                next="Unpacking $((${#names} + 1)) packages" ;;
            Downloading*[0-9]\ [GM]B*) # `Downloading torch-….whl (190.1 MB)`
                echo "  $line" && continue ;;
            *) continue ;;
        esac
        [ "$next" = "$phase" ] || echo "$next …"
        phase=$next
    done
}

errors() { # of what pip says; its warnings are about where it looks, or that nobody answers there
    local line
    while IFS= read -r line; do
        [[ $line == WARNING:* && $line != WARNING:\ Retrying* ]] || echo "$line"
    done
}

count_unpacked() { # pip is silent meanwhile: a line when there are more, until this script ends
    local record now last=0
    while kill -0 $$ 2>/dev/null; do
        now=0
        for record in .venv/lib/python*/site-packages/*.dist-info/RECORD; do # written last
            [ .venv/.began -nt "$record" ] || now=$((now + 1))
        done
        [ $now = $last ] || echo "  $now unpacked"
        last=$now
        sleep 2 >/dev/null 2>&1
    done
}

install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input \
        --progress-bar "$progress" -c constraints.txt -e ".[$1]"
}

echo "Installing paceline[$1] into .venv"
install_by_phases() {
    { install "$1" 2>&1 >&3 3>&- | errors >&2 3>&-; } 3>&1 | phases
}

touch .venv/.began
count_unpacked &
trap "kill $!" EXIT
{ if [ $progress = on ]; then install "$1"; else install_by_phases "$1"; fi; } || {
    # Below 1 GiB the disk is the likely reason; pip says its own above.
    free_kib=$(df --output=avail . | tail -1 | tr -d ' ')
    [ "$free_kib" -gt 1048576 ] || stop "installing failed: the disk is full ($free_kib KiB free)"
    stop "installing failed; pip says why above. Run the same command again to go on"
}
