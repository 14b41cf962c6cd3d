"""`python -m rlhf_core.stages JOB.json`: one stage in a process of its own."""

import os
import sys
import threading
import time
from pathlib import Path

from rlhf_core.stages import run_job
from rlhf_core.stages.context import Job


def end_with(parent: int) -> None:
    """End this process when its parent is gone: it would hold the device, and nobody take what it makes."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)


def main(path: str, parent: int) -> None:
    """Run the job in the file, for as long as the process `parent` is there to take what it makes."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    run_job(Job.model_validate_json(Path(path).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
