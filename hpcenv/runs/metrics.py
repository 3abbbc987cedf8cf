"""The last metrics that a training printed into its log. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A name that trainings use for a metric, and a number near it: `loss 2.44`, `val_loss=0.31`, `acc: 97.1%`.
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_METRIC = re.compile(
    r"(?<![A-Za-z])(?:[A-Za-z0-9]+[_/.-])*(?:loss|acc|accuracy|perplexity|ppl|bleu|rouge|f1|auc|iou|map|mse|mae|rmse|"
    rf"psnr|reward|score|error_rate)(?:[_@/-]?[0-9]{1, 3})?['\"]?\s*[=:]?\s*(?:{_NUMBER}|nan|inf)\b",
    re.IGNORECASE,
)
# Lines of torch and hpcenv themselves.
_OTHER = re.compile(r"^(hpcenv|error\[|[IWEF]\d{4} )")


def last_metrics(lines: Sequence[str]) -> str:
    """Return the last line of a log that has a metric; empty if none has."""
    for line in reversed(lines):
        if len(line) <= 4000 and not _OTHER.match(line) and _METRIC.search(line):
            return line.strip()
    return ""
