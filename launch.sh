#!/usr/bin/env bash
# Finds or makes the environment, then hands on to `zerofit`.
#   ./launch.sh              the default job: a small Llama learns the standard library's source code
#   ./launch.sh test ARGS    the test suite (ARGS go to pytest)
#   ./launch.sh --hostfile hosts run.yaml    zerofit launch: on many hosts
#   ./launch.sh ARGS         zerofit ARGS
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

needs='import zerofit.cli.main; from importlib.metadata import version as of; of("torch"), of("deepspeed")'
extra=train
if [[ ${1-} == test ]]; then needs+='; import pytest, ruff' extra=dev; fi

usable() { "$1" -P -c "$needs" >/dev/null 2>&1; }

python=python3
if ! usable "$python"; then
    python=$here/.venv/bin/python
    if ! usable "$python"; then
        echo "zerofit is not in the active environment: installing it into $here/.venv (torch is large)" >&2
        python3 -m venv --upgrade-deps "$here/.venv" >&2 # older ones choose versions several times slower
        "$python" -m pip install --constraint "$here/.ci/constraints.txt" --editable "${here}[$extra]" >&2
        activate=$here/.venv/bin/activate
        echo "installed; next: source ${activate#"$PWD/"}" >&2
    fi
fi

case ${1-} in
    '') exec "$python" -P -m zerofit.cli train ;;
    test) shift && cd -- "$here" && exec "$python" -m pytest "$@" ;;
    -h | --help | --version) exec "$python" -P -m zerofit.cli "$@" ;;
    -*) exec "$python" -P -m zerofit.cli launch "$@" ;;
    *) exec "$python" -P -m zerofit.cli "$@" ;;
esac
