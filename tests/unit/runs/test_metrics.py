"""The last metrics in a log."""

import pytest

from hpcenv.runs.metrics import last_metrics


@pytest.mark.parametrize(
    "line",
    [
        "[0] step 20  loss 2.4431  0.1 s",
        "[0] final loss 2.4431 (first 4.3812)",
        "Epoch 3: 100%| 12/12 [00:01<00:00, v_num=3, train_loss=0.31]",
        "{'loss': 0.5134, 'learning_rate': 1e-05, 'epoch': 2.99}",
        "[0] val/acc: 97.1%",
        "step 7 loss nan",
    ],
)
def test_a_line_with_a_metric_is_found_behind_others(line):
    after = ["[0] saved", "hpcenv: node n1: loss 3", "error[internal]: loss 2"]
    assert last_metrics(["loss 9", line, *after]) == line


def test_a_log_without_a_metric_has_none():
    assert last_metrics(["[0] step 3", "ValueError: loss is nan", "map the file", "lossless 3"]) == ""
    assert last_metrics([]) == ""
