"""`python -m peerllm_signaling`."""

import sys

from peerllm_signaling.main import main

sys.exit(main())
