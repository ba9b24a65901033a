"""`python -m peerllm_signaling`."""

from __future__ import annotations

import sys

from peerllm_signaling.main import main

sys.exit(main())
