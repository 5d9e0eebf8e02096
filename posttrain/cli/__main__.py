"""`python -m posttrain.cli`, for launchers that take a module: accelerate launch -m posttrain.cli sft …"""

import sys

from posttrain.cli.main import main

sys.exit(main())
