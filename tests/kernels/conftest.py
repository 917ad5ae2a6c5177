from __future__ import annotations

import os

# Triton reads TRITON_INTERPRET when kernels are imported: these tests have a process of their own, which
# test_triton.py starts.
INTERPRETED = ["test_triton_interpreted.py", "test_triton_softmax.py", "test_triton_first_token.py"]
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED
