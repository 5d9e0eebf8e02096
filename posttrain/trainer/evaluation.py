"""One evaluation: the same two halves without grad, summed over the whole set."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from posttrain.errors import EmptyDataError
from posttrain.parallel.ranks import all_sum
from posttrain.trainer.predictions import Predictions


def evaluate_all(engine: Any, model: Any, dataloader: Any, with_logits: bool, prefix: str) -> EvalLoopOutput:
    """The loss is Σ total / Σ units, whatever the batch size and the number of ranks. Raises `EmptyDataError`."""
    device = engine.args.device
    sums = torch.zeros(3, dtype=torch.float64)  # total, units, rows
    predictions = Predictions(engine.preprocess_logits_for_metrics) if with_logits else None
    for inputs in dataloader:
        batch = inputs["batch"]
        sums[2] += batch.num_units
        for piece in engine.pieces([batch], device)[0]:
            output = engine.loss_step(model, piece.to(device))
            engine.meter.add(output.metrics)
            sums[:2] += torch.stack([output.total.double().cpu(), engine.unit(piece).double().cpu()])
        if predictions is not None:
            predictions.add(model, batch.to(device))
        engine.control = engine.callback_handler.on_prediction_step(engine.args, engine.state, engine.control)
    total, units, rows = all_sum(sums.to(device)).tolist()
    if units == 0:
        raise EmptyDataError("`eval_dataset` has no targets; every row of it is masked or too short.")
    means = {"loss": total / units, **engine.meter.drain()}
    logits, labels = None, None
    if predictions is not None:
        logits, labels, own = predictions.compute(engine.compute_metrics)
        means |= own
    metrics = {name if name.startswith(prefix) else prefix + name: value for name, value in means.items()}
    return EvalLoopOutput(logits, labels, metrics, int(rows))  # pyright: ignore[reportArgumentType]
