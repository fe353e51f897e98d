"""Nothing is collected here without PaddleNLP: ``make test-nlp`` runs these tests in an environment that has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("paddlenlp") else ["test_*"]
