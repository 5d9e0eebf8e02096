"""Seconds from the start of this process to the end of the first optimizer step of a small supervised run.

python startup_worker.py '{"side": "ours", "model": "...", "rows": "...", "config": {...}, "lora": 0, "started": 0.0}'
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    job = json.loads(sys.argv[1])
    import sft_worker
    from transformers import TrainerCallback

    ends = []

    class FirstStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.time())

    rows = json.loads(Path(job["rows"]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft_worker.make_trainer(job, rows, folder)
        ready = time.time()
        trainer.add_callback(FirstStep())
        trainer.train()
    print("\n" + json.dumps({"first_step": ends[0] - job["started"], "trainer_ready": ready - job["started"]}))


if __name__ == "__main__":
    main()
