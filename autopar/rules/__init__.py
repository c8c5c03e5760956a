"""Operation rules: how each operation may be cut over mesh axes."""

from autopar.rules import table as _table
from autopar.rules.registry import Rule, find, register, rule_of, unknown
from autopar.rules.spec import Call, Factors, Local, Spec

__all__ = ["Call", "Factors", "Local", "Rule", "Spec", "find", "register", "rule_of", "unknown"]
_ = _table
