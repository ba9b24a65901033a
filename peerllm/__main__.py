"""`python -m peerllm`."""

import sys

from peerllm.cli.main import main

sys.exit(main())
