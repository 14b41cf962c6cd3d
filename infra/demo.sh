#!/usr/bin/env bash
# Two rounds of RLHF on SmolLM2-135M-Instruct with a simulated annotator, on any machine with Python 3.11.
#
#     bash infra/demo.sh [--seed 7] [any other option of `rlhf run`]
#
# RLHF_HOME says where the project is kept, RLHF_VENV where the virtual environment is. The same command again
# goes on where it was interrupted, and does nothing more once there are two rounds.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment quickstart

home=${RLHF_HOME:-$repository/.rlhf}
"$environment/bin/rlhf" run "$repository/infra/runs/quickstart.yaml" --rounds 2 --home "$home" "$@"

cat >&2 <<END

Everything is in $home: a report.html for each round, with plots and samples, and the MLflow database.
In the browser: $environment/bin/rlhf ui --home $home
One more round: $environment/bin/rlhf run $repository/infra/runs/quickstart.yaml --more 1 --home $home
END
