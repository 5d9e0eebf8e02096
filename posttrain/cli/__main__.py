"""`python -m posttrain.cli`, for launchers that take a module: accelerate launch -m posttrain.cli sft …"""

import os
import signal
import sys

from posttrain.cli.launch import LAUNCHED, tie_to_parent
from posttrain.cli.main import main

if LAUNCHED in os.environ:
    # A launcher that is killed cannot end us, and a rank waits for the others for half an hour.
    tie_to_parent(signal.SIGTERM)
sys.exit(main())
