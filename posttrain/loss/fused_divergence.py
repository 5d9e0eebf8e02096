"""`FusedLinearJSDLoss`. See `posttrain.loss.fused`.

Letters: B rows, T positions, N positions in all, H and G hidden sizes of student and teacher, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from posttrain.errors import ConfigError
from posttrain.loss.divergence import linear_jsd
from posttrain.loss.fused_rows import check_inputs, head_spec
from posttrain.loss.projection import Operands


class FusedLinearJSDLoss(nn.Module):
    """Distillation: weight_hard_loss · NLL + weight_soft_loss · generalised JSD, each a mean over trained tokens.

    Args:
        weight_hard_loss: Of the NLL of `true_labels`, at temperature 1.
        weight_soft_loss: Of the JSD.
        beta: 0 forward KL(teacher ‖ student), 1 reverse KL, between them the generalised JSD.
        ignore_index: Label of positions that are not trained. They are not projected.
        temperature: Of both distributions in the JSD.
        compiled: Ignored.
        chunk_size: Ignored.
        return_soft_hard_loss: Whether to return (loss, soft, hard); the last two without gradient.
        memory_mb: Logits of student and teacher, and the weight gradient, which is formed in the forward pass.

    Raises:
        ConfigError: A constant outside its domain, shapes or vocabularies that do not agree.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        memory_mb: float = 1024,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature}: it must be above 0.")
        if not 0 <= beta <= 1:
            raise ConfigError(f"beta={beta}: it must be in [0, 1]. 0 is the forward KL, 1 the reverse KL.")
        self.weights, self.beta, self.temperature = (weight_hard_loss, weight_soft_loss), beta, temperature
        self.ignore_index, self.return_soft_hard_loss, self.spec = (
            ignore_index,
            return_soft_hard_loss,
            head_spec(memory_mb),
        )

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """student_input [N, H] or [B, T, H], student_weight [V, H], teacher_input [N, G] or [B, T, G], teacher_weight
        [V, G], true_labels [N] or [B, T], biases [V] → loss []."""
        check_inputs(student_input, student_weight, true_labels, ("student_input", "student_weight", "true_labels"))
        check_inputs(teacher_input, teacher_weight, true_labels, ("teacher_input", "teacher_weight", "true_labels"))
        trained = true_labels != self.ignore_index
        labels = true_labels[trained]
        count = max(labels.shape[0], 1)
        hard, soft = self.weights
        student = Operands(student_input[trained], student_weight, student_bias)
        teacher = Operands(teacher_input[trained], teacher_weight, teacher_bias)
        total, hard_sum, soft_sum = linear_jsd(
            student, teacher, labels, self.spec, self.beta, self.temperature, hard / count, soft / count
        )
        return (total, soft_sum / count, hard_sum / count) if self.return_soft_hard_loss else total
