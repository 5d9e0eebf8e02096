"""`python -m posttrain.cli`, for launchers that take a module: accelerate launch -m posttrain.cli sft …"""

import atexit
import os
import signal
import sys
import threading
from typing import Any

from posttrain.cli.launch import LAUNCHED, tie_to_parent
from posttrain.cli.main import main


def leave(code: int) -> None:
    """Leave as Python does, less the destructors of C++ at the very end: gloo's threads cannot be stopped here, and
    when they outlive what they use, a rank that has done all its work is aborted."""
    hooks: Any = threading
    hooks._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if LAUNCHED in os.environ:
    # A launcher that is killed cannot end us, and a rank waits for the others for half an hour.
    tie_to_parent(signal.SIGTERM)
code = main()
if LAUNCHED in os.environ and code == 0:
    leave(code)
sys.exit(code)
