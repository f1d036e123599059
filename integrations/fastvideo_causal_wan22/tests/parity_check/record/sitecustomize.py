"""Put first on PYTHONPATH, this keeps what every process draws with ``torch.randn``: FastVideo runs in workers.

Each draw of four or more dimensions becomes ``$RECORD/<process>-<number>.pt``, in order.
"""

from __future__ import annotations

import os
from pathlib import Path

if "RECORD" in os.environ:
    import torch

    _folder, _randn, _count = Path(os.environ["RECORD"]), torch.randn, [0]
    _folder.mkdir(parents=True, exist_ok=True)

    def _recording(*args, **options):  # noqa: ANN202
        noise = _randn(*args, **options)
        if noise.ndim >= 4:
            torch.save(noise.detach().float().cpu(), _folder / f"{os.getpid():08d}-{_count[0]:05d}.pt")
            _count[0] += 1
        return noise

    torch.randn = _recording
