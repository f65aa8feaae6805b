"""Test kit: random and adversarial verify steps with poisoned memory, a float64 truth and an error budget.

It is public so that a framework's own tests can use it on its integration:

>>> from treeattn.testing import check_case, random_case
>>> case = random_case(7, dtype=torch.float16)
>>> print(case.describe(), check_case(case, "torch").message)
"""

from .build import build_case, random_case, rebuild
from .cases import Case, Options, Placement
from .exact import expected_weights, probe, seen_by, wrong_weight
from .guard import Guarded
from .run import Result, StaticRun, check_case, previous_of, run_plain, run_static
from .sweep import sweep_case
from .tolerance import Verdict, judge
from .trees import T4, draw_tree, relabel
from .truth import Truth, plain, truth

__all__ = [
    "T4", "Case", "Guarded", "Options", "Placement", "Result", "StaticRun", "Truth", "Verdict", "build_case",
    "check_case", "draw_tree", "expected_weights", "judge", "plain", "previous_of", "probe", "random_case", "rebuild",
    "relabel", "run_plain", "run_static", "seen_by", "sweep_case", "truth", "wrong_weight",
]  # fmt: skip
