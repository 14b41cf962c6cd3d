"""One round of the tiny run for all tests of this folder; none of them changes what is in it."""

import pytest

from tests.rlhf_core.stages.chain import Chain, play


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = Chain(tmp_path_factory.mktemp("chain"))
    play(chain)
    return chain
